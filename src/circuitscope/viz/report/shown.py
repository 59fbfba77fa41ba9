"""What the page gets about examples, their edges, and the matrices to choose from. Plain data, ready for JSON."""

from collections.abc import Sequence
from typing import Any

from circuitscope.analysis.pictures.choice import View
from circuitscope.analysis.pictures.examples import ShownExamples
from circuitscope.analysis.scores.registry import SCORES
from circuitscope.viz.report.packing import CODES
from circuitscope.viz.roles import role_look


def examples(shown: ShownExamples, extra: tuple[str, ...]) -> list[dict[str, Any]]:
    """Name, tokens, roles and labels of every example; its edges by the name of their set, as [dest, src, dest, …].

    Args:
        extra: sets of edges besides those of the scores, such as "recall+1".
    """
    out: list[dict[str, Any]] = []
    for batch in shown.batches:
        for row in range(len(batch)):
            tokens = batch.names(row)
            labels = [] if tokens is None else [[i, t] for i, t in enumerate(batch.labels[row].tolist()) if t >= 0]
            out.append(
                {
                    "name": f"example {row + 1}" if batch is shown.own else "repeated random blocks",
                    "tokens": [""] * batch.length if tokens is None else tokens,
                    "roles": batch.layout.roles[row].tolist(),
                    "labels": labels,
                }
            )
    for example, sets in zip(out, shown.edges(extra), strict=True):
        example["edges"] = {name: [i for edge in edges for i in edge] for name, edges in sets.items()}
    return out


def roles(told: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Name, colour and quietness of every role in these examples, by its number."""
    numbers = sorted({number for example in told for number in example["roles"]})
    return {number: role_look(number)._asdict() for number in numbers}


def edge_sets(told: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """For each set of edges in these examples the score it belongs to, and what it means in words."""
    out = {}
    for name in dict.fromkeys(name for example in told for name in example["edges"]):
        score, _, offset = name.partition("+")
        moved = f", moved by {offset} position{'s' if offset != '1' else ''}" if offset else ""
        out[name] = {"score": score, "words": SCORES[score].means[score] + moved}
    return out


def label(view: View) -> str:
    """A short label, such as "L1H0", "channel 25" or "all 128 channels: mean |Φ|"."""
    source = view.source
    if view.head is None:
        return f"all {source.of} {source.unit}s: mean{'' if source.shares else ' |Φ|'}"
    return f"L{source.layer}H{view.head}" if source.unit == "head" else f"channel {view.head}"


def title(view: View) -> str:
    """A title, such as "L1H0", "L0H1 ssd", "L0 ssm channel 25" or "L0 ssm, all 128 channels: mean |Φ|".

    The name of the matrix is left out if it is the only one of its layer and has heads.
    """
    source = view.source
    factor = "" if source.alone and source.unit == "head" else f" {source.factor}"
    if view.head is None:
        return f"L{source.layer}{factor}, {label(view)}"
    return f"{label(view)}{factor}" if source.unit == "head" else f"L{source.layer}{factor} {label(view)}"


def view(chosen: View) -> dict[str, Any]:
    """What the page needs to offer a view and to draw it."""
    code = CODES[chosen.entries]
    return {
        "layer": chosen.source.layer,
        "factor": chosen.source.factor,
        "head": chosen.head,
        "of": chosen.source.of,
        "unit": chosen.source.unit,
        "label": label(chosen),
        "title": title(chosen),
        "entries": chosen.entries,
        "signed": code.signed,
        "levels": code.levels,
        "power": code.power,
    }
