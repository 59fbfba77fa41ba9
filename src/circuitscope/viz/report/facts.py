"""What a report says about a run besides its matrices: verdict, curves, scores, config. Plain data for JSON."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from circuitscope.analysis.checkpoints.runner import analysis_results, circuits, table_path
from circuitscope.analysis.phases.timeline import Timeline, curve_at, place_name, strongest, timeline
from circuitscope.analysis.pictures.choice import View
from circuitscope.analysis.registry import ANALYSES
from circuitscope.analysis.scores.registry import shown_in
from circuitscope.errors import UserError, escaped
from circuitscope.progress import Progress
from circuitscope.runs.run import Run
from circuitscope.viz.registry import words_of
from circuitscope.viz.words.circuit import since
from circuitscope.viz.words.heading import heading, state
from circuitscope.viz.words.phases import timeline_lines

_POINTS = 1500  # points of a curve, at most


def facts(run: Run, scores: pd.DataFrame, sequences: int, progress: Progress) -> dict[str, Any]:
    """Heading, verdict, circuit, curves, headline scores, transitions and config of a run."""
    steps = sorted(int(s) for s in scores.step.unique())
    when: Timeline | UserError
    try:
        when = timeline(run, scores)
    except UserError as error:
        when = error
    return {
        "name": escaped(run.name or run.path.resolve().name),
        "heading": heading(run, steps, sequences),
        "recipe": _recipe(run),
        "state": state(run),
        "config": run.config.dump(),
        "curves": _curves(run),
        "chance": run.config.task.chance,
        "headline": list(_headline(scores)),
        **_transitions(when),
        **_circuit(run, steps[-1], sequences, when, progress),
        "analyses": list(_analyses(run, steps, sequences, progress)),
    }


def scores_of(view: View, scores: pd.DataFrame, steps: Sequence[int]) -> dict[str, list[float | None]]:
    """Each score of a view at these steps; a mean over heads has the scores of the whole layer."""
    here = scores[(scores.layer == view.source.layer) & (scores.factor == view.source.factor)]
    here = here[here.weighting != "signed"]
    here = here[here["head"].isna() if view.head is None else here["head"] == view.head]
    out = {}
    for score, rows in here.groupby("score", sort=False):
        at = dict(zip(rows.step, rows.value, strict=True))
        out[str(score)] = _numbers(at.get(step, math.nan) for step in steps)
    return out


def place_of(scores: pd.DataFrame, score: str) -> tuple[int, str] | None:
    """Layer and factor where a score ends highest."""
    place = strongest(scores, score)
    return None if place is None else (int(place.layer), str(place.factor))


def _transitions(when: Timeline | UserError) -> dict[str, Any]:
    """The verdict, sentences on the rest, transitions by midpoint, and onset and end of every fall of the loss."""
    if isinstance(when, UserError):
        return {"verdict": ["no verdict", str(when)], "timeline": [], "events": [], "bumps": []}
    keys = ("onset", "midpoint", "end", "low", "high", "size")
    events = [
        {"curve": name, "of": name.partition(" ")[0], **{key: _number(getattr(t, key)) for key in keys}}
        for name, several in when.found.items()
        if name != "train loss"
        for t in several
    ]
    kind = when.verdict.kind
    return {
        "verdict": [kind, when.verdict.sentence.removeprefix(f"{kind}: ")],
        "timeline": list(timeline_lines(when))[1:],
        "events": sorted(events, key=lambda e: e["midpoint"]),
        "bumps": [[float(t.onset), float(t.end)] for t in when.found["loss"] if t.size < 0],
    }


def _circuit(run: Run, last: int, sequences: int, when: Timeline | UserError, progress: Progress) -> dict[str, Any]:
    """The recall circuit of the last checkpoint in words, and where its parts are; empty if a run cannot have one."""
    if ANALYSES["circuit"].refuses(run):
        return {"circuit": [], "parts": []}
    found = circuits(run, steps=last, sequences=sequences, progress=progress)[last]
    return {
        "circuit": found.sentences({} if isinstance(when, UserError) else since(when, found)),
        "parts": [
            {"score": part.step, "edges": part.edges, "layer": part.layer, "factor": part.factor}
            for part in found.parts
        ],
    }


def _analyses(run: Run, steps: Sequence[int], sequences: int, progress: Progress) -> Iterator[dict[str, Any]]:
    """What every registered analysis says about the run in words, if the run has its table."""
    kept = [
        name for name, one in ANALYSES.items() if table_path(run, name, sequences).exists() and not one.refuses(run)
    ]
    try:
        found = analysis_results(run, kept, steps=steps, sequences=sequences, progress=progress)
        for name in kept:
            said = [line if isinstance(line, str) else line._asdict() for line in words_of(name).say(found)]
            yield {"name": name, "about": ANALYSES[name].about, "said": said}
    except UserError as error:  # for example too few evaluations for phases
        progress.say(f"{run.path}: {error}")


def _curves(run: Run) -> dict[str, Any]:
    rows = run.metrics
    if not len(rows):
        return {"train": None, "validation": None}
    train, held = (_thinned(rows[rows.split == split]) for split in ("train", "validation"))
    out: dict[str, Any] = {
        "train": {"step": train.step.tolist(), "loss": _numbers(train.loss)} if len(train) else None,
        "validation": None,
    }
    if len(held):
        out["validation"] = {"step": held.step.tolist()}
        for name, column in (("loss", "loss"), ("accuracy", run.config.task.metric)):
            out["validation"][name] = _numbers(held[column])
            batches = held[f"{column}_per_batch"]
            out["validation"][f"{name}_low"] = _numbers(batches.map(min))
            out["validation"][f"{name}_high"] = _numbers(batches.map(max))
    return out


def _headline(scores: pd.DataFrame) -> Iterable[dict[str, Any]]:
    for score in (name for shown in shown_in("report") for name in shown.means):
        if (place := strongest(scores, score)) is None:
            continue
        rows = curve_at(scores, place)
        yield {
            "score": score,
            "place": place_name(place),
            "step": rows.step.tolist(),
            "value": _numbers(rows.value),
            "stderr": _numbers(rows.stderr),
        }


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    every = math.ceil(len(rows) / _POINTS)
    return rows if every <= 1 else rows.iloc[::every]


def _recipe(run: Run) -> str:
    """The config in one line."""
    model, task, train = run.config.model, run.config.task, run.config.train
    positions = "no positions" if model.positions == "none" else f"{model.positions} positions"
    examples = "never the same example twice" if task.examples is None else f"{task.examples:,} examples"
    return (
        f"{model.n_layers} layer{'s' if model.n_layers > 1 else ''} of width {model.d_model},"
        f" {positions}, {model.vocab_size:,} tokens; {examples}, {train.steps} steps of"
        f" {train.batch_size}, lr {train.lr:g} {train.schedule}, weight decay {train.weight_decay:g}, seed {train.seed}"
    )


def _number(value: float) -> float | None:
    """The value with five digits; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [_number(float(v)) for v in values]
