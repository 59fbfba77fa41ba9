"""The lines above everything else that is said about a run: what it is, and how it ended."""

from collections.abc import Sequence

from circuitscope.errors import escaped
from circuitscope.models.naming import model_name
from circuitscope.runs.run import Run


def heading(run: Run, steps: Sequence[int], sequences: int) -> str:
    """Says which run it is, on which task, and how many checkpoints and sequences were read."""
    config = run.config
    sizes = ", ".join(f"{name} {size}" for name, size in config.task.sizes().items())
    count = f"{len(steps)} checkpoint{'s' if len(steps) > 1 else ''} ({steps[0]} to {steps[-1]})"
    what = f"{model_name(config.model)} on {config.task.name} ({sizes})"
    return f"{escaped(run.path)}: {what}; {count}, {sequences} held-out sequences each"


def state(run: Run) -> str:
    """How the run ended, or "" if it finished or nothing is known."""
    status = run.status
    state = status.get("state")
    if state in (None, "finished"):
        return ""
    return escaped(f"{state} at step {status.get('step')}" + (f": {m}" if (m := status.get("message")) else ""))
