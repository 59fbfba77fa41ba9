"""A sweep as a job array of Slurm: what its script says, what its tasks do, and a real Slurm where there is one."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from test_local_sweep import Quiet, weights, write_grid

from circuitscope.errors import UserError
from circuitscope.runs.run import Run
from circuitscope.sweeps.executor import Job
from circuitscope.sweeps.slurm import SlurmExecutor, _seconds
from circuitscope.sweeps.sweep import Sweep
from circuitscope.training import trainer


@pytest.fixture
def odd(tmp_path) -> Path:
    """A folder whose name a shell could misread."""
    folder = tmp_path / "it's $HOME & more"
    folder.mkdir()
    return folder


def sweep_in(folder: Path, **train) -> SlurmExecutor:
    grid = write_grid(folder / "two", train=train, axes={"train.seed": [0, 1]})
    return SlurmExecutor(Sweep.open(grid, folder / "runs"), grid)


def jobs_of(array: SlurmExecutor) -> list[Job]:
    return [Job.of(trial, array.sweep.grid, array.sweep.runs) for trial in array.sweep.missing]


def write_script(array: SlurmExecutor) -> Path:
    array.path.parent.mkdir(parents=True, exist_ok=True)
    array.path.write_text(array.script(jobs_of(array)))
    return array.path


def program(folder: Path, name: str, text: str) -> None:
    """Puts a program of that name into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def wait_until(condition, seconds=300.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


def test_the_script_is_bash_and_names_every_trial_once(odd):
    array = sweep_in(odd)
    array.most, array.time, array.gpus, array.options = 5, "4:00:00", 2, ["--account=me"]
    path = write_script(array)
    assert subprocess.run(["bash", "-n", path], check=False, capture_output=True).stderr == b""
    text = path.read_text()
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--array=0-1%5", "--gpus=2", "--time=4:00:00", "--account=me", "--requeue"} <= set(options)
    assert all(text.count(trial.digest) == 1 for trial in array.sweep.grid.trials)


@pytest.mark.slow
def test_a_task_near_its_time_limit_is_requeued_and_its_trial_goes_on_to_the_same_bits(odd, tmp_path):
    array = sweep_in(odd, steps=300)
    path, run = write_script(array), Run
    program(tmp_path / "bin", "scontrol", f'echo "$@" >> {tmp_path}/requeued')
    first = array.sweep.grid.trials[0]
    slurm = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "0", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    def start() -> "subprocess.Popen[str]":
        command = ["bash", str(path)]
        return subprocess.Popen(command, env={**os.environ, **slurm}, cwd="/", stdout=subprocess.PIPE, text=True)

    task, metrics = start(), array.sweep.runs / first.digest / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 8)
    task.send_signal(signal.SIGUSR1)
    said, _ = task.communicate()
    assert task.returncode == 0, said
    assert (tmp_path / "requeued").read_text() == "requeue 17_0\n"
    assert run(metrics.parent).status["state"] == "stopped"
    assert 0 < run(metrics.parent).status["step"] < 300

    said, _ = (again := start()).communicate()
    assert again.returncode == 0, said
    assert "finished" in said
    alone = trainer.train(first.config, root=tmp_path / "alone")
    mine, theirs = weights(alone), weights(run(metrics.parent))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert array.sweep.collect() == 1


def test_an_array_is_submitted_once_and_its_number_is_kept(tmp_path, monkeypatch):
    array = sweep_in(tmp_path)
    program(tmp_path / "bin", "sbatch", f'echo "$@" >> {tmp_path}/submitted; echo "123;cluster"')
    program(tmp_path / "bin", "squeue", "echo 123_0 PENDING")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert list(array.sweep.go(array, Quiet())) == []
    assert array.submitted == "123"
    assert (tmp_path / "submitted").read_text() == f"--parsable {array.path}\n"
    with pytest.raises(UserError, match="job 123 of this sweep is still in the queue; end it with: scancel 123"):
        list(array.sweep.go(sweep_in(tmp_path), Quiet()))
    program(tmp_path / "bin", "squeue", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    list(array.sweep.go(sweep_in(tmp_path), Quiet()))
    assert len((tmp_path / "submitted").read_text().splitlines()) == 2


def test_without_sbatch_one_line_says_where_the_script_is(tmp_path, monkeypatch):
    array = sweep_in(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sbatch is not on this machine; where it is, submit with: sbatch .*array\.sh"):
        list(array.sweep.go(array, Quiet()))
    assert array.path.exists()


@pytest.mark.parametrize(("time", "seconds"), [("5", 300), ("5:30", 330), ("1:0:0", 3600), ("1-2", 93600)])
def test_times_are_read_as_slurm_reads_them(time, seconds):
    assert _seconds(time) == seconds


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"time": "soon"}, "--time: expected minutes"),
        ({"time": "1"}, "at least 5 minutes"),
        ({"options": ["account=x"]}, "--slurm: expected one option of sbatch"),
        ({"options": ["--a\nrm"]}, "--slurm: expected one option of sbatch"),
    ],
)
def test_options_that_slurm_would_misread_are_refused(options, says, tmp_path):
    array = sweep_in(tmp_path)
    with pytest.raises(UserError, match=says):
        SlurmExecutor(array.sweep, array.grid, **options)


# A real Slurm of one node, started for the test.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """munged, slurmctld and slurmd on this machine; SLURM_CONF points to them."""
    daemons = {name: shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("munged", "slurmctld", "slurmd")}
    if not all(daemons.values()):
        pytest.skip("*** NO SLURM: the job array is NOT tested through a real one; apt-get install slurm-wlm munge ***")
    for name in ("state", "spool", "munge"):
        (tmp_path / name).mkdir(mode=0o700)
    key, socket_ = tmp_path / "munge/key", tmp_path / "munge/socket"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    host, user = socket.gethostname(), subprocess.check_output(["id", "-un"], text=True).strip()
    (tmp_path / "slurm.conf").write_text(
        f"""
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={socket_},cred_expire=5
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
StateSaveLocation={tmp_path}/state
SlurmdSpoolDir={tmp_path}/spool
SlurmctldPidFile={tmp_path}/slurmctld.pid
SlurmdPidFile={tmp_path}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    )
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    files = [f"--{what}-file={tmp_path}/munge/{what}" for what in ("pid", "log", "seed")]
    commands = [
        [daemons["munged"], "-F", "--force", f"--key-file={key}", f"--socket={socket_}", *files],
        [daemons["slurmctld"], "-D", "-c"],
        [daemons["slurmd"], "-D"],
    ]
    running = []
    try:
        with (tmp_path / "daemons.log").open("w") as log:
            for command in commands:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))
                wait_until(socket_.exists)
        wait_until(lambda: "idle" in tell("sinfo"))
        yield
        tell("scancel", "--me")
        wait_until(lambda: not tell("squeue", "-h").strip())
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()


def tell(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.slow
def test_a_real_slurm_runs_the_array_and_requeues_the_one_task_that_meets_its_limit(slurm, odd, tmp_path):
    array = sweep_in(odd, steps=300)
    list(array.sweep.go(array, Quiet()))
    job, first = array.submitted, array.sweep.grid.trials[0].digest
    metrics = array.sweep.runs / first / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 8)
    tell("scancel", "--signal=USR1", "--batch", f"{job}_0")
    wait_until(lambda: Run(metrics.parent).status["state"] == "stopped")
    wait_until(lambda: not tell("squeue", "-h", "-j", job).strip())
    again = Sweep.open(array.grid, odd / "runs")
    assert again.collect() == 2
    said = [(array.path.parent / f"slurm-{job}_{number}.out").read_text() for number in (0, 1)]
    assert [text.count("goes back into the queue") for text in said] == [1, 0]
    assert [text.count("finished") for text in said] == [1, 1]
    alone = trainer.train(array.sweep.grid.trials[0].config, root=tmp_path / "alone")
    mine, theirs = weights(alone), weights(Run(metrics.parent))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
