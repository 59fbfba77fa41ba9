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
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout

from circuitscope.config import RunConfig
from circuitscope.errors import UserError, unknown
from circuitscope.runs.checkpoints import Checkpoints
from circuitscope.runs.metrics import read_metrics
from circuitscope.runs.store import DamagedFile, overwrite_text, write_text

if TYPE_CHECKING:
    import pandas as pd

    from circuitscope.models.hooked_lm import HookedLM

RunState = Literal["created", "running", "finished", "stopped", "diverged", "failed"]

_PACKAGES = ("circuitscope", "torch", "transformer-lens", "numpy", "safetensors")


class Run:
    """A run, given by its folder: `Run("runs/NAME")`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not (self.path / "config.yaml").is_file():
            others = [r.path.name for r in runs_in(self.path.parent)]
            if others:
                raise unknown("run", self.path.name, others)
            raise UserError(f"{self.path} is not a run: it has no config.yaml")
        self.checkpoints = Checkpoints(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

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
        return RunConfig.load(self.path / "config.yaml")

    @property
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
    def status(self) -> dict[str, Any]:
        """`state` (running, finished, stopped, diverged, failed), `step`, `message`."""
        return _read_json(self.path / "status.json")

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint."""
        return self.checkpoints.steps()

    @property
    def metrics(self) -> "pd.DataFrame":
        """metrics.jsonl as a table; `circuitscope.runs.metrics` says what the columns are."""
        import pandas as pd

        return pd.DataFrame(read_metrics(self.path))

    def load(self, step: int | None = None) -> "HookedLM":
        """The model with the weights after `step` updates, by default of the last checkpoint, in eval mode."""
        from circuitscope.models.hooked_lm import HookedLM

        if step is None:
            if not self.steps:
                raise UserError(f"{self.path} has no checkpoints")
            step = self.steps[-1]
        try:
            weights = self.checkpoints.load(step)
        except DamagedFile as error:
            raise UserError(str(error)) from None
        model = HookedLM(self.config.model)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            what = " ".join(str(error).split())
            raise UserError(f"checkpoint {step} of {self.path} does not fit the model of its config: {what}") from None
        return model.eval()

    def write_status(self, state: RunState, step: int, message: str = "") -> None:
        """Records how far the run has come, and how it ended."""
        record = {"state": state, "step": step, "message": message, "pid": os.getpid()}
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
            raise UserError(f"{self.path} is being written by process {self.status.get('pid', 'unknown')}") from None
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None
        return lock


def runs_root(root: str | Path | None = None) -> Path:
    """Where runs live: `root`, else $CIRCUITSCOPE_RUNS, else ./runs."""
    return Path(root or os.environ.get("CIRCUITSCOPE_RUNS") or "runs")


def runs_in(root: str | Path | None = None) -> list[Run]:
    """All runs in a folder in the order in which they were created; ties are ordered by name."""
    folder = runs_root(root)
    try:
        found = [Run(c.parent) for c in folder.glob("[!.]*/config.yaml") if c.is_file()]
    except OSError:
        return []
    return sorted(found, key=lambda r: (r.created, r.name))


def newest_run(root: str | Path | None = None) -> Run:
    """The run that was created last. It is what a command uses when no run is named."""
    found = runs_in(root)
    if not found:
        raise UserError(f"no runs in {runs_root(root)}; make one with: circuitscope train")
    return found[-1]


def check_free(name: str | None, root: str | Path | None = None) -> None:
    """Refuses a name that no new run can have; without a name there is always one."""
    if name is None:
        return
    if not re.fullmatch(r"[^/\\\0.][^/\\\0]*", name):
        raise UserError(f"a run's name is one folder name that does not start with a dot, got '{name}'")
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
