"""Probes over checkpoints: the table, reuse, models that cannot be read; and the figure of them."""

import hashlib
import json
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.probes import Definition, fit, kept_probes, probe, probe_model
from circuitscope.analysis.probes.over_run import COLUMNS, ProbeData, probe_rows
from circuitscope.errors import UserError
from circuitscope.training.trainer import train
from circuitscope.viz.probes import probes, short_name
from tiny_run import Listens, tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tiny(), root=tmp_path_factory.mktemp("runs"), name="tiny")


@pytest.fixture
def run(trained, tmp_path):
    """A copy with no analyses yet."""
    shutil.copytree(trained.path, tmp_path / "tiny", ignore=shutil.ignore_patterns("analysis", "figures"))
    return cs.Run(tmp_path / "tiny")


def test_the_table_is_tidy_and_on_disk(run):
    frame = probe(run, "own-token", sequences=60)
    assert list(frame.columns) == list(COLUMNS)
    assert sorted(frame.step.unique()) == run.steps
    assert not frame.duplicated(["step", "hook", "role"]).any()
    assert set(frame.role) == {"key", "value", "query", "filler"}
    assert list(frame[frame.step == 0].layer.unique()) == [pd.NA, 0, 1]
    assert frame.accuracy.between(0, 1).all()
    assert (frame.low <= frame.accuracy).all()
    assert (frame.accuracy <= frame.high).all()
    np.testing.assert_allclose(frame.selectivity, frame.accuracy - frame.control)
    (path,) = (run.path / "analysis").glob("probe-own-token-*.parquet")
    saved = pd.read_parquet(path)
    pd.testing.assert_frame_equal(frame, saved.astype(COLUMNS), check_dtype=False)


def test_kept_tables_are_found_without_computing_anything_and_only_for_checkpoints_as_they_are(run):
    assert kept_probes(run) == {}
    frame = probe(run, "bound-key", sequences=60, hooks=["blocks.0.hook_resid_post"])
    (path,) = (run.path / "analysis").glob("probe-bound-key-*.parquet")
    ((name, found),) = kept_probes(run).items()
    assert name == path.stem
    pd.testing.assert_frame_equal(found, frame)
    first, last = (run.checkpoints.folder / f"step-{step:08}.safetensors" for step in (0, 12))
    shutil.copy(last, first)
    assert 0 not in set(kept_probes(run)[name].step)
    assert 12 in set(kept_probes(run)[name].step)
    path.write_bytes(b"damaged")
    path.with_name(f"{name}.old-1.parquet").write_bytes(b"set aside")
    assert kept_probes(run) == {}
    assert path.read_bytes() == b"damaged"


def test_the_embedding_itself_gives_the_token_away(run):
    """hook_embed is the very embedding that the labels are mapped to: the read-out must be perfect."""
    frame = probe(run, "own-token", steps=0, sequences=90)
    embed = frame[frame.hook == "hook_embed"]
    assert (embed.accuracy == 1).all()


def test_a_row_is_the_probe_of_that_checkpoint(run):
    frame = probe(run, "bound-key", steps="6", sequences=90, hooks=["blocks.1.hook_resid_post"])
    batch = run.config.task.batch(0, split="test", size=90, seed=0)
    model = run.load(6)
    X = model.run_with_cache(batch.tokens)[1]["blocks.1.hook_resid_post"].detach().numpy()[:, [1, 3]]
    tokens = batch.tokens.numpy()
    by_hand = fit(
        X,
        tokens[:, [0, 2]],
        candidates=np.repeat(tokens[:, None, [0, 2]], 2, axis=1),
        embedding=model.embed.weight.detach().numpy(),
        model="embedding",
        test=np.arange(90) >= 60,
    )
    (row,) = frame.itertuples()
    assert (row.n_train, row.n_test) == (by_hand.n_train, by_hand.n_test) == (120, 60)
    assert row.accuracy == pytest.approx(by_hand.accuracy, abs=0.02)  # float32 activations by another path
    assert row.chance == 0.5
    one = probe_model(model, batch, "bound-key", hooks="blocks.1.hook_resid_post")
    assert one.accuracy.item() == row.accuracy
    assert one.control.item() == row.control


def test_what_was_computed_before_is_reused(run):
    first, second = Listens(), Listens()
    one = probe(run, "bound-value", steps="0,3", sequences=60, progress=first)
    both = probe(run, "bound-value", steps="0,3,6", sequences=60, progress=second)
    assert (first.steps, second.steps) == ([0, 3], [6])
    assert "2 of 3 checkpoints were analyzed before" in second.lines[0]
    pd.testing.assert_frame_equal(both[both.step <= 3].reset_index(drop=True), one)


def test_other_settings_go_to_another_file_and_none_is_lost(run):
    probe(run, "bound-value", steps=0, sequences=60)
    probe(run, "bound-value", steps=0, sequences=63)
    probe(run, "bound-value", steps=0, sequences=60, hooks=["hook_embed"])
    probe(run, "bound-value", steps=0, sequences=60, causal=True)
    probe(run, Definition.load("bound-value").model_copy(update={"about": "other words"}), steps=0, sequences=60)
    names = {p.name for p in (run.path / "analysis").glob("*.parquet")}
    assert len(names) == 4
    assert not any("old" in name for name in names)


def test_causal_says_what_the_model_loses(run):
    frame = probe(run, "bound-key", steps=12, sequences=60, causal=True, directions=3)
    assert (frame.directions == 3).all()
    for column in ("left", "model_accuracy", "lost", "lost_control", "lost_random"):
        assert frame[column].notna().all()
    last = frame[frame.layer == 1]
    assert (last.lost == 0).all()  # a value after the last layer: no query sees it any more
    plain = probe(run, "bound-key", steps=12, sequences=60)
    assert plain.lost.isna().all()
    np.testing.assert_array_equal(plain.accuracy, frame.accuracy)


def planted():
    """One layer that hands every position its own token's embedding, and labels that ask for it."""
    model = cs.model("attention", d_model=32, n_layers=1, vocab_size=64, max_length=16).eval()
    with torch.no_grad():
        model.embed.weight.mul_(30)
        model.pos_embed.zero_()
        for block in model.layers:
            block.mixer.out.weight.zero_()
            block.mlp.out.weight.zero_()
    batch = cs.task("mqar", length=16, pairs=2, vocab_size=64).batch(0, size=300)
    asked = batch.layout.roles == int(cs.Role.QUERY)
    return model, cs.Batch(batch.tokens, torch.where(asked, batch.tokens, -100), batch.layout)


def test_removing_what_a_planted_model_uses_costs_its_accuracy_and_at_other_roles_nothing():
    model, batch = planted()
    found = probe_model(model, batch, "own-token", hooks="blocks.0.hook_resid_pre", causal=True).set_index("role")
    assert (found.accuracy == 1).all()
    assert (found.model_accuracy > 0.95).all()
    assert found.lost["query"] > 0.5
    assert found.left["query"] < 0.7  # the 1% that is left is free of noise here
    assert found.lost[["key", "value", "filler"]].abs().max() == 0
    few = probe_model(model, batch, "own-token", hooks="blocks.0.hook_resid_pre", causal=True, directions=1)
    assert few.set_index("role").lost["query"] < found.lost["query"]


def test_a_model_that_diverged_gives_rows_without_numbers(run):
    model = run.load(0)
    with torch.no_grad():
        model.layers[1].ln1.weight.fill_(float("nan"))
    data = ProbeData(Definition.load("bound-value"), run.config.task.batch(0, split="test", size=60))
    first, second = probe_rows(model, data)
    assert 0 <= first["accuracy"] <= 1
    assert "accuracy" not in second


def test_states_can_be_probed_raw_and_as_the_query_reads_them(tmp_path):
    run = train(tiny(mixers="mamba", n_layers=1, steps=2, save_every=2), root=tmp_path, name="mamba")
    read = probe(run, "bound-value-in-state", sequences=60)
    raw = probe(run, "bound-value", sequences=60, hooks=["blocks.*.mixer.hook_state"])
    for frame in (read, raw):
        assert set(frame.hook) == {"blocks.0.mixer.hook_state"}
        assert frame.accuracy.between(0.2, 0.8).all()  # two pairs, an untrained model, 40 questions
    assert set(read["at"]) == {"before"}


def test_too_few_sequences_for_the_classes_says_how_many(run):
    words = Definition.load("own-token").model_copy(update={"model": "logistic", "candidates": None})
    with pytest.raises(UserError, match=r"own-token at role \w+: \d+ training examples are too few .* about \d+ seq"):
        probe(run, words, steps=0, sequences=30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"definition": "bound-kee"}, "unknown probe 'bound-kee'; did you mean 'bound-key'"),
        ({"hooks": ["blocks.*.hook_resid_pst"]}, "unknown hook 'blocks.*.hook_resid_pst'; did you mean"),
        ({"sequences": 5}, "at least 6 sequences"),
        ({"steps": "7"}, "no checkpoint at step 7"),
        ({"definition": "weight-vector"}, "weight-vector needs a batch"),
        ({"definition": "bound-value-in-state"}, "no layer of this model has one: they are attention"),
        ({"causal": True, "directions": 0}, "directions must be at least 1"),
    ],
)
def test_bad_input_is_refused_before_any_file_is_written(run, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        probe(run, arguments.pop("definition", "bound-key"), **{"sequences": 60, **arguments})
    assert "\n" not in str(error.value)
    assert not list(run.path.glob("analysis/*.parquet"))


def test_another_process_finds_the_same_file(run):
    """The digest in its name is that of plain JSON."""
    probe(run, "bound-value", steps=0, sequences=60)
    (path,) = (run.path / "analysis").glob("*.parquet")
    definition = Definition.load("bound-value").model_dump(exclude={"about"})
    digest = hashlib.sha256(json.dumps([1, definition, False, None]).encode()).hexdigest()[:8]
    assert path.stem == f"probe-bound-value-{digest}-60"


@pytest.mark.parametrize("sequences", [60, 256])
def test_the_table_says_how_many_sequences_were_used(run, sequences):
    probe(run, "bound-value", steps=0, sequences=sequences, hooks=["hook_embed"])
    (path,) = (run.path / "analysis").glob("*.parquet")
    assert json.loads(pq.read_metadata(path).metadata[b"circuitscope"])["settings"]["sequences"] == sequences


def test_the_tested_part_of_a_batch_has_its_own_part_of_the_layout():
    batch = cs.task("mqar", length=16, pairs=2, vocab_size=64).batch(0, size=30)
    tested, where = ProbeData(Definition.load("bound-value"), batch).tested("query")
    assert len(tested) == len(where) == 10
    answers = tested.tokens.gather(1, tested.layout.answer_pos())
    torch.testing.assert_close(answers, tested.labels.gather(1, tested.layout.query_pos))
    assert torch.equal(where, tested.layout.roles == int(cs.Role.QUERY))


# -- the figure ---------------------------------------------------------------------------------------


def drawn(axes, label):
    (line,) = [x for x in axes.lines if x.get_label() == label]
    return np.array(line.get_data(), dtype=float)


def test_the_figure_shows_the_table_by_hook_and_by_step(run):
    frame = probe(run, "own-token", sequences=60)
    figure = probes(frame, bump=(3, 9))
    accuracy, by_step, selectivity, selectivity_by_step = figure.axes
    last = frame[(frame.step == 12) & (frame.role == "value")]
    np.testing.assert_allclose(drawn(accuracy, "value"), [[0, 1, 2], last.accuracy])
    np.testing.assert_allclose(drawn(selectivity, "value"), [[0, 1, 2], last.selectivity])
    of = frame[(frame.role == "key") & (frame.hook == "blocks.1.hook_resid_post")]
    np.testing.assert_allclose(drawn(by_step, "key, L1 resid_post"), [of.step, of.accuracy])
    np.testing.assert_allclose(drawn(selectivity_by_step, "key, L1 resid_post"), [of.step, of.selectivity])
    chance = [x.get_ydata()[0] for x in accuracy.lines if x.get_linestyle() == ":" and len(x.get_xdata()) == 2]
    np.testing.assert_allclose(sorted(set(chance)), sorted({round(c, 3) for c in frame.chance}))
    for axes in (by_step, selectivity_by_step):
        (shade,) = axes.patches
        assert (shade.get_x(), shade.get_x() + shade.get_width()) == (3, 9)
    assert not accuracy.patches
    assert len(figure.data) == len(frame)


def test_one_checkpoint_has_no_curve_over_steps(run):
    assert len(probes(probe(run, "bound-value", steps=0, sequences=60)).axes) == 2


def test_nothing_to_draw_is_refused():
    with pytest.raises(UserError, match="no results"):
        probes(pd.DataFrame({name: [] for name in COLUMNS}))


def test_hooks_have_short_names():
    assert short_name("blocks.3.mixer.hook_state") == "L3 state"
    assert short_name("hook_embed") == "embed"
    assert short_name("ln_final.hook_normalized") == "ln_final normalized"
