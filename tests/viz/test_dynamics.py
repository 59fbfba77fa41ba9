"""The dynamics figure shows what the run's metrics say."""

import numpy as np
import pytest

import circuitscope as cs
from circuitscope.viz.dynamics import dynamics, save_dynamics


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> cs.Run:
    return cs.train(
        task={"length": 16, "pairs": 2, "vocab_size": 16},
        d_model=8,
        n_layers=1,
        steps=12,
        batch_size=8,
        eval_every=4,
        eval_batches=3,
        eval_batch_size=8,
        log_every=3,
        save_every=6,
        root=tmp_path_factory.mktemp("runs"),
        name="tiny",
    )


def drawn(axes, label: str) -> np.ndarray:
    """x and y of the one line with this label."""
    (line,) = [x for x in axes.lines if x.get_label() == label]
    return np.array(line.get_data(), dtype=float)


def test_lines_are_the_metrics_of_the_run(run):
    loss, accuracy = dynamics([run]).axes
    rows = run.metrics
    train, held = rows[rows.split == "train"], rows[rows.split == "validation"]
    assert len(train) >= 4
    assert len(held) >= 3
    np.testing.assert_array_equal(drawn(loss, "tiny, train"), [train.step, train.loss])
    np.testing.assert_array_equal(drawn(loss, "tiny, validation"), [held.step, held.loss])
    np.testing.assert_array_equal(drawn(accuracy, "tiny"), [held.step, held.accuracy])


def test_the_band_spans_the_evaluation_batches(run):
    _, accuracy = dynamics([run]).axes
    held = run.metrics[run.metrics.split == "validation"]
    (band,) = accuracy.collections
    points = band.get_paths()[0].vertices
    for step, per_batch in zip(held.step, held.accuracy_per_batch, strict=True):
        heights = points[points[:, 0] == step, 1]
        assert len(per_batch) == 3
        assert (heights.min(), heights.max()) == (min(per_batch), max(per_batch))


def test_chance_is_one_over_the_pairs_and_axes_are_named(run):
    loss, accuracy = dynamics([run]).axes
    chance = [x for x in accuracy.lines if x.get_linestyle() == ":"]
    assert [tuple(x.get_ydata()) for x in chance] == [(0.5, 0.5)]
    assert "1/k = 0.5" in [t.get_text() for t in accuracy.texts]
    assert (loss.get_ylabel(), accuracy.get_ylabel(), accuracy.get_xlabel()) == ("loss", "query accuracy", "step")


def test_several_runs_share_the_axes_in_different_colours(run):
    loss, accuracy = dynamics([run, run]).axes
    lines = [x for x in accuracy.lines if x.get_label() == "tiny"]
    assert len(lines) == 2
    assert lines[0].get_color() != lines[1].get_color()
    assert len(loss.lines) == 4


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_figure_is_written_where_asked_and_folders_are_made(run, tmp_path, suffix, magic):
    path = save_dynamics([run], tmp_path / "new" / f"figure{suffix}")
    assert path == tmp_path / "new" / f"figure{suffix}"
    assert path.read_bytes().startswith(magic)


def test_a_file_that_cannot_be_written_is_bad_input(run, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "figure.nonsense", tmp_path / "file" / "figure.png"):
        with pytest.raises(cs.UserError, match="cannot write"):
            save_dynamics([run], path)


def test_a_run_without_metrics_says_so(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text(run.config.dump())
    with pytest.raises(cs.UserError, match="no metrics"):
        dynamics([cs.Run(tmp_path / "empty")])
