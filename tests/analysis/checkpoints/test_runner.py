"""Every checkpoint into one table: reuse, interruption, damage, other settings."""

import json
import re

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.causal import affordable
from circuitscope.analysis.checkpoints import estimate, results, runner
from circuitscope.analysis.checkpoints.runner import analysis_results, analysis_table, analyze
from circuitscope.analysis.registry import ANALYSES, analysis, run_analysis
from circuitscope.analysis.scores.held_out import HeldOut, check_scores
from circuitscope.analysis.scores.rows import score_rows
from circuitscope.errors import UserError
from circuitscope.training.trainer import train
from registered import added_to
from tiny_run import Listens, tiny

COLUMNS = ANALYSES["scores"].table_columns


@pytest.fixture
def run(tmp_path):
    return train(tiny(), root=tmp_path, name="tiny")


def test_the_table_is_tidy_and_on_disk(run):
    frame = analyze(run, sequences=256)
    assert list(frame.columns) == list(COLUMNS)
    assert sorted(frame.step.unique()) == run.steps
    assert set(frame["run"]) == {"tiny"}
    saved = pd.read_parquet(run.path / "analysis" / "scores.parquet")
    pd.testing.assert_frame_equal(frame, saved.astype(COLUMNS), check_dtype=False)
    assert frame.duplicated(["step", "layer", "head", "factor", "score", "weighting"]).sum() == 0
    scored = frame[frame.factor == "pattern"]
    blocks = scored.score.isin(["induction", "duplicate"])
    assert blocks.any()
    assert (scored.n == np.where(blocks, 64, 256)).all()
    assert scored.value.between(0, 1).all()
    assert scored.stderr.gt(0).mean() > 0.9  # binding at the first value is exact at the start


def test_a_row_is_the_score_of_that_checkpoint(run):
    frame = analyze(run)
    batch = run.config.task.batch(0, split="test", size=256, seed=0)
    _, cache = run.load(6).run_with_cache(batch.tokens, names_filter="blocks.1.mixer.hook_pattern")
    pattern = cache["blocks.1.mixer.hook_pattern"]
    expected = cs.analysis.recall_score(pattern, batch.layout).mean().item()
    row = frame[(frame.step == 6) & (frame.layer == 1) & (frame.score == "recall")]
    assert row.value.item() == pytest.approx(expected, abs=1e-6)


def test_accuracy_in_the_table_is_accuracy(run):
    frame = analyze(run)
    batch = run.config.task.batch(0, split="test", size=256, seed=0)
    logits = run.load(12)(batch.tokens)
    labelled = batch.labels >= 0
    right = (logits.argmax(-1) == batch.labels)[labelled].float().mean().item()
    loss = torch.nn.functional.cross_entropy(logits[labelled], batch.labels[labelled]).item()
    at_end = frame[(frame.step == 12) & (frame.factor == "model")].set_index("score").value
    assert at_end["accuracy"] == pytest.approx(right, abs=1e-6)
    assert at_end["loss"] == pytest.approx(loss, rel=1e-5)
    per_label = torch.nn.functional.cross_entropy(logits[labelled], batch.labels[labelled], reduction="none")
    two = per_label.reshape(256, 2)  # two queries a sequence, in order
    assert at_end["in_context"] == pytest.approx((two[:, 1] - two[:, 0]).mean().item(), abs=1e-5)


def test_loss_by_position_and_accuracy_by_distance(run):
    frame = analyze(run, steps=12)
    batch = run.config.task.batch(0, split="test", size=256, seed=0)
    logits = run.load(12)(batch.tokens)
    at_10 = batch.labels[:, 10] >= 0
    loss = torch.nn.functional.cross_entropy(logits[:, 10][at_10], batch.labels[:, 10][at_10]).item()
    row = frame[(frame.score == "loss_at_position") & (frame.factor == "10")]
    assert row.value.item() == pytest.approx(loss, rel=1e-5)
    assert row.n.item() == int(at_10.sum())
    distances = frame[frame.score == "accuracy_at_distance"]
    assert distances.n.sum() == 512  # two queries in each of 256 sequences
    layout = batch.layout
    far = layout.query_pos - layout.key_pos.gather(1, layout.query_pair)
    assert distances.set_index("factor").n["4-7"] == int(((far >= 4) & (far <= 7)).sum())


def test_what_was_computed_before_is_reused(run):
    first, second, third = Listens(), Listens(), Listens()
    one = analyze(run, steps="0,3", progress=first)
    both = analyze(run, steps="0,3,6", progress=second)
    assert (first.steps, second.steps) == ([0, 3], [6])
    assert second.lines == ["scores: 2 of 3 checkpoints were analyzed before"]
    pd.testing.assert_frame_equal(both[both.step <= 3].reset_index(drop=True), one)
    analyze(run, steps="0,3,6", progress=third)
    assert third.steps == []


def test_an_interrupted_analysis_keeps_what_is_done(run):
    with pytest.raises(KeyboardInterrupt):
        analyze(run, progress=Listens(stop_at=6))
    again = Listens()
    analyze(run, progress=again)
    assert again.steps == [9, 12]


def test_a_circuit_that_was_found_before_is_read_from_disk_and_phases_know_it(run):
    assert runner.kept_circuit(run, 16) is None
    assert analysis_results(run, ["phases"], sequences=16).known_circuit is None
    found = runner.circuits(run, sequences=16)[run.steps[-1]]
    kept = runner.kept_circuit(run, 16)
    assert [part.effect for part in kept.tried] == [part.effect for part in found.tried]
    assert runner.kept_circuit(run) is None  # of another number of sequences
    assert analysis_results(run, ["phases"], sequences=16).known_circuit == kept


@pytest.mark.usefixtures("without_type_checks")  # the stand-in gives no timeline
def test_what_follows_from_tables_is_made_after_all_of_them(run, monkeypatch):
    """Phases follow the curves that the circuit names, also if phases are asked for first."""
    seen = []
    monkeypatch.setattr(results, "timeline", lambda run, scores, circuit: seen.append(circuit) or None)
    with pytest.raises(AttributeError):  # the timeline is none
        analysis_results(run, ["phases", "circuit"], sequences=8)
    assert len(seen) == 1
    assert seen[0] is not None


def test_another_number_of_sequences_goes_to_another_file(run):
    analyze(run, steps=0)
    assert set(analyze(run, steps=0, sequences=300).query("score == 'recall'").n) == {300}
    assert {p.name for p in (run.path / "analysis").glob("*.parquet")} == {"scores.parquet", "scores-300.parquet"}
    assert set(analyze(run, steps=0).query("score == 'recall'").n) == {256}


def test_a_damaged_checkpoint_is_left_out_by_name(run):
    path = run.path / "checkpoints" / "step-00000006.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    told = Listens()
    frame = analyze(run, progress=told)
    assert sorted(frame.step.unique()) == [0, 3, 9, 12]
    assert any("checkpoint 6 left out" in line and "step-00000006" in line for line in told.lines)


def test_a_damaged_table_is_set_aside_and_made_again(run):
    before = analyze(run)
    path = run.path / "analysis" / "scores.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    told = Listens()
    pd.testing.assert_frame_equal(analyze(run, progress=told), before)
    assert "damaged" in told.lines[0]
    assert (run.path / "analysis" / "scores.old-1.parquet").exists()


def test_a_table_of_an_older_kind_is_set_aside(run, monkeypatch):
    analyze(run, steps=0)
    monkeypatch.setattr(runner, "_VERSION", 99)
    told = Listens()
    analyze(run, steps=0, progress=told)
    assert "made by another version" in told.lines[0]
    meta = pq.read_schema(run.path / "analysis" / "scores.parquet").metadata
    assert json.loads(meta[b"circuitscope"])["settings"]["version"] == 99


def test_some_scores_by_name(run):
    frame = analyze(run, ["recall", "composition", "model"])
    assert set(frame.score) == {
        "recall",
        "accuracy",
        "loss",
        "in_context",
        "loss_at_position",
        "accuracy_at_distance",
        "q_composition",
        "k_composition",
        "v_composition",
    }


def test_channels_have_rows_of_their_own_and_the_layer_one(tmp_path):
    run = train(tiny(), root=tmp_path, name="a")
    model = cs.model("mamba", n_layers=1, d_model=8, vocab_size=64, max_length=16).eval()
    data = HeldOut(run.config.task, longest=16, sequences=8)
    rows = pd.DataFrame(score_rows(model, data, check_scores(None, run.config.task)))
    recall = rows[(rows.score == "recall") & (rows.weighting == "abs")]
    assert recall.groupby("factor")["head"].count().to_dict() == {"ssm": 16, "conv": 16, "composed": 16}
    assert recall[recall["head"].isna()].factor.tolist() == ["ssm", "conv", "composed"]
    for factor in ("ssm", "composed"):
        phi = cs.phi(model, data.own.tokens, 0, factors="phi" if factor == "ssm" else factor)
        of_channels = cs.analysis.recall_score(phi, data.own.layout, "abs").mean(0)
        rows_there = recall[(recall.factor == factor) & recall["head"].notna()].sort_values("head")
        assert torch.allclose(torch.tensor(rows_there.value.tolist()), of_channels, atol=1e-6)
        whole = cs.analysis.recall_score(phi.abs().sum(1, keepdim=True), data.own.layout, "abs").mean()
        assert recall[(recall.factor == factor) & recall["head"].isna()].value.item() == pytest.approx(whole.item())


@pytest.mark.parametrize(
    ("scores", "says"), [(["recal"], "did you mean 'recall'"), (["recall"], "needs a task with keys")]
)
def test_scores_that_cannot_be_had(tmp_path, scores, says):
    config = tiny() if scores == ["recal"] else None
    if config is None:
        from circuitscope.config import RunConfig

        config = RunConfig.build(
            "attention", "induction", block=4, repeats=2, vocab_size=16, d_model=8, steps=1, batch_size=2, threads=1
        )
    run = train(config, root=tmp_path, name="x")
    with pytest.raises(UserError, match=says):
        analyze(run, scores)
    assert not (run.path / "analysis").exists()


def test_a_run_without_checkpoints_says_so(run):
    for path in (run.path / "checkpoints").glob("*"):
        path.unlink()
    with pytest.raises(UserError, match="has no checkpoints to analyze"):
        analyze(run)


def test_a_run_whose_checkpoints_are_all_damaged_says_so(run):
    for path in (run.path / "checkpoints").glob("*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint of .* could be read"):
        analyze(run)


def test_somebody_elses_hooked_model_is_scored_too():
    from transformer_lens import HookedRootModule
    from transformer_lens.hook_points import HookPoint

    class Foreign(HookedRootModule):
        """Always looks one back."""

        def __init__(self):
            super().__init__()
            self.attn = torch.nn.ModuleDict({"hook_pattern": HookPoint()})
            self.setup()

        def forward(self, tokens):
            pattern = torch.eye(tokens.shape[1]).roll(1, 0).tril()
            return self.attn["hook_pattern"](pattern.expand(len(tokens), 2, -1, -1).clone())

    data = HeldOut(cs.task("mqar", length=16, pairs=2, vocab_size=64), longest=16, sequences=8)
    rows = pd.DataFrame(score_rows(Foreign(), data, ["previous_token", "binding", "recall"]))
    value = rows[rows["head"] == 0].set_index("score").value
    assert value["previous_token"] == pytest.approx(1)
    assert value["binding"] == pytest.approx(1)
    assert value["recall"] == pytest.approx(0, abs=0.2)


@pytest.fixture
def others():
    """Analyses from outside: of the first checkpoint alone, of none, of all; and one whose needs need scores."""
    with added_to(ANALYSES):
        told = []

        @analysis("at_first", "Rows of the checkpoint that is read first.", {"value": "float64"})
        def at_first(model, data):
            told.append(model)
            return [{"value": 1.0}] if len(told) == 1 else []

        @analysis("never", "No rows.", {"value": "float64"})
        def never(model, data):
            return []

        @analysis("always", "A row per checkpoint.", {"value": "float64"})
        def always(model, data):
            return [{"value": 2.0}]

        @run_analysis("near", "How many scores.", {"value": "int64"}, needs=("scores",))
        def near(found):
            return [{"value": len(found["scores"])}]

        @run_analysis("far", "The same.", {"value": "int64"}, needs=("near",))
        def far(found):
            return [{"value": found["near"].value[0]}]

        yield


@pytest.mark.usefixtures("others")
def test_a_checkpoint_without_rows_is_read_once_and_stays_among_the_steps_of_the_others(run):
    found = analysis_results(run, ["at_first", "never", "always"])
    assert found["at_first"].step.tolist() == [0]
    assert found["never"].empty
    assert found["always"].step.tolist() == found.steps == run.steps
    told = Listens()
    again = analysis_results(run, ["at_first", "never"], progress=told)
    assert told.steps == []
    assert again.steps == run.steps
    pd.testing.assert_frame_equal(again["at_first"], found["at_first"])


@pytest.mark.usefixtures("others")
def test_what_is_needed_by_what_is_needed_is_computed_too(run):
    found = analysis_results(run, ["far"], steps=0)
    assert found["far"].value.item() == len(found["scores"]) > 0


@pytest.mark.usefixtures("others")
def test_analyses_that_need_each_other_are_refused(run):
    run_analysis("chicken", "", {}, needs=("egg",))(lambda found: [])
    run_analysis("egg", "", {}, needs=("chicken",))(lambda found: [])
    with pytest.raises(UserError, match="'chicken' needs itself: chicken needs egg needs chicken"):
        analysis_results(run, ["chicken"])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"value": 1.0, "velue": 1.0}, "unknown column of wrong 'velue'; did you mean 'value'"),
        ({}, "wrong: rows do not have the types of the columns: .*'count'"),
        ({"count": "many"}, "wrong: rows do not have the types of the columns: .*'count'"),
    ],
)
def test_rows_that_do_not_fit_the_columns_are_refused(run, row, says):
    with added_to(ANALYSES):
        analysis("wrong", "Wrong.", {"value": "float64", "count": "int64"})(lambda model, data: [row])
        with pytest.raises(UserError, match=says):
            analysis_table(run, "wrong", steps=0)


def test_a_row_cannot_say_that_it_is_of_another_step(run):
    with added_to(ANALYSES):
        analysis("lies", "Lies.", {"value": "float64"})(lambda model, data: [{"value": 1.0, "step": 7, "run": "b"}])
        frame = analysis_table(run, "lies", steps=3)
    assert (frame.step.item(), frame["run"].item()) == (3, "tiny")


def test_several_runs_make_one_table_and_one_score_may_be_a_string(run):
    other = train(tiny(seed=1), root=run.path.parent, name="other")
    one = analyze(run, scores="recall", sequences=8)
    assert set(one.score) == {"recall"}
    pd.testing.assert_frame_equal(one, analyze(str(run.path), scores=["recall"], sequences=8))
    both = analyze([run, other.path], scores="recall", sequences=8)
    assert both["run"].unique().tolist() == ["tiny", "other"]
    pd.testing.assert_frame_equal(both[both["run"] == "tiny"], one)
    assert list(analysis_results(run, "scores", sequences=8).tables) == ["scores"]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("given", [[], 3, None, {"run": 1}], ids=str)
def test_what_is_no_run_is_refused_in_one_line(given):
    with pytest.raises(UserError, match=r"^(expected a run or its folder|no runs are given)"):
        analyze(given)
    with pytest.raises(UserError, match=r"^expected a run or its folder, such as runs/NAME, got"):
        analysis_table(given, "scores")


def test_a_wide_model_gets_fewer_sequences_for_its_circuit_unless_somebody_asks_for_a_number(run, monkeypatch):
    monkeypatch.setattr(affordable, "_ENTRIES", 20 * 16**2)
    told = Listens()
    table = analysis_table(run, "circuit", progress=told)
    assert set(table.n) == {20}
    assert [line for line in told.lines if line.startswith("circuit: on 20 of the 256 sequences")]
    told = Listens()
    assert set(analysis_table(run, "circuit", sequences=32, progress=told).n) == {32}
    assert not [line for line in told.lines if "because" in line]


def test_an_ordinary_model_gets_all_sequences_for_its_circuit(run):
    told = Listens()
    assert set(analysis_table(run, "circuit", progress=told).n) == {256}
    assert told.lines == []


def test_long_work_says_before_how_long_it_may_take(run, monkeypatch):
    monkeypatch.setattr(estimate, "_WORTH", 1)
    told = Listens()
    analyze(run, progress=told)
    said = [line for line in told.lines if re.fullmatch(r"scores: about \d+ s for a checkpoint, \d+ s in all", line)]
    assert len(said) == 1
    told = Listens()
    analyze(run, progress=told)  # all rows are on disk
    assert not [line for line in told.lines if "about" in line]


def test_what_is_done_within_a_checkpoint_is_told(run):
    class Watches(Listens):
        def doing(self, what: str) -> None:
            self.lines.append(what)

    told = Watches()
    analysis_table(run, "circuit", progress=told)
    assert [line for line in told.lines if re.fullmatch(r"step 12, sequence 0 of 256 with blocks\.\d\S+ edited", line)]
