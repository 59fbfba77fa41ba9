"""The report as an object: computed from runs, shown in a notebook, saved as one HTML file."""

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from circuitscope import __version__
from circuitscope.analysis.checkpoints.runner import SEQUENCES, held_out, saved_steps, table_path
from circuitscope.analysis.checkpoints.steps import ChosenSteps, choose_steps
from circuitscope.analysis.pictures.at_checkpoints import snapshots
from circuitscope.analysis.pictures.choice import Source, leading_score, sources_of, views
from circuitscope.analysis.pictures.examples import ShownExamples
from circuitscope.analysis.scores.registry import SCORES, shown_in
from circuitscope.arguments import explained
from circuitscope.errors import UserError
from circuitscope.progress import Progress, Silent
from circuitscope.runs.run import Run, newest_run
from circuitscope.runs.store import write_text
from circuitscope.viz.report import shown
from circuitscope.viz.report.budget import Need, Plan, plan, spread
from circuitscope.viz.report.comparison import compared
from circuitscope.viz.report.facts import facts, place_of, results, scores_of
from circuitscope.viz.report.packing import CODES, PackedMatrices

EXAMPLES = 8
CHANNELS = 12
_SCRIPTS = (
    *("elements.js", "store.js", "colours.js", "charts.js", "curves.js", "overlay.js", "analyses.js", "heatmap.js"),
    *("describe.js", "panel.js", "runs_table.js", "main.js"),
)

RunLike = Run | str | Path


@dataclass(frozen=True)
class Report:
    """A report of runs. In a notebook it shows itself; `save` writes the file. Neither opens a browser."""

    runs: tuple[Run, ...]
    html: str

    @explained
    def save(self, path: str | Path | None = None) -> Path:
        """Writes the report: RUN/report.html, or for several runs report.html in the folder of the first."""
        target = Path(path) if path is not None else self.runs[0].path / "report.html"
        if path is None and len(self.runs) > 1:
            target = Path(os.path.abspath(self.runs[0].path)).parent / "report.html"
        if os.path.isdir(target):  # False also for a name that is too long
            raise UserError(f"{target} is a folder; give the name of a file, such as {target / 'report.html'}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_text(target, self.html)
        except OSError as error:
            raise UserError(f"cannot write {target}: {error.strerror}") from None
        return target

    def _repr_html_(self) -> str:
        return (
            '<iframe title="circuitscope report" sandbox="allow-scripts" style="width:100%;height:900px;border:0"'
            f' srcdoc="{html.escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Report({', '.join(run.name for run in self.runs)}; {len(self.html) / 1e6:.1f} MB)"


@explained
def report(
    runs: RunLike | Sequence[RunLike] | None = None,
    *,
    steps: ChosenSteps = None,
    examples: int = EXAMPLES,
    channels: int = CHANNELS,
    sequences: int = SEQUENCES,
    progress: Progress | None = None,
) -> Report:
    """An interactive report of one run (by default the newest), or of several side by side.

    Checkpoints that were not analyzed yet are analyzed first; their tables are kept beside the run.

    Args:
        steps: checkpoints to show: "all", "0:2000:100", or numbers.
        examples: at most how many sequences have their matrices in the report; fewer where they would not fit.
        channels: at most how many heads or channels of a matrix are shown: those with the highest scores.
        sequences: held-out sequences that a score is averaged over.
    """
    if examples < 1 or channels < 1:
        raise UserError(f"examples and channels must be at least 1, got {examples} and {channels}")
    progress = progress or Silent()
    if runs is None:
        chosen = [newest_run()]
    else:
        several = [runs] if isinstance(runs, Run | str | Path) else list(runs)
        chosen = [Run.of(r) for r in several]
    if not chosen:
        raise UserError("a report needs at least one run")
    asked = [choose_steps(steps, saved_steps(run)) for run in chosen]
    sections = [_Section(run, at, sequences, progress) for run, at in zip(chosen, asked, strict=True)]
    fits = plan([section.need for section in sections], min(examples, sequences), channels)
    told, chunks = [], []
    for number, section in enumerate(sections):
        described, stored = section.described(fits, progress)
        told.append(described)
        chunks += [
            f'<script type="text/plain" id="matrices-{number}-{i}">{text}</script>' for i, text in enumerate(stored)
        ]
    every = [example for run_told in told for example in run_told["examples"]]
    data = {
        "version": __version__,
        "roles": shown.roles(every),
        "edges": shown.edge_sets(every),
        "scores": [name for score in SCORES.values() for name in score.means],
        "runs": told,
        **compared(chosen, told),
    }
    return Report(tuple(chosen), page(data, chunks))


class _Section:
    """The part of a report that is about one run: its scores, and what its pictures would take."""

    def __init__(self, run: Run, steps: list[int], sequences: int, progress: Progress):
        self.run = run
        self.data = held_out(run, sequences)
        self.fresh = not table_path(run, "scores", sequences).exists()
        if self.fresh:
            progress.say(f"{run.path} has no analysis yet: its scores are computed first")
        self.found = results(run, steps, sequences, progress)
        self.scores, self.steps = self.found["scores"], self.found.steps
        every = sources_of(run.config.model, self.data.own.inputs)
        self.sources = [source for source in every if source.causal]
        self.not_causal = [source for source in every if not source.causal]
        extra = ShownExamples.of(self.data, 1).repeats
        length = self.data.own.length
        self.need = Need(self.sources, length, 0 if extra is None else extra.inputs.shape[1], len(self.steps))

    def described(self, fits: Plan, progress: Progress) -> tuple[dict[str, Any], list[str]]:
        """Everything the page says of the run, and its matrices as text."""
        told = facts(self.found)
        examples = ShownExamples.of(self.data, fits.examples)
        matrices = PackedMatrices(views(self.sources, self.scores, fits.channels))
        told["steps"], told["answers"] = [], []
        for snapshot in snapshots(self.run, spread(self.steps, fits.steps), examples, matrices.views, progress):
            matrices.add(snapshot)
            told["steps"].append(snapshot.step)
            told["answers"].append(snapshot.answers)
        told["examples"] = shown.examples(examples, tuple(part["edges"] for part in told["parts"]))
        told["views"] = [
            shown.view(view)
            | {"scores": scores_of(view, self.scores, told["steps"]), "marks": _marks(view.source, told["parts"])}
            for view in matrices.views
        ]
        told["rank"] = leading_score(self.data.own.layout).name
        told["first"] = place_of(self.found, told["rank"])
        told["notes"] = self._notes(told, matrices, fits)
        return told, matrices.stored()

    def _notes(self, told: dict[str, Any], matrices: PackedMatrices, fits: Plan) -> list[str]:
        """What is shown, of what, and how exactly."""
        n = min(fits.examples, self.data.sequences)
        lines = [
            f"Matrices of {n} held-out example{'s' if n > 1 else ''} at {len(told['steps'])} of"
            f" {len(self.run.steps)} checkpoints; scores are means over {self.data.sequences} held-out sequences."
        ]
        if any(s.of > fits.channels for s in self.sources):
            lines.append(
                f"Of a matrix with more than {fits.channels} heads or channels, the report holds those {fits.channels}"
                " that score highest at the last checkpoint, and the mean of |Φ| over all."
            )
        for entries, error in matrices.error.items():
            lines.append(
                f"{CODES[entries].words} is stored in 8 bits: an entry shown is off by at most {100 * error:.2g}%"
                " of the largest entry of its matrix."
            )
        for layer, mixer in enumerate(self.run.config.model.mixers):
            if not any(s.layer == layer for s in self.sources):
                lines.append(f"Layer {layer} ({mixer.name}) has no mixing matrix.")
        for source in self.not_causal:
            lines.append(
                f"The matrix {source.factor} of layer {source.layer} reads later positions and is not drawn here, where"
                f" matrices are causal; `circuitscope phi --layer {source.layer} --factors {source.factor}` draws it."
            )
        if self.fresh:
            lines.append("The run had no analysis yet; its scores were computed for this report.")
        return lines


def _marks(source: Source, parts: Sequence[dict[str, Any]]) -> list[str]:
    """Sets of edges to outline in a matrix: those of the report's scores, where the circuit uses them in it."""
    found = {p["score"]: p["edges"] for p in parts if (p["layer"], p["factor"]) == (source.layer, source.factor)}
    return [found.get(score.name, score.name) for score in shown_in("report") if score.edges is not None]


def page(data: dict[str, Any], chunks: Sequence[str]) -> str:
    """The HTML file: style, script, data, matrices. Its policy lets nothing run but that script, and nothing load."""
    folder = resources.files("circuitscope.viz.report") / "page"
    script = "\n" + "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    style = (folder / "report.css").read_text(encoding="utf-8")
    return Template((folder / "template.html").read_text(encoding="utf-8")).substitute(
        script_digest=_digest(script),
        style_digest=_digest(style),
        style=style,
        script=script,
        data=embedded(data),
        matrices="\n".join(chunks),
    )


def embedded(data: dict[str, Any]) -> str:
    """JSON in ASCII that can neither end a script element nor open a comment, whatever names it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    """The digest by which a content security policy names a script or a style."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
