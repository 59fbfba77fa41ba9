"""Two probes, every layer, on 20 checkpoints of the default run: as one types it, and once more from the tables."""

from pathlib import Path

from benchmarks.rows import Section, limit
from benchmarks.startup import program, seconds
from benchmarks.workload import temporary_folder
from circuitscope.runs.run import newest_run

_SECONDS = 120.0


def measure(quick: bool) -> Section:
    options = ["--steps", "4", "--save-every", "2"] if quick else ["--save-every", "79"]
    few = ["--sequences", "60"] if quick else []
    command = [program(), "probe", "--probe", "bound-key", "--probe", "bound-value", *few]
    with temporary_folder() as folder:
        runs = Path(folder) / "runs"
        seconds([program(), "train", *options], folder, runs)
        first, again = (seconds(command, folder, runs) for _ in range(2))
        count = len(newest_run(runs).steps)
    return Section(
        [
            limit(
                f"circuitscope probe, bound-key and bound-value, {count} checkpoints of the default run",
                f"{first:.1f} s",
                f"at most {_SECONDS:.0f} s",
                first <= _SECONDS,
                "imports included; two layers, two roles, control task and interval, 1,536 sequences per checkpoint",
            ),
            limit(
                "the same again",
                f"{again:.1f} s",
                "less than the first time",
                again < first,
                "results are read from the run's tables; imports and figures remain",
            ),
        ]
    )
