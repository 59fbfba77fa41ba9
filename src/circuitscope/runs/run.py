"""A run on disk: creates one, finds the newest, and reads its config, metrics and checkpoints.

runs/NAME/
  config.yaml  environment.json  status.json  metrics.jsonl
  checkpoints/step-*.safetensors  resume/step-*.safetensors
"""

import json
import os
import platform
import re
import shutil
import sys
import time
import unicodedata
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
from filelock import FileLock, Timeout

from circuitscope.arguments import explained
from circuitscope.config import RunConfig
from circuitscope.devices import reading_device
from circuitscope.errors import Busy, UserError, shown, unknown
from circuitscope.runs.checkpoints import Checkpoints, Tensors
from circuitscope.runs.damage import DamagedFile, check_regular, warn_once
from circuitscope.runs.metrics import last_step, read_metrics
from circuitscope.runs.store import overwrite_text, write_text
from circuitscope.tasks import Batch, Split

if TYPE_CHECKING:
    import pandas as pd

    from circuitscope.models.stack import HookedStack

RunState = Literal["created", "running", "finished", "stopped", "diverged", "failed"]

_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")  # control characters, bytes that are no UTF-8, separators of lines and paragraphs
_PACKAGES = ("circuitscope", "torch", "transformer-lens", "numpy", "safetensors")


class Run:
    """A run, given by its folder: `Run("runs/NAME")`; a name alone is looked for among all runs, in `runs_root()`."""

    def __init__(self, path: str | Path):
        if not isinstance(path, str | os.PathLike):
            raise UserError(f"expected a run or its folder, such as runs/NAME, got {shown(path)}")
        self.path = _found(Path(os.path.expanduser(path)))
        config = self.path / "config.yaml"
        if not os.path.isfile(config):  # False also for a name that is too long
            others = [] if os.path.lexists(self.path) else [r.path.name for r in runs_in(self.path.parent)]
            if others:
                raise unknown("run", self.path.name, others)
            if not os.path.lexists(config):
                what = (
                    "a file, and a run is a folder" if os.path.isfile(self.path) else "not a run: it has no config.yaml"
                )
                raise UserError(f"{self.path} is {what}")
            raise UserError(f"{self.path} is not a run: {_why_unreadable(config)}")
        _check_text(self.path)
        self.checkpoints = Checkpoints(self.path, lambda: self.digest)

    def __repr__(self) -> str:
        try:
            mixers = ", ".join(dict.fromkeys(m.name for m in self.config.model.mixers))
            what = f"{mixers} on {self.config.task.name}"
        except UserError:
            what = "config.yaml cannot be read"
        status = self.status
        how = f"{status['state']} at step {status['step']}" if {"state", "step"} <= status.keys() else "not started"
        return f"Run({str(self.path)!r}: {what}, {how}, {len(self.steps)} checkpoints)"

    @classmethod
    def of(cls, run: "Run | str | Path") -> "Run":
        """The run itself, or the run in this folder."""
        return run if isinstance(run, Run) else cls(run)

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def config(self) -> RunConfig:
        """The complete config of the run, which is written when the run is created and never changes."""
        return RunConfig.load_complete(self.path / "config.yaml")

    @cached_property
    def digest(self) -> str:
        """The run's identity: a short digest of what determines its weights."""
        return self.config.digest

    @property
    def environment(self) -> dict[str, Any]:
        """The versions, device and number of threads that the run was started with, and when."""
        return _read_json(self.path / "environment.json")

    @property
    def created(self) -> int:
        """When the run was created, in nanoseconds since 1970; 0 if that is not known."""
        when = self.environment.get("created")
        return when if isinstance(when, int) else 0

    @property
    def threads(self) -> int | None:
        """The number of CPU threads that the run was started with, if that is known."""
        number = self.environment.get("threads")
        return number if isinstance(number, int) and 1 <= number <= 4096 else None

    @property
    def status(self) -> dict[str, Any]:
        """`state` (running, killed, finished, stopped, diverged, failed), `step`, `message`, read at each access.

        A run is killed if it says that it is running, and its process on this machine is no longer there.
        A run that finished without learning its task also has `looks`, the kind of end (training/diagnosis.py), and
        the message says what to try. While a run is training, `step` is the step of the last row of its metrics.
        """
        found = _read_json(self.path / "status.json")
        if found.get("state") == "running":
            known = [step for step in (found.get("step"), last_step(self.path)) if isinstance(step, int)]
            found["step"] = max(known, default=0)
            if found.get("host") == platform.node() and not _is_alive(found.get("pid")):
                found["state"] = "killed"
        return found

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint."""
        return self.checkpoints.steps()

    @property
    def metrics(self) -> "pd.DataFrame":
        """metrics.jsonl as a table; `circuitscope.runs.metrics` says what the columns are."""
        import pandas as pd

        return pd.DataFrame(read_metrics(self.path, self.config.task.metric))

    def batch(self, step: int = 0, *, split: Split = "test", size: int | None = None) -> Batch:
        """Examples of the run's task, drawn with its seed; by default those of the test split, never trained on.

        Args:
            step: which batch, from 0.
            split: "train", "validation" or "test". With split="train" and the run's own batch size, this is the batch
                of that step of training.
            size: examples per batch; 64 by default.
        """
        return self.config.task.batch(step, split=split, size=size, seed=self.config.train.batch_seed)

    def load(self, step: int | str | None = None) -> "HookedStack":
        """The model with the weights after `step` updates, by default of the last checkpoint, in eval mode.

        It is on the CPU, or where `circuitscope.reading_on` says. The weights are as they were saved, in float32, also
        where torch's default dtype is another: for float64, call `.double()` on the model.
        """
        if not self.steps:
            raise UserError(f"{self.path} has no checkpoints")
        step = self.steps[-1] if step is None else _whole(step)
        model = self.empty_model()
        try:
            self.load_into(model, step)
        except DamagedFile as error:
            raise UserError(str(error)) from None
        return model

    def empty_model(self) -> "HookedStack":
        """A model that the run's checkpoints fit, in float32, in eval mode and where it is to be read."""
        from circuitscope.models.build import build_model
        from circuitscope.models.dtype import default_dtype

        with default_dtype(torch.float32):
            return build_model(self.config.model).eval().to(reading_device())

    def load_into(self, model: "HookedStack", step: int) -> None:
        """Gives a model the weights after `step` updates.

        Raises:
            DamagedFile: the checkpoint is damaged, of another run, or does not fit the model.
        """
        path, weights = self.checkpoints.path(step), self.checkpoints.load(step)
        if why := _misfit(weights, model.state_dict()):
            raise DamagedFile(f"{path} does not fit the model of the run's config: {why}")
        model.load_state_dict(weights)

    def write_status(self, state: RunState, step: int, message: str = "", looks: str = "") -> None:
        """Records how far the run has come, and how it ended."""
        process = {"pid": os.getpid(), "host": platform.node()}
        record = {"state": state, "step": step, "message": message, "looks": looks, **process}
        text = json.dumps(record, indent=1) + "\n"
        try:
            write_text(self.path / "status.json", text)
        except OSError:
            if not (self.path / "status.json").exists():
                raise
            overwrite_text(self.path / "status.json", text)

    def lock(self) -> FileLock:
        """Acquires the lock that a process holds while it trains; a second process is refused."""
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise Busy(f"{self.path} is being written by process {self.status.get('pid', 'unknown')}") from None
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None
        return lock


def runs_root(root: str | Path | None = None) -> Path:
    """Where runs live: `root`, else $CIRCUITSCOPE_RUNS, else ./runs."""
    return Path(root or os.environ.get("CIRCUITSCOPE_RUNS") or "runs")


def runs_in(root: str | Path | None = None) -> list[Run]:
    """All runs in a folder in the order in which they were created; ties are ordered by name."""
    folder = runs_root(root)
    found = []
    try:
        for config in folder.glob("[!.]*/config.yaml"):
            if config.is_file():
                try:
                    found.append(Run(config.parent))
                except UserError as error:
                    warn_once(f"{error}; it is left out")
    except OSError:
        return []
    return sorted(found, key=lambda r: (r.created, r.name))


@explained
def newest_run(root: str | Path | None = None) -> Run:
    """The run that was created last. It is what a command uses when no run is named."""
    found = runs_in(root)
    if not found:
        raise UserError(f"no runs in {runs_root(root)}; make one with: circuitscope train")
    return found[-1]


def check_free(name: str | None, root: str | Path | None = None) -> None:
    """Refuses a name that no new run can have; without a name there is always one."""
    _check_text(runs_root(root))
    if name is None:
        return
    if not (re.fullmatch(r"[^/\\.][^/\\]*", name) and name.isprintable() and name.strip()):
        raise UserError(
            f"a run's name is one folder name of printable characters that does not start with a dot, got {shown(name)}"
        )
    path = runs_root(root) / name
    try:
        exists = path.exists()
    except OSError as error:
        raise UserError(f"cannot create a run in {path.parent}: {error.strerror}") from None
    if exists:
        raise UserError(f"{path} exists already; resume it with --resume {path}, or give another --name")


def create_run(
    config: RunConfig, *, root: str | Path | None = None, name: str | None = None, **environment: Any
) -> Run:
    """Creates the folder of a new run in one step: it appears complete with its config, or not at all.

    By default its name is MIXER-TASK-NUMBER with the next free number. It never touches an existing run.
    """
    check_free(name, root)
    folder = runs_root(root)
    temporary = folder / f".new-{os.getpid()}-{time.time_ns()}"
    try:
        temporary.mkdir(parents=True)
        (temporary / "checkpoints").mkdir()
        (temporary / "resume").mkdir()
        write_text(temporary / "config.yaml", config.dump())
        write_text(temporary / "environment.json", json.dumps(_environment() | environment, indent=1) + "\n")
        return Run(_move_into_place(temporary, folder, name, config))
    except OSError as error:
        raise UserError(f"cannot create a run in {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, folder: Path, name: str | None, config: RunConfig) -> Path:
    mixers = "-".join(dict.fromkeys(m.name for m in config.model.mixers))
    number = 1
    while True:
        target = folder / (name or f"{mixers}-{config.task.name}-{number}")
        try:
            if target.exists():  # rename would replace an empty folder
                raise FileExistsError
            temporary.rename(target)
            return target
        except OSError as error:
            if not (isinstance(error, FileExistsError) or target.exists()):
                raise
            if name is not None:
                raise UserError(f"{target} exists already; give another --name") from None
            number += 1


def _environment() -> dict[str, Any]:
    return {
        "created": time.time_ns(),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }


def _found(path: Path) -> Path:
    """The path itself, or the run of that name in `runs_root()` where the path is only a name and no folder."""
    named = runs_root() / path
    return named if len(path.parts) == 1 and not os.path.isdir(path) and os.path.isdir(named.parent) else path


def _whole(step: object) -> int:
    """A step that may come as text, or as a number from a table."""
    text = str(step).strip().removesuffix(".0")
    if isinstance(step, bool) or not text.removeprefix("-").isdecimal():
        raise UserError(f"step: expected a whole number, such as 100, got {shown(step)}")
    return int(text)


def _read_json(path: Path) -> dict[str, Any]:
    """What a small file says; nothing where it is missing, and nothing with a warning where it is damaged."""
    if not os.path.lexists(path):
        return {}
    try:
        check_regular(path)
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise DamagedFile(f"{path} is not a JSON object")
        return data
    except DamagedFile as error:
        warn_once(f"{error}; it is not used")
    except (OSError, ValueError, RecursionError):
        warn_once(f"{path} is damaged and is not used")
    return {}


def _is_alive(pid: object) -> bool:
    """Whether a process of this number exists; of a number that is none, nothing is known."""
    return not isinstance(pid, int) or not 0 < pid < 2**31 or psutil.pid_exists(pid)


def _why_unreadable(path: Path) -> str:
    try:
        check_regular(path)
    except DamagedFile as error:
        return str(error)
    return f"{path} cannot be read"


def _check_text(path: Path) -> None:
    """Refuses a path that cannot be written as text in one line: tables, figures and messages name the run by it."""
    if any(unicodedata.category(letter) in _NO_TEXT for letter in str(path)):
        raise UserError(
            f"the path of a run must be printable text in UTF-8, got {str(path)!a}; give another name or folder"
        )


def _misfit(weights: "Tensors", wanted: "Tensors") -> str:
    """How weights differ from those that a model has, or ""; the first difference is enough."""
    for name, tensor in wanted.items():
        if name not in weights:
            return f"{name} is missing"
        if weights[name].shape != tensor.shape:
            return f"{name} has the shape {_shape(weights[name])} in place of {_shape(tensor)}"
    return next((f"the model has no {name}" for name in weights if name not in wanted), "")


def _shape(tensor: torch.Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "of one number"
