"""Analysis of 100 checkpoints of the default run against the training that made them, both as one sees them."""

from pathlib import Path

from benchmarks.rows import Section, limit
from benchmarks.startup import program, seconds
from benchmarks.workload import temporary_folder
from circuitscope.runs.run import newest_run

_SHARE = 0.25


def measure(quick: bool) -> Section:
    options = ["--steps", "4", "--save-every", "2"] if quick else ["--save-every", "15"]
    with temporary_folder() as folder:
        runs = Path(folder) / "runs"
        training = seconds([program(), "train", *options], folder, runs)
        analysis = seconds([program(), "analyze", "--induction"], folder, runs)
        again = seconds([program(), "analyze", "--induction"], folder, runs)
        count = len(newest_run(runs).steps)
    return Section(
        [
            limit(
                f"circuitscope analyze --induction, {count} checkpoints of the default run",
                f"{analysis:.1f} s = {analysis / training:.0%} of {training:.1f} s",
                f"at most {_SHARE:.0%} of the time the run took",
                analysis <= _SHARE * training,
                "two real processes, imports included; per checkpoint 256 sequences of the task and as many of repeated"
                " blocks; transitions, circuit and knockouts included",
            ),
            limit(
                "the same again",
                f"{again:.1f} s",
                "less than the first time",
                again < analysis,
                "scores and knockouts are read from the run's tables; imports and the search for transitions remain",
            ),
        ]
    )
