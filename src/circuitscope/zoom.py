"""Dense checkpoints around the loss bump: find the bump, repeat that stretch of the run, and save every few steps."""

from dataclasses import dataclass
from pathlib import Path

from circuitscope.analysis.phases.detection import Transition
from circuitscope.analysis.phases.timeline import loss_transitions
from circuitscope.analysis.phases.verdict import steepest_fall
from circuitscope.errors import UserError, shown
from circuitscope.progress import Progress
from circuitscope.runs.run import Run
from circuitscope.training.repeat import Repetition, repeat

_CHECKPOINTS = 50  # about how many checkpoints the stretch gets by default
_ROUND = (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000)


@dataclass(frozen=True)
class Zoom:
    """The bump (None if the caller gave the stretch), the stretch, and its repetition."""

    bump: Transition | None
    first: int
    last: int
    every: int
    repetition: Repetition

    def sentences(self) -> list[str]:
        """Sentences that say what was done, and whether the repetition equals the run."""
        done, out = self.repetition, []
        if self.bump is not None:
            b = self.bump
            out.append(f"the loss falls by {-b.size:.2f} from step {b.onset:.0f} to {b.end:.0f}")
        out.append(
            f"repeated from step {done.began}; {len(done.added)} checkpoints added between"
            f" {self.first} and {self.last}, every {self.every} steps"
        )
        if done.equal:
            out.append(
                f"weights at the {len(done.equal)} steps saved before ({done.equal[0]} to {done.equal[-1]})"
                " came out equal bit by bit"
            )
        if done.differs is not None:
            step, by = done.differs
            out.append(
                f"warning: at step {step} the repeated weights differ from the saved ones by up to {by:.2g};"
                " checkpoints from there on were not added (the machine, threads, ranks or a version may differ)"
            )
        return out


def zoom_in(
    run: Run | str | Path,
    *,
    first: int | None = None,
    last: int | None = None,
    every: int | None = None,
    progress: Progress | None = None,
) -> Zoom:
    """Repeats the stretch of the steepest drop in validation loss, with a quarter of its length added on both sides.

    Args:
        first, last: the ends of the stretch, both or neither; by default those of the bump.
        every: steps between checkpoints; by default the stretch gets about 50 checkpoints.
    """
    run = Run.of(run)
    if not run.steps:
        raise UserError(f"{run.path} has no checkpoints to compare a repetition with")
    if (first is None) != (last is None):
        raise UserError("give both ends of the stretch, --from and --to, or neither")
    if every is not None and every < 1:
        raise UserError(f"expected at least 1 step between checkpoints, got {shown(every)}")
    bump = None
    if first is None or last is None:
        falls = loss_transitions(run)
        bump = steepest_fall(falls)
        if bump is None:
            why = "" if falls.judged else f" ({falls.note})"
            if len(falls):
                why = " (it falls, but no lower than an answer that ignores the sequence)"
            raise UserError(
                f"no bump in the validation loss of {run.path}{why}; name a stretch with --from and --to, for example"
                f" --from {run.steps[0]} --to {run.steps[-1]}"
            )
        margin = (bump.end - bump.onset) / 4
        first = max(0, int(bump.onset - margin))
        last = min(run.steps[-1], int(bump.end + margin) + 1)
    if every is None:
        every = next((r for r in _ROUND if (last - first) / r <= _CHECKPOINTS), _ROUND[-1])
    first = first - first % every
    return Zoom(bump, first, last, every, repeat(run, first, last, every, progress))
