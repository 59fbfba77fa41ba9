"""How much a report shows: as many examples, units and checkpoints as fit the size of the file."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from circuitscope.analysis.pictures.choice import Source
from circuitscope.errors import UserError

BUDGET = 17e6  # bytes of matrices in one report, before they are compressed


@dataclass(frozen=True)
class Need:
    """What the pictures of a run take: its matrices, the lengths of an own example and of the repeats, checkpoints."""

    sources: list[Source]
    length: int
    extra: int
    steps: int

    def bytes(self, examples: int, channels: int, steps: int) -> int:
        """The size of all matrices; one that is the same for all sequences compresses to a single copy."""
        half, extra = (n * (n + 1) // 2 for n in (self.length, self.extra))
        total = 0
        for source in self.sources:
            count = min(source.of, channels) + (source.of > 1)
            total += count * ((1 if source.shared else examples) * half + extra)
        return total * min(steps, self.steps)


@dataclass(frozen=True)
class Plan:
    """How many examples, heads or channels of a layer, and checkpoints of a run a report shows."""

    examples: int
    channels: int
    steps: int


def plan(needs: Sequence[Need], examples: int, channels: int) -> Plan:
    """The most that fits the budget: fewer examples first, then fewer channels, then fewer checkpoints."""
    longest = max(need.steps for need in needs)
    channels = min(channels, max((source.of for need in needs for source in need.sources), default=1))

    def largest(most: int, plan_of: Callable[[int], Plan]) -> Plan | None:
        """The plan with the largest number up to `most` that fits; a larger number never takes less."""

        def too_large(n: int) -> bool:
            p = plan_of(n)
            return sum(need.bytes(p.examples, p.channels, p.steps) for need in needs) > BUDGET

        found = bisect_left(range(1, most + 1), True, key=too_large)
        return plan_of(found) if found else None

    for most, plan_of in (
        (examples, lambda e: Plan(e, channels, longest)),
        (channels, lambda c: Plan(1, c, longest)),
        (longest, lambda s: Plan(1, 1, s)),
    ):
        if fitting := largest(most, plan_of):
            return fitting
    raise UserError(
        f"one checkpoint of these runs takes more than the {BUDGET / 1e6:.0f} MB a report has for matrices"
        f" (length {max(need.length for need in needs)}); report fewer runs at a time"
    )


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly spaced, with the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    if most == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]
