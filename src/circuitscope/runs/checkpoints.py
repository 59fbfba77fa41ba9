"""The checkpoints and resume points of one run, written by a background thread."""

import os
import queue
import re
import threading
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from circuitscope.errors import Diverged, RunFailed, UserError
from circuitscope.runs.damage import DamagedFile, OtherRun, warn_once
from circuitscope.runs.store import metadata_of, read_tensors, remove_leftovers, write_tensors

_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_WAITING = 2  # snapshots in memory before training waits for the disk

Tensors = dict[str, torch.Tensor]
Coming = Callable[[], Tensors]  # waits until copies are on the CPU, and gives them


class ResumePoint(NamedTuple):
    """Weights and AdamW moments after `step` updates."""

    step: int
    weights: Tensors
    moments: Tensors  # "first.NAME" and "second.NAME"; "clipped": the clipped steps since the last logged one


class Checkpoints:
    """Reads the checkpoints and resume points that a run has saved.

    Args:
        run: the run's folder.
        digest: gives the run's digest. Every file says the digest of its run, and a file of another run is refused.
            Files of runs that are older than this rule do not say it: they are read, with one warning for the run.
    """

    def __init__(self, run: Path, digest: Callable[[], str]):
        self.run, self.digest = run, digest
        self.folder = run / "checkpoints"
        self.resume_folder = run / "resume"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        return _steps_in(self.folder)

    def path(self, step: int) -> Path:
        """The file of a checkpoint."""
        return self.folder / checkpoint_name(step)

    def load(self, step: int) -> Tensors:
        """The weights after `step` updates; the file must be whole and of this run, and its weights must be finite.

        Raises:
            UserError: there is no such checkpoint.
            DamagedFile: there is one, and it cannot be used.
        """
        path = self.path(step)
        if not os.path.lexists(path):
            have = self.steps()
            if not have:
                raise UserError(f"{self.folder} holds no checkpoints")
            nearest = min(have, key=lambda s: abs(s - step))
            raise UserError(
                f"no checkpoint at step {step}; nearest: {nearest} (of {len(have)} from {have[0]} to {have[-1]})"
            )
        return self._read(path, step)

    def file_digest(self, step: int) -> str:
        """The digest over all bytes of a checkpoint that its header gives; the weights are neither read nor checked."""
        path = self.path(step)
        metadata = metadata_of(path)
        self._check(path, step, metadata)
        return metadata["digest"]

    def resume_steps(self) -> list[int]:
        """The steps that have a resume point, in order."""
        return _steps_in(self.resume_folder)

    def load_resume_point(self, step: int) -> ResumePoint:
        """The resume point after `step` updates; its file is checked as that of a checkpoint is."""
        tensors = self._read(self.resume_folder / checkpoint_name(step), step)
        weights = {n.removeprefix("weight."): t for n, t in tensors.items() if n.startswith("weight.")}
        moments = {n: t for n, t in tensors.items() if not n.startswith("weight.")}
        return ResumePoint(step, weights, moments)

    def _read(self, path: Path, step: int) -> Tensors:
        tensors, metadata = read_tensors(path)
        self._check(path, step, metadata)
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise DamagedFile(f"{path} is damaged: {name} holds values that are not finite")
        return tensors

    def _check(self, path: Path, step: int, metadata: dict[str, str]) -> None:
        """Refuses a file that says it is of another step or of another run."""
        if metadata.get("step") != str(step):
            raise DamagedFile(f"{path} is damaged: it holds step {metadata.get('step')}")
        ours = self.digest()
        if "run" not in metadata:
            warn_once(
                f"{self.run}: checkpoints of an earlier release do not say which run they are of;"
                " they are taken for its own"
            )
        elif metadata["run"] != ours:
            raise OtherRun(f"{path} is of another run: its digest is {metadata['run']}, that of this run is {ours}")


class CheckpointWriter(Checkpoints):
    """Saves snapshots in the background. Use it as a context manager: on leaving, it waits for the disk."""

    def __init__(self, run: Path, digest: Callable[[], str], keep_resume: int):
        super().__init__(run, digest)
        self.keep_resume = keep_resume
        self.written = 0
        for folder in (run, self.folder, self.resume_folder):
            folder.mkdir(exist_ok=True)
            remove_leftovers(folder)
        self._queue: queue.Queue[tuple[Path, int, Coming] | None] = queue.Queue(maxsize=_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)

    def __enter__(self) -> "CheckpointWriter":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if kind is None:
            self._raise_error()

    def save(self, step: int, model: nn.Module) -> None:
        """Saves a checkpoint of the weights as they are now."""
        self._put(self.folder / checkpoint_name(step), step, begin_snapshot(step, model.state_dict().items()))

    def save_resume_point(self, step: int, model: nn.Module, moments: Tensors) -> None:
        """Saves the weights and the optimizer as they are now; of the older points, `keep_resume` stay."""
        weights = ((f"weight.{name}", tensor) for name, tensor in model.state_dict().items())
        coming = begin_snapshot(step, [*weights, *moments.items()])
        self._put(self.resume_folder / checkpoint_name(step), step, coming)

    def flush(self) -> None:
        """Waits until everything is on the disk, and raises an error if something could not be written."""
        self._queue.join()
        self._raise_error()

    def _put(self, path: Path, step: int, coming: "Coming") -> None:
        self._raise_error()
        self._queue.put((path, step, coming))

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, Diverged):
                raise error
            raise RunFailed(f"cannot save: {error}; what was saved before is intact") from error

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._write(*item)
            except Exception as error:
                self._error = error
            finally:
                self._queue.task_done()

    def _write(self, path: Path, step: int, coming: "Coming") -> None:
        tensors = coming()
        if path.exists():
            if self._holds(path, step, tensors):
                self.written += 1
                return
            _set_aside(path)
        write_checkpoint(path, step, tensors, self.digest())
        if path.parent == self.folder:
            self.written += 1
        else:
            have = self.resume_steps()
            for old in set(have) - set(spread(have, self.keep_resume)):
                (self.resume_folder / checkpoint_name(old)).unlink(missing_ok=True)

    def _holds(self, path: Path, step: int, tensors: Tensors) -> bool:
        """Whether the file already holds exactly these tensors, as it does where a resumed run repeats steps."""
        try:
            saved = self._read(path, step)
        except (DamagedFile, OSError):
            return False
        return saved.keys() == tensors.keys() and all(torch.equal(saved[n], t) for n, t in tensors.items())


def checkpoint_name(step: int) -> str:
    """The name of the file that holds a step."""
    return f"step-{step:08d}.safetensors"


def write_checkpoint(path: Path, step: int, tensors: Tensors, run: str) -> None:
    """Writes a file of tensors that says which step it holds, and of which run, by the run's digest."""
    write_tensors(path, tensors, {"format": "circuitscope-1", "step": str(step), "run": run})


def _steps_in(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))


def spread(steps: list[int], keep: int) -> list[int]:
    """Which `keep` resume points stay: the newest, and earlier ones at even distances.

    It drops, one at a time, the point whose absence leaves the smallest gap; gaps count from step 0. When it is
    applied after every save, the largest gap stays within about twice the smallest possible one.
    """
    kept = sorted(steps)
    while len(kept) > keep:
        before = [0, *kept]
        gaps = [kept[i + 1] - before[i] for i in range(len(kept) - 1)]
        if not gaps:
            break
        del kept[gaps.index(min(gaps))]
    return kept


def snapshot(tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """Copies of the tensors, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


def begin_snapshot(step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Coming:
    """Begins to copy tensors to the CPU, and gives what waits for the copies and returns them.

    From a CUDA device they go to pinned memory on a stream of their own, beside the steps that follow. What comes from
    a device is looked at only once it is here; weights that are not finite raise Diverged there.
    """
    named = [(name, tensor.detach()) for name, tensor in tensors]
    away = [tensor.device for _, tensor in named if tensor.device.type != "cpu"]
    if not away:
        copies = snapshot(named)
        return lambda: copies
    if away[0].type != "cuda":
        return partial(_finite, step, snapshot(named))
    arrive = _begin_copies(named, away[0])
    return lambda: _finite(step, arrive())


def _begin_copies(named: list[tuple[str, torch.Tensor]], device: torch.device) -> Coming:
    """Copies to pinned memory on a side stream. The steps that follow change the weights, so a clone is copied."""
    side, here = _side_stream(device), torch.cuda.current_stream(device)
    clones = [tensor.clone(memory_format=torch.contiguous_format) for _, tensor in named]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        copies = [torch.empty(clone.shape, dtype=clone.dtype, pin_memory=True) for clone in clones]
        for copy, clone in zip(copies, clones, strict=True):
            copy.copy_(clone, non_blocking=True)
            if clone.is_cuda:
                clone.record_stream(side)  # its memory is not given away before the copy is done
        done = torch.cuda.Event()
        done.record(side)

    def arrive() -> Tensors:
        done.synchronize()
        return {name: copy for (name, _), copy in zip(named, copies, strict=True)}

    return arrive


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _finite(step: int, tensors: Tensors) -> Tensors:
    """The tensors, if all their numbers are finite."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise Diverged(f"{name} is not finite at step {step}: the run diverged; try a smaller train.lr")
    return tensors


def _set_aside(path: Path) -> None:
    """Moves a file that differs out of the way under a free name: saved data is never overwritten."""
    folder = path.parent / "replaced"
    folder.mkdir(exist_ok=True)
    number = 1
    while (aside := folder / f"{path.stem}.{number}{path.suffix}").exists():
        number += 1
    path.rename(aside)
