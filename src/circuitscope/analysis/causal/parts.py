"""The recall circuit as it was found: its parts, each with the knockout that proves it, and what they say in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from circuitscope.analysis.causal.interventions import Effect
from circuitscope.analysis.measured import measured
from circuitscope.analysis.scores.edges import OFFSET

Step = Literal["binding", "recall", "carry"]
ENOUGH = 0.5  # share of the accuracy that a knockout must cost for a part to count as used
_DOES = {
    "binding": "at {place}a context value to the key",
    "carry": "at {place}a context value to that value",
    "recall": "at a query to {place}the bound value",
    "previous_token": "to the position before",
    "induction": "at a repeated token to the token after its earlier occurrences",
}


@dataclass(frozen=True)
class Part:
    """One step of the circuit at one place: how much weight lies on its edges, and what removing them costs.

    `head` is None for a layer as a whole. `core` says whether the matrix is Φ itself, not a conv or shift before it.
    `weight` is the share of the matrix's row on these edges (of |Φ| over all channels for a layer as a whole), and
    `top` is the strongest head or channel with its share.
    """

    step: Step
    edges: str
    layer: int
    head: int | None
    factor: str
    core: bool
    weight: float
    stderr: float
    top: tuple[int, float]
    effect: Effect

    @property
    def used(self) -> bool:
        """Whether removing the edges costs at least half of the accuracy, and more than three standard errors."""
        return self.effect.share >= ENOUGH and self.effect.lost > 3 * self.effect.stderr

    @property
    def offset(self) -> int:
        """How many positions after the value the step is done."""
        return int(self.edges.partition("+")[2] or 0)

    @property
    def place(self) -> str:
        """L1H0, L0 conv, L0 ssm."""
        if self.head is not None:
            return f"L{self.layer}H{self.head}"
        return f"L{self.layer} {self.factor}"

    def sentence(self, since: float | None = None) -> str:
        """What the part does, since which step (if that is known), and the evidence for it."""
        place = {0: "", 1: "the position after "}.get(self.offset, f"{self.offset} positions after ")
        where = _DOES[self.edges.partition("+")[0]].format(place=place)
        does = f"{self.place} moves {self.weight:.2f} of its weight {where}"
        e = self.effect
        when = "" if since is None else f" from step {since:.0f}"
        return (
            f"{does}{when}; removing those edges costs {e.share:.2f} of the accuracy"
            f" ({e.before:.2f} to {e.after:.2f}, a loss of {measured(e.lost, e.stderr)})"
        )


@dataclass(frozen=True)
class Circuit:
    """Every place that was tried, and the two that carry recall, if there are such places."""

    tried: list[Part]
    binding: Part | None
    recall: Part | None
    composition: float | None  # of the two heads through the keys, above that of random weights; attention only
    chance: float  # accuracy of answering with any value of the context, or with any token of the repeated block
    carry: Part | None = None  # what brings the value to where recall reads it, where that is after the value
    untried: tuple[str, ...] = ()  # the matrices and layers in which nothing was cut, each with the reason

    @property
    def solved(self) -> bool:
        """Whether accuracy is more than 2 points above chance."""
        return recalls(self.tried, self.chance)

    @property
    def found(self) -> bool:
        """Whether the model recalls, and both steps are used."""
        return len(self.parts) == 2

    @property
    def parts(self) -> tuple[Part, ...]:
        """The places that carry recall, at most two; none where there is no recall to explain."""
        return tuple(p for p in (self.binding, self.recall) if p is not None) if self.solved else ()

    def __repr__(self) -> str:
        parts = {"binding": self.binding, "recall": self.recall}
        where = ", ".join(f"{step}: {part.place if part else None}" for step, part in parts.items())
        return f"Circuit({where}; {len(self.tried)} places tried)"

    def sentences(self, since: Mapping[str, float] | None = None) -> list[str]:
        """The verdict in words; `since` gives the steps since which binding and recall are there."""
        if self.tried and not self.solved:
            return [
                f"no recall to explain: accuracy {self.tried[0].effect.before:.2f}, and answering with any"
                f" {_answer(self.tried[0])} gives {self.chance:.2f}"
            ]
        lines = []
        for step, part in (("binding", self.binding), ("recall", self.recall)):
            if part is not None:
                lines.append(part.sentence((since or {}).get(step)))
                continue
            tried = [p for p in self.tried if p.step == step]
            if not tried:
                lines.append(f"no place to look for {step}")
                continue
            best = max(tried, key=lambda p: p.effect.lost)
            lines.append(
                f"no place found where {step} is done: removing its edges costs at most"
                f" {best.effect.lost:.2f} of {best.effect.before:.2f} accuracy ({best.place}, {best.edges})"
            )
            lines.append(self._account(tried))
        if self.found:
            lines += self._together()
        return lines

    def _other_places(self) -> list[str]:
        """Matrices of the same layer, other than the chosen one, in which removing the binding edges costs as much."""
        chosen = self.binding
        assert chosen is not None
        return [
            f"{p.place} is needed for it too: removing the same edges there costs {p.effect.share:.2f} of the accuracy"
            for p in self.tried
            if (p.step, p.edges, p.layer) == (chosen.step, chosen.edges, chosen.layer)
            and p.used
            and not p.core
            and p is not chosen
        ]

    def _account(self, tried: list[Part]) -> str:
        """What was tried for a step that was not found, and what was not."""
        places = ", ".join(dict.fromkeys(p.place for p in tried))
        furthest = max(p.offset for p in tried)
        where = f", at the value and up to {furthest} positions after it" if furthest else ""
        return f"tried one at a time: {places}{where}; not tried: several places at once" + "".join(
            f", {one}" for one in self.untried
        )

    def _together(self) -> list[str]:
        assert self.binding is not None
        lines = self._other_places()
        if self.carry is not None:
            lines.append(self.carry.sentence())
        if self.composition is not None:
            return [
                *lines,
                f"the second reads the first through its keys: K-composition {self.composition:+.2f}"
                " above that of random weights",
            ]
        if self.binding.core:
            return lines
        shift = self.binding.factor
        others = [p for p in self.tried if p.step == "binding" and p.core and p.layer == self.binding.layer]
        if not others:
            return lines
        name, most = others[0].factor, max(p.effect.share for p in others)
        borne = f"by the {shift} and by {name}" if any(p.used for p in others) else f"by the {shift}, not by {name}"
        return [
            *lines,
            f"the key gets there {borne}: removing the edges of {name} to the key costs at most"
            f" {most:.2f} of the accuracy",
        ]


def recalls(tried: Sequence[Part], chance: float) -> bool:
    """Whether the accuracy without any knockout is more than 2 points above chance."""
    return bool(tried) and tried[0].effect.before > chance + 0.02


def _answer(part: Part) -> str:
    return "value of the context" if part.edges.partition("+")[0] in OFFSET else "token of the block"
