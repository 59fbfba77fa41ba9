"""The report as a file and as an object: what it computes, what it holds, what it refuses."""

import dataclasses
import html
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import circuitscope as cs
import circuitscope.viz
from circuitscope.analysis import analysis_results
from circuitscope.analysis.probes import probe
from circuitscope.analysis.registry import ANALYSES
from circuitscope.analysis.scores.edges import Edges
from circuitscope.analysis.scores.registry import SCORES, edge_score
from circuitscope.cli.report import report as command
from circuitscope.progress import Silent
from circuitscope.runs.checkpoints import Checkpoints
from circuitscope.training.trainer import train
from circuitscope.viz.report import report
from circuitscope.viz.report.document import Report, embedded
from tiny_run import tiny

pytestmark = pytest.mark.slow


class Listens(Silent):
    """Remembers what a person would have been told."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tiny(), root=tmp_path_factory.mktemp("runs"), name="tiny")


@pytest.fixture
def run(trained, tmp_path):
    """A run of one's own, without an analysis."""
    shutil.copytree(trained.path, tmp_path / "tiny", ignore=shutil.ignore_patterns("analysis"))
    return cs.Run(tmp_path / "tiny")


def data_in(text: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_a_run_without_analysis_is_analyzed_first_and_said_so(run):
    told = Listens()
    made = report(run, sequences=16, progress=told)
    assert any("no analysis yet" in line for line in told.lines)
    assert (run.path / "analysis" / "scores-16.parquet").exists()
    assert any("computed for this report" in note for note in data_in(made.html)["runs"][0]["notes"])
    again = Listens()
    notes = data_in(report(run, sequences=16, progress=again).html)["runs"][0]["notes"]
    assert not any("no analysis yet" in line for line in again.lines)
    assert not any("computed for this report" in note for note in notes)


def test_the_same_run_gives_the_same_bytes(run):
    report(run, sequences=16)
    assert report(run, sequences=16).html == report(run.path, sequences=16).html


def test_curves_and_answers_are_those_of_the_run(run):
    (told,) = data_in(report(run, sequences=16).html)["runs"]
    rows = run.metrics
    held = rows[rows.split == "validation"]
    assert told["steps"] == run.steps
    assert told["curves"]["validation"]["step"] == held.step.tolist()
    assert told["curves"]["validation"]["loss"] == pytest.approx(held.loss.tolist(), rel=1e-4)
    assert told["curves"]["validation"]["accuracy_high"] == pytest.approx([max(a) for a in held.accuracy_per_batch])
    assert told["curves"]["train"]["step"] == rows[rows.split == "train"].step.tolist()
    assert told["chance"] == 0.5
    assert told["config"] == run.config.dump()
    batch = run.config.task.batch(0, split="test", size=16, seed=0)
    logits = run.load(6)(batch.tokens)
    for row, example in enumerate(told["examples"][:-1]):
        assert example["tokens"] == batch.tokens[row].tolist()
        said = told["answers"][run.steps.index(6)][row]
        at = [pos for pos, _ in example["labels"]]
        assert [token for token, _ in said] == logits[row, at].argmax(-1).tolist()
        right = logits[row, at].softmax(-1)[range(len(at)), [token for _, token in example["labels"]]]
        assert [p for _, p in said] == pytest.approx(right.tolist(), abs=1e-4)


def test_chosen_checkpoints_are_shown_and_a_missing_one_names_the_nearest(run):
    (told,) = data_in(report(run, steps="0,6", sequences=16).html)["runs"]
    assert told["steps"] == [0, 6]
    with pytest.raises(cs.UserError, match="no checkpoint at step 7; nearest: 6"):
        report(run, steps="0,7", sequences=16)


def test_a_damaged_checkpoint_is_left_out_with_a_word(run):
    report(run, sequences=16)
    path = run.path / "checkpoints" / "step-00000006.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    told = Listens()
    (shown,) = data_in(report(run, sequences=16, progress=told).html)["runs"]
    assert shown["steps"] == [s for s in run.steps if s != 6]
    assert any("checkpoint 6 left out" in line for line in told.lines)


def test_names_cannot_end_the_data_nor_run():
    nasty = "</script><script>alert(1)</script><!-- & <img src=x onerror=alert(1)> \u2028 \udc80"
    text = embedded({"name": nasty})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text)["name"] == nasty


def test_numbers_that_are_none_do_not_break_the_data():
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded({"loss": float("nan")})


def test_diverged_losses_become_gaps(run):
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        if row["step"] > 6 and row["split"] == "train":
            row["loss"] = float("nan")
    (run.path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    (told,) = data_in(report(run, sequences=16).html)["runs"]
    late = [v for s, v in zip(*told["curves"]["train"].values(), strict=True) if s > 6]
    assert late
    assert set(late) == {None}


def test_an_object_shows_itself_and_opens_nothing(run, monkeypatch):
    import webbrowser

    monkeypatch.setattr(webbrowser, "open", lambda *a, **k: pytest.fail("opened a browser"))
    made = report(run, sequences=16)
    shown = made._repr_html_()
    assert shown.startswith("<iframe")
    assert shown.count("<") == 2  # the page itself is escaped
    (page,) = re.findall(r'srcdoc="([^"]*)"', shown)
    assert html.unescape(page) == made.html
    assert "tiny" in repr(made)


def test_files_land_in_the_run_or_beside_the_first_of_several(run, tmp_path):
    one = report(run, sequences=16)
    assert one.save() == run.path / "report.html"
    assert (run.path / "report.html").read_text(encoding="utf-8") == one.html
    assert one.save(tmp_path / "new" / "x.html") == tmp_path / "new" / "x.html"
    assert report([run, run], sequences=16).save() == tmp_path / "report.html"
    (tmp_path / "file").write_text("")
    with pytest.raises(cs.UserError, match="cannot write"):
        one.save(tmp_path / "file" / "x.html")


def test_the_file_names_no_address_and_its_policy_lets_nothing_load(run):
    text = report(run, sequences=16).html
    assert not re.findall(r"(?:src|href)=(?!\"data:,)", text)
    assert set(re.findall(r"https?://[^\"'\s]*", text)) == {"http://www.w3.org/2000/svg"}
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


@pytest.mark.parametrize("options", [{"examples": 0}, {"channels": 0}, {"sequences": 1}, {"steps": "x"}])
def test_bad_input_is_refused(run, options):
    with pytest.raises(cs.UserError):
        report(run, **{"sequences": 16, **options})


def test_no_runs_are_refused(tmp_path):
    with pytest.raises(cs.UserError, match="at least one run"):
        report([])
    with pytest.raises(cs.UserError, match="not a run"):
        report(tmp_path / "nothing")


def test_analyses_and_probes_that_a_run_has_are_in_the_report_with_their_charts(run):
    names = [part["name"] for part in data_in(report(run, sequences=16).html)["runs"][0]["analyses"]]
    assert names == ["scores", "phases", "circuit"]
    analysis_results(run, ["decay", "causal"], sequences=16)
    probe(run, "bound-key", sequences=60, steps="0,12")
    (told,) = data_in(report(run, sequences=16).html)["runs"]
    kinds = {part["name"]: [chart["kind"] for chart in part["charts"]] for part in told["analyses"]}
    assert list(kinds) == ["scores", "phases", "circuit", "causal", "decay", "probe bound-key"]
    assert (kinds["decay"][0], kinds["decay"][-1]) == ("AtSteps", "OverSteps")
    assert set(kinds["causal"]) == {"Bars"}
    assert kinds["probe bound-key"] == ["OverSteps", "OverSteps"]


def test_an_analysis_that_fails_is_left_out_with_a_word(run, monkeypatch):
    analysis_results(run, ["causal"], sequences=16)
    for path in (run.path / "analysis").glob("causal*"):
        path.write_bytes(b"damaged")

    def fails(model, data):
        raise cs.UserError("nothing to ablate")

    monkeypatch.setitem(ANALYSES._things, "causal", dataclasses.replace(ANALYSES["causal"], rows=fails))
    said = Listens()
    (told,) = data_in(report(run, sequences=16, progress=said).html)["runs"]
    assert "causal" not in [part["name"] for part in told["analyses"]]
    assert any("nothing to ablate" in line for line in said.lines)


def test_two_runs_are_compared_and_each_says_its_seed(run, tmp_path):
    other = train(tiny(seed=5), root=tmp_path, name="other")
    data = data_in(report([run, other], sequences=16).html)
    assert data["differs"] == [["seed 0"], ["seed 5"]]
    assert [column["name"] for column in data["table"]][:3] == ["accuracy", "step to 99%", "verdict"]


def test_a_run_with_no_matrix_still_has_its_curves(tmp_path):
    made = train(tiny(mixers="lstm", steps=6), root=tmp_path, name="lstm")
    (told,) = data_in(report(made, sequences=16).html)["runs"]
    assert told["views"] == []
    assert "Layer 0 (lstm) has no mixing matrix." in told["notes"]
    assert told["curves"]["validation"]["step"]


def test_a_task_of_repeated_blocks_has_its_own_circuit_and_no_chance(tmp_path):
    small = cs.RunConfig.build(
        "attention", "induction", block=4, repeats=3, vocab_size=32, varied=False, d_model=8, steps=6, batch_size=4,
        eval_every=3, eval_batches=2, eval_batch_size=4, log_every=3, save_every=3, threads=1, device="cpu",
    )  # fmt: skip
    (told,) = data_in(report(train(small, root=tmp_path, name="blocks"), sequences=16).html)["runs"]
    assert told["chance"] is None
    assert ["answering with any token of the block gives 0.25" in line for line in told["circuit"]] == [True]
    assert [line["score"] for line in told["headline"]] == ["induction"]
    for example in told["examples"]:
        edges = example["edges"]["induction"]
        assert {(dest - src + 1) % 4 for dest, src in zip(edges[::2], edges[1::2], strict=True)} == {0}


def test_the_command_writes_the_file_and_says_where(run):
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(run.path), "--sequences", "16", "--examples", "2"])
    assert result.exit_code == 0, result.output
    assert str(run.path / "report.html") in result.output
    assert "MB" in result.output
    (told,) = data_in((run.path / "report.html").read_text(encoding="utf-8"))["runs"]
    assert len(told["examples"]) == 3  # two of the task's own, and repeated blocks


@pytest.mark.parametrize(("mixer", "factor"), [("based", "linear_attention"), ("deltanet", "delta")])
def test_a_matrix_with_one_head_is_there_with_its_scores(tmp_path, mixer, factor):
    made = train(tiny(mixers=[{"name": mixer}], n_layers=1, steps=6), root=tmp_path, name=mixer)
    (told,) = data_in(report(made, sequences=16).html)["runs"]
    (view,) = [v for v in told["views"] if v["factor"] == factor]
    assert (view["unit"], view["of"], view["head"]) == ("head", 1, 0)
    assert set(view["scores"]) >= {"binding", "recall", "induction"}
    assert [line["score"] for line in told["headline"]] == ["binding", "recall", "induction"]
    assert all(None not in line["value"] for line in told["headline"])
    assert told["circuit"]


def test_every_checkpoint_is_read_once_for_its_scores_and_once_for_its_pictures(run, monkeypatch):
    loaded, load = [], Checkpoints.load
    monkeypatch.setattr(Checkpoints, "load", lambda self, step: (loaded.append(step), load(self, step))[1])
    report(run, sequences=16)
    assert sorted(loaded) == sorted([*run.steps, *run.steps, run.steps[-1]])  # and the last for the circuit
    loaded.clear()
    report(run, sequences=16)
    assert sorted(loaded) == run.steps


def test_a_score_from_elsewhere_is_in_the_headline_and_its_edges_are_told(run, monkeypatch):
    for name in ("_things", "_from"):
        monkeypatch.setattr(SCORES, name, dict(getattr(SCORES, name)))

    @edge_score("first_position", "on the first position", shown=("table", "report"))
    def first_position(layout):
        mask = torch.zeros(*layout.roles.shape, layout.roles.shape[1], dtype=torch.bool)
        mask[:, :, 0] = True
        return Edges.of("first_position", mask)

    told = data_in(report(run, sequences=16).html)
    (about,) = told["runs"]
    assert [line["score"] for line in about["headline"]] == ["binding", "recall", "induction", "first_position"]
    assert told["edges"]["first_position"]["words"] == "on the first position"
    edges = about["examples"][0]["edges"]["first_position"]
    assert set(edges[1::2]) == {0}
    assert all("first_position" in view["marks"] and view["scores"]["first_position"] for view in about["views"])


def test_the_report_and_figures_of_matrices_run_no_model():
    """They draw what analysis computed: nothing in them imports models, hooks or readings of them."""
    viz = Path(circuitscope.viz.__file__).parent
    for path in [*(viz / "report").glob("*.py"), viz / "heatmap.py", viz / "phi_figure.py"]:
        imports = re.findall(r"^\s*(?:from|import) (circuitscope\.\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        forbidden = ("circuitscope.models", "circuitscope.lens", "circuitscope.mixers", "circuitscope.analysis.reading")
        assert [name for name in imports if name.startswith(forbidden)] == [], path


def test_a_folder_in_the_place_of_the_file_is_refused_in_one_line(tmp_path):
    made = Report((), "<html></html>")
    with pytest.raises(cs.UserError, match="is a folder; give the name of a file"):
        made.save(tmp_path)
