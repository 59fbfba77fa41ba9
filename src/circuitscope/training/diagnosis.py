"""What a run that ended badly looks like, and the one or two settings to try.

It is found from the rows of metrics.jsonl, the task's level of answering with any value of the context (1/k), and the
config. Nothing is said of a run that solved its task or reached its `early_stop`, of a task whose metric is not an
accuracy, or of a single evaluation.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from circuitscope.config import RunConfig

Kind = Literal["unstable", "memorizing", "still rising", "at 1/k", "at chance", "stalled"]
Row = Mapping[str, Any]

SOLVED = 0.95
_GAP = 0.2  # by which the training accuracy of a run that memorizes is above the validation accuracy
_RISE = 0.02  # of the accuracy over the last quarter, at least
_FALL = 0.02  # of the validation loss over the last quarter, as a share of it, where the accuracy shows nothing yet
_NEAR = (0.75, 0.05)  # at 1/k: from this share of 1/k up to this share of the way from there to 1
_JUMP = (0.3, 0.1)  # of the training loss: in nats, and as a share of how far it had fallen, at least
_WINDOWS = 20  # of the training loss, whose medians are compared


@dataclass(frozen=True)
class Diagnosis:
    """The kind of a bad end, and a sentence on it that says what to try."""

    kind: Kind
    sentence: str


def diagnose(rows: Iterable[Row], config: RunConfig) -> Diagnosis | None:
    """What a run with these metrics looks like at its end, or None."""
    rows = list(rows)
    held = [row for row in rows if row.get("split") == "validation"]
    logged = [row for row in rows if row.get("split") == "train"]
    enough = min(SOLVED, config.train.early_stop or SOLVED)
    if config.task.metric != "accuracy" or len(held) < 2 or held[-1]["accuracy"] >= enough:
        return None
    accuracy, chance = held[-1]["accuracy"], config.task.chance
    for found in (
        _unstable(logged, config),
        _memorizing(logged, accuracy, config),
        _still_rising(held, config),
        _at_chance(accuracy, chance, config),
        _at_any_value(held[-1], chance, config),
    ):
        if found is not None:
            return found
    levels = f", above the {chance:.1%} of {config.task.chance_words}" if chance is not None else ""
    return Diagnosis(
        "stalled",
        f"stalled: accuracy stopped rising at {accuracy:.1%}{levels}; try {_falling(config)}, or a wider model"
        f" (--d-model {2 * config.model.d_model})",
    )


def _unstable(logged: Sequence[Row], config: RunConfig) -> Diagnosis | None:
    """The training loss ended above where it had been, or jumped up again and again."""
    losses = [row["loss"] for row in logged]
    if len(losses) < _WINDOWS:
        return None
    size = len(losses) / _WINDOWS
    medians = [statistics.median(losses[int(i * size) : int((i + 1) * size)]) for i in range(_WINDOWS)]
    lowest = min(medians)
    jump = max(_JUMP[0], _JUMP[1] * (losses[0] - lowest))
    ended = medians[-1]
    highest = [max(losses[int(i * size) : int((i + 1) * size)]) for i in range(_WINDOWS)]
    spikes = sum(highest[i] > medians[i - 1] + 3 * jump for i in range(2, _WINDOWS))
    if ended <= lowest + jump and spikes < 3:
        return None
    how = f"rose from {lowest:.2f} to {ended:.2f}" if ended > lowest + jump else f"jumped up {spikes} times"
    clip = "--clip 1" if config.train.clip is None else "a longer --warmup"
    return Diagnosis("unstable", f"unstable: the training loss {how}; try --lr {config.train.lr / 3:.2g}, or {clip}")


def _memorizing(logged: Sequence[Row], accuracy: float, config: RunConfig) -> Diagnosis | None:
    """Far better on the examples of training than on held-out ones."""
    on_train = statistics.mean(row["accuracy"] for row in logged[-10:]) if logged else 0.0
    if on_train - accuracy < _GAP:
        return None
    decay = max(0.1, config.train.weight_decay * 3)
    return Diagnosis(
        "memorizing",
        f"memorizing: accuracy {on_train:.1%} on training examples and {accuracy:.1%} on held-out ones; try"
        f" --examples none, or --weight-decay {decay:.2g}",
    )


def _still_rising(held: Sequence[Row], config: RunConfig) -> Diagnosis | None:
    """Over the last quarter the accuracy rose, or the loss fell while the accuracy shows nothing yet."""
    last = held[-1]
    before = next((row for row in reversed(held[:-1]) if row["step"] <= 0.75 * last["step"]), held[0])
    rise = last["accuracy"] - before["accuracy"]
    more = f"try --steps {2 * config.train.steps}"
    if rise >= max(_RISE, 3 * math.hypot(_error(last), _error(before))):
        return Diagnosis(
            "still rising",
            f"still rising: accuracy went from {before['accuracy']:.1%} to {last['accuracy']:.1%} in the last quarter"
            f" of the run; {more}",
        )
    level = config.task.chance
    shows_nothing = last["accuracy"] < _NEAR[0] * (1.0 if level is None else level)
    if shows_nothing and before["loss"] - last["loss"] >= _FALL * before["loss"]:
        return Diagnosis(
            "still rising",
            f"still learning: the validation loss went from {before['loss']:.2f} to {last['loss']:.2f} in the last"
            f" quarter of the run; {more}",
        )
    return None


def _at_chance(accuracy: float, chance: float | None, config: RunConfig) -> Diagnosis | None:
    """Worse than any value of the context and not learning; without that level, hardly anything is right."""
    if accuracy >= (0.05 if chance is None else _NEAR[0] * chance):
        return None
    than = "" if chance is None else f", less than the {chance:.1%} of {config.task.chance_words}"
    lr = config.train.lr
    return Diagnosis(
        "at chance",
        f"at chance: accuracy {accuracy:.1%}{than}, and it does not rise; try --lr {lr * 3:.2g} or --lr {lr / 3:.2g}",
    )


def _at_any_value(last: Row, chance: float | None, config: RunConfig) -> Diagnosis | None:
    """As good as answering with any value of the context."""
    if chance is None or last["accuracy"] > chance + max(_NEAR[1] * (1 - chance), 3 * _error(last)):
        return None
    if not config.task.features:  # the context offers no values, so the level is that of guessing
        return _no_better_than_guessing(last["accuracy"], chance, config)
    blind = config.model.n_layers == 1 and all(mixer.blind_to_order for mixer in config.model.mixers)
    lr = config.train.lr
    what = "--layers 2" if blind else f"--lr {lr * 3:.2g} or --lr {lr / 3:.2g}, or --steps {2 * config.train.steps}"
    return Diagnosis(
        "at 1/k",
        f"at 1/k: it finds the values of the context, but not the one that belongs to the key (accuracy"
        f" {last['accuracy']:.1%}, any value gives {chance:.1%}); try {what}",
    )


def _no_better_than_guessing(accuracy: float, chance: float, config: RunConfig) -> Diagnosis:
    lr = config.train.lr
    return Diagnosis(
        "at chance",
        f"at chance: accuracy {accuracy:.1%}, and guessing gives {chance:.1%}; try --steps {2 * config.train.steps}, or"
        f" --lr {lr * 3:.2g} or --lr {lr / 3:.2g}",
    )


def _falling(config: RunConfig) -> str:
    """A setting that lets a run settle."""
    constant = config.train.schedule == "constant"
    return "--schedule cosine" if constant else f"--lr {config.train.lr * 3:.2g} or --lr {config.train.lr / 3:.2g}"


def _error(row: Row) -> float:
    """The standard error of the accuracy of an evaluation, from its batches; 0 where there is one."""
    batches = row.get("accuracy_per_batch") or []
    return statistics.stdev(batches) / math.sqrt(len(batches)) if len(batches) > 1 else 0.0
