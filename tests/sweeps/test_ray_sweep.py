"""A sweep on a real Ray cluster of two nodes: workers die, nodes go, drivers are killed, and every bit is the same."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
from test_local_sweep import Quiet, weights, write_grid

from circuitscope.cli.executors import Where, rows_from
from circuitscope.errors import UserError
from circuitscope.runs.run import Run
from circuitscope.sweeps import ray as ours
from circuitscope.sweeps.executor import ONE_THREAD, Job
from circuitscope.sweeps.local import LocalExecutor
from circuitscope.sweeps.ray import RayExecutor
from circuitscope.sweeps.sweep import Sweep

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
LEAN = {"worker_niceness": 0, "prestart_worker_first_driver": False}
LONG = {"steps": 400, "resume_every": 20}


@pytest.fixture(scope="module")
def cluster():
    """A head and a second node on this machine, one core each; this process is connected to them."""
    import ray
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    found = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": LEAN})
    found.add_node(**NODE)
    ray.init(found.address, log_to_driver=False, logging_level="ERROR")
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Sweep:
    """Two trials, trained by the local executor."""
    folder = tmp_path_factory.mktemp("local")
    grid = write_grid(folder / "two", train=LONG, axes={"train.seed": [0, 1]})
    found = Sweep.open(grid, folder / "runs")
    assert [row["state"] for row in found.go(LocalExecutor(1), Quiet())] == ["finished"] * 2
    return found


def same_grid(local: Sweep, folder: Path) -> Sweep:
    """The same grid with no runs and no results."""
    grid = write_grid(folder / "two", train=LONG, axes={"train.seed": [0, 1]})
    found = Sweep.open(grid, folder / "runs")
    assert [t.digest for t in found.grid.trials] == [t.digest for t in local.grid.trials]
    return found


def bits_are_equal(one: Sweep, other: Sweep) -> bool:
    return all(
        torch.equal(tensor, weights(Run(other.runs / trial.digest))[name])
        for trial in one.grid.trials
        for name, tensor in weights(Run(one.runs / trial.digest)).items()
    )


def process_of(found: Sweep, digest: str) -> psutil.Process:
    return psutil.Process(Run(found.runs / digest).status["pid"])


@contextmanager
def meanwhile(action):
    """Does something in a thread while the body runs; what goes wrong there fails the test."""
    wrong = []

    def act():
        try:
            action()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join()
    assert not wrong, wrong


def wait_until(condition, seconds=300.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


def started(watch):
    """The digests of trials that are well under way."""
    return sorted({move.digest for move in watch.moves if move.step > 40})


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_every_bit_is_that_of_the_local_executor(cluster, local, tmp_path):
    found, watch = same_grid(local, tmp_path), Quiet()

    def kill():
        wait_until(lambda: started(watch))
        process_of(found, started(watch)[0]).kill()

    with meanwhile(kill):
        rows = list(found.go(RayExecutor(), watch))
    assert [row["state"] for row in rows] == ["finished"] * 2
    assert len(watch.starts) == 3
    assert bits_are_equal(local, found)
    ours_, theirs = (one.results.rows[one.grid.trials[0].digest] for one in (found, local))
    assert {k: v for k, v in ours_.items() if k != "seconds"} == {k: v for k, v in theirs.items() if k != "seconds"}
    assert not list(found.runs.glob(".seen-*"))


def warm_up() -> None:
    """Starts a worker on every node, so that two trials start together: one of them would wait for a free worker."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=1, runtime_env={"env_vars": ONE_THREAD})(loaded)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    assert ray.get([task.options(scheduling_strategy=one).remote() for one in there]) == [True] * 2


def loaded() -> bool:
    import circuitscope.training.trainer

    return circuitscope.training.trainer is not None


@pytest.mark.slow
def test_trials_of_a_node_that_is_gone_go_on_elsewhere(cluster, local, tmp_path):
    warm_up()
    found, watch = same_grid(local, tmp_path), Quiet()
    node = cluster.list_all_nodes()[-1]
    raylet = node.all_processes["raylet"][0].process.pid

    def is_there(digest):
        with suppress(psutil.NoSuchProcess):
            return process_of(found, digest).ppid() == raylet

    def remove():
        wait_until(lambda: any(is_there(digest) for digest in started(watch)))
        cluster.remove_node(node, allow_graceful=False)

    try:
        with meanwhile(remove):
            rows = list(found.go(RayExecutor(), watch))
    finally:
        cluster.add_node(**NODE)
    assert [row["state"] for row in rows] == ["finished"] * 2
    assert len(watch.starts) == 3
    assert bits_are_equal(local, found)


@pytest.mark.slow
def test_after_the_drivers_death_and_after_ctrl_c_the_same_command_goes_on(cluster, local, tmp_path):
    found = same_grid(local, tmp_path)
    command = [sys.executable, "-c", "from circuitscope.cli.main import main; main()", "sweep", str(tmp_path / "two")]
    command += ["--runs", str(tmp_path / "runs"), "--executor", "ray", "--address", cluster.address]
    trials = [found.runs / trial.digest for trial in found.grid.trials]

    def logged() -> int:
        """How much the trial that is furthest has logged."""
        return max((len(list(path.open())) for p in trials if (path := p / "metrics.jsonl").exists()), default=0)

    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: logged() > 20)
    driver.kill()
    driver.communicate()
    before = logged()

    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: logged() > before + 10)
    driver.send_signal(signal.SIGINT)
    began = time.monotonic()
    said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130, said
    assert time.monotonic() - began < 20
    assert "the same command goes on" in said
    assert "stopped" in [Run(path).status["state"] for path in trials if path.exists()]
    assert len(list(found.runs.glob(".seen-*"))) == 1  # of the driver that could not clean up

    rows = list(Sweep.open(tmp_path / "two", tmp_path / "runs").go(RayExecutor(), Quiet()))
    assert {row["state"] for row in rows} == {"finished"}
    assert bits_are_equal(local, found)


def dies(plain, token, mailbox):
    os._exit(7)


def sleeps(plain, token, mailbox):
    mailbox.tell.remote({"started": plain["digest"]})
    time.sleep(4)
    return {"row": {"digest": plain["digest"], "state": "finished"}}


@pytest.mark.slow
def test_a_trial_whose_worker_dies_three_times_is_a_failed_row(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "work", dies)
    (row,) = RayExecutor()([Job("a", "", {}, str(tmp_path))], Quiet())
    assert row["state"] == "failed"
    assert "its worker died 3 times" in row["message"]
    assert "\n" not in row["message"]


@pytest.mark.slow
def test_after_the_minutes_given_those_that_run_end_and_those_that_wait_are_taken_back(cluster, tmp_path, monkeypatch):
    jobs, watch = [Job(str(number), "", {}, str(tmp_path)) for number in range(6)], Quiet()

    class Clock:
        """An hour goes by as soon as something has started."""

        @staticmethod
        def monotonic():
            return time.monotonic() + (3600 if watch.starts else 0)

    monkeypatch.setattr(ours, "time", Clock)
    monkeypatch.setattr(ours, "work", sleeps)
    rows = list(RayExecutor(minutes=30)(jobs, watch))
    assert 0 < len(rows) < 6
    assert sorted(watch.starts) == sorted(row["digest"] for row in rows)


@pytest.mark.slow
def test_a_node_that_does_not_see_the_runs_is_named_in_one_line(cluster, local, tmp_path, monkeypatch):
    @contextmanager
    def nothing(folders):
        yield ".seen-by-nobody"

    monkeypatch.setattr(ours, "_token", nothing)
    with pytest.raises(UserError, match=f"{socket.gethostname()} does not see .* on a path that all nodes of Ray see"):
        list(same_grid(local, tmp_path).go(RayExecutor(), Quiet()))


@pytest.mark.slow
def test_a_job_that_no_node_has_room_for_is_refused(cluster, local, tmp_path):
    with pytest.raises(UserError, match="no node of Ray has 1 cores and 3 GPUs"):
        list(same_grid(local, tmp_path).go(RayExecutor(gpus=3), Quiet()))


@pytest.mark.slow
def test_runs_are_analyzed_on_the_cluster_with_the_same_tables(cluster, local):
    from circuitscope.analysis.checkpoints.runner import analysis_results

    runs = [Run(local.runs / trial.digest) for trial in local.grid.trials]
    names, watch = ["scores", "circuit", "phases"], Quiet()
    jobs = [Job.analysis(run, names, "0:400:200", 8) for run in runs]
    rows = list(rows_from(Where.ray)(jobs, watch))
    assert [row["state"] for row in rows] == ["finished"] * 2, rows
    assert {move.metric for move in watch.moves} >= {"scores", "circuit"}
    for run in runs:
        there = {path.name: pd.read_parquet(path) for path in (run.path / "analysis").glob("*.parquet")}
        for path in (run.path / "analysis").glob("*.parquet"):
            path.unlink()
        analysis_results(run, names, steps="0:400:200", sequences=8)
        assert sorted(there) == ["circuit-8.parquet", "scores-8.parquet"]  # phases of some checkpoints are not kept
        for name, table in there.items():
            pd.testing.assert_frame_equal(table, pd.read_parquet(run.path / "analysis" / name), check_exact=True)
