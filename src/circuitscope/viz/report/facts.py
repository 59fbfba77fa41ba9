"""What a report says about a run besides its matrices: verdict, curves, analyses, config. Plain data for JSON."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.checkpoints.runner import analysis_results, table_path
from circuitscope.analysis.pictures.choice import View
from circuitscope.analysis.probes import kept_probes
from circuitscope.analysis.registry import ANALYSES, refusal
from circuitscope.analysis.scores.curves import followed
from circuitscope.analysis.scores.registry import shown_in
from circuitscope.errors import UserError, escaped
from circuitscope.progress import Progress
from circuitscope.runs.run import Run
from circuitscope.viz.charts.kinds import number, numbers, told
from circuitscope.viz.charts.probes import probe_charts
from circuitscope.viz.registry import CHARTS, words_of
from circuitscope.viz.words.heading import heading, state
from circuitscope.viz.words.probes import control_lines

_POINTS = 1500  # points of a curve, at most
_ALWAYS = ("scores", "phases", "circuit")  # computed for every report; other analyses are shown if the run has them


def results(run: Run, steps: Sequence[int], sequences: int, progress: Progress) -> Results:
    """What is known about a run: what every report has, if the run can have it, and the analyses that are on disk."""
    possible = [name for name in ANALYSES if not refusal(name, run)]
    own = [name for name in possible if name in _ALWAYS]
    found = analysis_results(run, own, steps=steps, sequences=sequences, progress=progress)
    for name in possible:
        if name in found or not table_path(run, name, sequences).exists():
            continue
        try:
            more = analysis_results(run, [name], steps=found.steps, sequences=sequences, progress=progress)
            found.tables[name] = more[name]
        except UserError as error:  # the report does without this analysis
            progress.say(f"{run.path}: {error}")
    return found


def facts(found: Results) -> dict[str, Any]:
    """Heading, verdict, circuit, curves, headline scores, transitions, analyses and config of a run."""
    run = found.run
    return {
        "name": escaped(run.name or run.path.resolve().name),
        "heading": heading(run, found.steps, found.sequences),
        "recipe": _recipe(run),
        "state": state(run),
        "config": run.config.dump(),
        "curves": _curves(run),
        "metric": run.config.task.metric,
        "chance": run.config.task.chance,
        "chance_words": run.config.task.chance_words,
        "headline": list(_headline(found)),
        **_transitions(found),
        **_circuit(found),
        "analyses": [*_analyses(found), *_probes(run)],
    }


def scores_of(view: View, scores: pd.DataFrame, steps: Sequence[int]) -> dict[str, list[float | None]]:
    """Each score of a view at these steps; a mean over heads has the scores of the whole layer."""
    here = scores[(scores.layer == view.source.layer) & (scores.factor == view.source.factor)]
    here = here[here.weighting != "signed"]
    here = here[here["head"].isna() if view.head is None else here["head"] == view.head]
    out = {}
    for score, rows in here.groupby("score", sort=False):
        at = dict(zip(rows.step, rows.value, strict=True))
        out[str(score)] = numbers(at.get(step, math.nan) for step in steps)
    return out


def place_of(found: Results, score: str) -> tuple[int, str] | None:
    """Layer and factor where the circuit has a score or, if it names none, where the score ends highest."""
    curve = followed(found["scores"], score, found.known_circuit)
    if curve is None:
        return None
    place = curve.rows.iloc[-1]
    return int(place.layer), str(place.factor)


def _transitions(found: Results) -> dict[str, Any]:
    """The verdict, transitions by midpoint, and onset and end of every fall of the loss that is a bump."""
    if "phases" not in found:
        return {"verdict": ["no verdict", refusal("phases", found.run)], "events": [], "bumps": []}
    when = found.timeline
    keys = ("onset", "midpoint", "end", "low", "high", "size")
    events = [
        {
            "curve": name,
            "of": name.partition(" ")[0].partition("+")[0],
            **{key: number(getattr(t, key)) for key in keys},
            "ends_at": t.ends_at,
        }
        for name, several in when.found.items()
        if name != "train loss"
        for t in several
    ]
    kind = when.verdict.kind
    return {
        "verdict": [kind, when.verdict.sentence.removeprefix(f"{kind}: ")],
        "events": sorted(events, key=lambda e: e["midpoint"]),
        "bumps": [[float(t.onset), float(t.end)] for t in when.found["loss"].beyond if t.size < 0],
    }


def _circuit(found: Results) -> dict[str, Any]:
    """The recall circuit of the last checkpoint in words, and where its parts are; empty if a run cannot have one."""
    if "circuit" not in found:
        return {"circuit": [], "parts": []}
    in_brief = words_of("circuit").in_brief
    return {
        "circuit": list(in_brief(found)) if in_brief else [],
        "parts": [
            {"score": p.step, "edges": p.edges, "layer": p.layer, "factor": p.factor, "place": p.place}
            for p in found.circuit.parts
        ],
    }


def _analyses(found: Results) -> Iterator[dict[str, Any]]:
    """What every analysis of the run says in words, and what is drawn of it."""
    for name in ANALYSES:
        if name not in found:
            continue
        said = [line if isinstance(line, str) else line._asdict() for line in words_of(name).say(found)]
        drawn = [told(chart) for chart in CHARTS[name](found)] if name in CHARTS else []
        yield {"name": name, "about": ANALYSES[name].about, "said": said, "charts": drawn}


def _probes(run: Run) -> Iterator[dict[str, Any]]:
    """What the probes of the run read; the same probe with other settings also has the digest of its settings."""
    used: set[str] = set()
    for file, frame in kept_probes(run).items():
        row = frame.iloc[0]
        name = f"probe {row.probe}"
        if name in used:
            name = file.replace("-", " ", 1)
        used.add(name)
        about = f"Reads {row.target} with the model {row.model}, tested on {row.n_test:,} examples."
        said = list(control_lines(frame[frame.step == frame.step.max()]))
        yield {"name": name, "about": about, "said": said, "charts": [told(chart) for chart in probe_charts(frame)]}


def _curves(run: Run) -> dict[str, Any]:
    rows = run.metrics
    if not len(rows):
        return {"train": None, "validation": None}
    train, held = (_thinned(rows[rows.split == split]) for split in ("train", "validation"))
    out: dict[str, Any] = {
        "train": {"step": train.step.tolist(), "loss": numbers(train.loss)} if len(train) else None,
        "validation": None,
    }
    if len(held):
        out["validation"] = {"step": held.step.tolist()}
        for name, column in (("loss", "loss"), ("accuracy", run.config.task.metric)):
            out["validation"][name] = numbers(held[column])
            batches = held[f"{column}_per_batch"]
            out["validation"][f"{name}_low"] = numbers(batches.map(min))
            out["validation"][f"{name}_high"] = numbers(batches.map(max))
    return out


def _headline(found: Results) -> Iterable[dict[str, Any]]:
    """The curves of the scores that the report shows, each on the edges and at the place where it is followed."""
    for score in (name for shown in shown_in("report") for name in shown.means):
        curve = followed(found["scores"], score, found.known_circuit)
        if curve is None:
            continue
        yield {
            "score": score,
            "edges": curve.edges,
            "place": curve.where,
            "chosen": curve.chosen,
            "step": curve.rows.step.tolist(),
            "value": numbers(curve.rows.value),
            "stderr": numbers(curve.rows.stderr),
            "even": number(float(curve.rows.even.iloc[-1])),
        }


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    every = math.ceil(len(rows) / _POINTS)
    return rows if every <= 1 else rows.iloc[::every]


def _recipe(run: Run) -> str:
    """The config in one line."""
    model, task, train = run.config.model, run.config.task, run.config.train
    positions = "no positions" if model.positions == "none" else f"{model.positions} positions"
    examples = "never the same example twice" if task.examples is None else f"{task.examples:,} examples"
    read = f"{model.vocab_size:,} tokens" if model.d_input is None else f"vectors of {model.d_input} numbers"
    return (
        f"{model.n_layers} layer{'s' if model.n_layers > 1 else ''} of width {model.d_model},"
        f" {positions}, {read}; {examples}, {train.steps} steps of"
        f" {train.batch_size}, lr {train.lr:g} {train.schedule}, weight decay {train.weight_decay:g}, seed {train.seed}"
    )
