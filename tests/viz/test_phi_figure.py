"""The Φ figure of a run draws what `circuitscope.phi` gives for that checkpoint, layer, head and example."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.checkpoints.runner import held_out
from circuitscope.analysis.pictures.layer import chosen_products, read_pictures, strongest_units
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.scores.weight_on_edges import score
from circuitscope.errors import UserError
from circuitscope.mixers.reading import Factor
from circuitscope.training.trainer import train
from circuitscope.viz.phi_figure import phi_figure
from tiny_run import tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Small runs by mixer, checkpoints at 0, 3, 6, 9 and 12; weights large enough that no two matrices look alike."""
    root, made = tmp_path_factory.mktemp("runs"), {}

    def run(mixer: str, **options) -> cs.Run:
        key = f"{mixer}{options}"
        if key not in made:
            config = tiny(mixers=[{"name": mixer, **options}], n_layers=2, lr=0.05, embed_std=1.0, init="native")
            made[key] = train(config, root=root, name=f"run{len(made)}")
        return made[key]

    return run


def images(figure) -> list[np.ndarray]:
    """Drawn matrices [dest, src] and strips [dest, 1], zeros above the diagonal."""
    axes = [a for a in figure.axes if a.images and not a.get_label().startswith("colours")]
    return [a.images[0].get_array().filled(0) for a in axes]


def titles(figure) -> list[str]:
    return [a.get_title() for a in figure.axes if a.images and not a.get_label().startswith("colours")]


def tokens_of(run: cs.Run, example: int) -> torch.Tensor:
    return held_out(run, 8).own.tokens[[example]]


def close(a, b) -> None:
    np.testing.assert_allclose(a, np.asarray(b.detach()), rtol=1e-5, atol=1e-7)


def test_attention_is_drawn_head_by_head(runs):
    run = runs("attention", n_heads=4)
    figure = phi_figure(run, 1, steps=6, example=3)
    expected = cs.phi(run.load(6), tokens_of(run, 3), 1)[0]
    assert titles(figure) == [f"head {h}" for h in range(4)]
    for drawn, one in zip(images(figure), expected, strict=True):
        close(drawn, one)
    other = cs.phi(run.load(6), tokens_of(run, 2), 1)[0, 0]
    assert not np.allclose(images(figure)[0], other.detach(), atol=1e-3)


def test_a_strip_has_a_panel_for_every_step(runs):
    run = runs("attention")
    figure = phi_figure(run, 0, steps="0,6,12", example=1)
    assert titles(figure) == ["step 0", "step 6", "step 12"]
    for drawn, step in zip(images(figure), (0, 6, 12), strict=True):
        close(drawn, cs.phi(run.load(step), tokens_of(run, 1), 0)[0, 0])


def test_factors_of_a_channel_stand_in_order_and_their_product_is_the_composed_matrix(runs):
    run = runs("mamba")
    model, tokens = run.load(12), tokens_of(run, 1)
    figure = phi_figure(run, 0, example=1, heads=[5])
    gate, ssm, silu, conv, composed = images(figure)
    assert [t.split(",")[0] for t in titles(figure)] == ["gate", "ssm", "silu", "conv", "composed"]
    for name, drawn in (("ssm", ssm), ("conv", conv), ("composed", composed)):
        close(drawn, cs.phi(model, tokens, 0, factors=name)[0, 5])
    close(gate[:, 0], cs.phi(model, tokens, 0, factors="gate")[0, 5].diagonal())
    np.testing.assert_allclose(gate * ssm @ (silu * conv), composed, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("how", ["mean", "mean_abs"])
def test_means_over_channels_are_those_of_phi(runs, how):
    run = runs("mamba")
    drawn = images(phi_figure(run, 0, example=2, factors=["ssm", "composed"], heads=how, scale="signed"))
    for one, name in zip(drawn, ("ssm", "composed"), strict=True):
        close(one, cs.phi(run.load(), tokens_of(run, 2), 0, factors=name, reduce=how)[0])


def test_channels_are_drawn_as_their_mean_unless_told(runs):
    figure = phi_figure(runs("mamba"), 0)
    assert "mean |·| of 16 channels" in figure.get_suptitle()
    expected = cs.phi(runs("mamba").load(), tokens_of(runs("mamba"), 0), 0, factors="conv", reduce="mean_abs")[0]
    close(images(figure)[3], expected / expected.sum(-1, keepdim=True))


def test_the_strongest_channels_are_those_that_score_highest(runs):
    run = runs("mamba")
    batch = held_out(run, 32).own
    values = score(cs.phi(run.load(), batch.tokens, 0, factors="ssm"), "recall", batch.layout, "abs").mean(0)
    best = values.argsort(descending=True)[:3]
    figure = phi_figure(run, 0, factors=["ssm"], top=3)
    assert titles(figure) == [f"channel {h} (recall {values[h]:.2f})" for h in best]
    ranked = strongest_units(run.load(), batch, 0, "ssm", "recall", 3)
    assert [r.unit for r in ranked] == best.tolist()
    np.testing.assert_allclose([r.score for r in ranked], values[best].detach(), rtol=1e-5)


def test_the_score_stands_only_where_it_was_taken(runs):
    figure = phi_figure(runs("mamba"), 0, factors=["ssm", "composed"], top=1, by="previous_token")
    ssm, composed = titles(figure)
    assert "previous_token" in composed
    assert "previous_token" not in ssm


def test_a_channel_of_a_head_is_shown_with_its_head(runs):
    run = runs("mamba2", headdim=4, d_state=4)
    model, tokens = run.load(), tokens_of(run, 0)
    figure = phi_figure(run, 0, heads=[6], factors=["ssd", "composed"])
    assert titles(figure) == ["ssd, head 1", "composed, channel 6"]
    close(images(figure)[0], cs.phi(model, tokens, 0, factors="ssd")[0, 1])
    close(images(figure)[1], cs.phi(model, tokens, 0, factors="composed")[0, 6])


def test_the_title_says_run_step_layer_factor_head_and_example(runs):
    run = runs("attention")
    title = phi_figure(run, 1, steps=9, example=4).get_suptitle()
    for part in (run.name, "step 9", "layer 1 (attention)", "pattern", "head 0", "test example 4"):
        assert part in title
    assert phi_figure(run, -1, steps=9, example=4).get_suptitle() == title


def test_marks_are_the_edges_of_the_example(runs):
    run = runs("attention")
    layout = held_out(run, 8).own.layout
    (axes,) = [a for a in phi_figure(run, 0, example=3, mark=["recall"]).axes if a.collections and a.images]
    found = sorted(map(tuple, axes.collections[0].get_offsets().tolist()))
    expected = zip(layout.answer_pos()[3].tolist(), layout.query_pos[3].tolist(), strict=True)
    assert found == sorted((float(src), float(dest)) for src, dest in expected)


def test_the_data_name_run_layer_and_example(runs):
    run = runs("attention")
    data = phi_figure(run, 0, steps="0,12", example=1).data
    assert {*data.run, *data.layer, *data.example, *data.step} == {run.name, 0, 1, 12}
    last = data[data.step == 12]
    expected = cs.phi(run.load(12), tokens_of(run, 1), 0)[0, 0].detach().numpy()
    np.testing.assert_allclose(last.value, expected[last.dest, last.src], rtol=1e-5)


def test_one_channel_builds_one_channel(runs):
    model = runs("mamba").load()
    reading, built = opened(model).reading(tokens_of(runs("mamba"), 0), 0), []

    def watched(factor: Factor) -> Factor:
        return replace(factor, build=lambda units: (built.append((factor.name, units)), factor.build(units))[1])

    watching = replace(reading, factors=tuple(map(watched, reading.factors)))
    read_pictures(watching, ["ssm", "composed"], [3])
    assert {(units.start, units.stop) for _, units in built} == {(3, 4)}


FACTORS = {
    "attention": ["pattern"],
    "based": ["linear_attention"],
    "mamba": ["gate", "ssm", "silu", "conv", "composed"],
    "s6": ["ssm"],
    "h3": ["q", "ssm", "k", "phi", "shift_k"],
    "hyena": ["x2", "filter", "x1", "conv", "phi", "composed", "conv_x1", "conv_x2"],
    "rwkv": ["receptance", "wkv", "shift", "phi", "shift_k", "shift_r"],
    "deltanet": ["delta", "silu", "conv", "composed", "conv_q", "conv_k"],
    "attention_conv_k": ["pattern", "conv_k", "matched"],
}


@pytest.mark.parametrize("mixer", list(FACTORS))
def test_all_factors_of_every_mixer_can_be_drawn(mixer):
    model = cs.model(mixer, d_model=8, n_layers=1, vocab_size=64, max_length=16).eval()
    tokens = cs.task("mqar", length=16, pairs=2, vocab_size=64).batch(0, size=1).tokens
    reading = opened(model).reading(tokens, 0)
    assert [product.name for product in chosen_products(reading)] == FACTORS[mixer]
    for picture in read_pictures(reading, units="mean"):
        expected = cs.phi(model, tokens, 0, factors=picture.factor, reduce="mean")[0].detach()
        close(picture.values, expected.diagonal() if picture.values.ndim == 1 else expected)


BAD = [
    ({"layer": 2}, "layer must be from 0 to 1, got 2"),
    ({"layer": -3}, "from 0 to 1"),
    ({"steps": 7}, "nearest: 6"),
    ({"steps": "0,x"}, "got 'x'"),
    ({"example": -1}, "example must be 0 or more"),
    ({"factors": ["pattrn"]}, "did you mean 'pattern'"),
    ({"factors": []}, "factors is empty"),
    ({"heads": [1]}, "head must be from 0 to 0, got 1"),
    ({"heads": [None]}, "head must be from 0 to 0, got None"),
    ({"heads": [-1]}, "got -1"),
    ({"heads": "most"}, "mean_abs"),
    ({"scale": "sined"}, "did you mean 'signed'"),
    ({"top": 0}, "at least 1"),
    ({"top": 1, "heads": [0]}, "not both"),
    ({"by": "recall"}, "how many"),
    ({"top": 1, "by": "recal"}, "did you mean 'recall'"),
    ({"mark": ["bindin"]}, "did you mean 'binding'"),
]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(("options", "says"), BAD)
def test_bad_input_is_one_line_that_says_what_is_valid(runs, options, says):
    with pytest.raises(UserError) as error:
        phi_figure(runs("attention"), **options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_an_lstm_has_no_matrix_and_says_why(runs):
    with pytest.raises(UserError, match=r"lstm.*no mixing matrix"):
        phi_figure(runs("lstm"), 0)


def test_composed_is_refused_where_it_does_not_exist(runs):
    with pytest.raises(UserError, match="shift"):
        phi_figure(runs("rwkv"), 0, factors="composed")


def test_too_many_panels_are_refused_with_a_way_out(runs):
    with pytest.raises(UserError, match="a mean"):
        phi_figure(runs("mamba"), 0, heads="all")
    with pytest.raises(UserError, match="fewer steps"):
        phi_figure(runs("mamba"), 0, heads="all", factors="ssm", steps="all")


def test_the_strongest_heads_of_a_diagonal_mean_nothing(runs):
    with pytest.raises(UserError, match="diagonal"):
        phi_figure(runs("mamba"), 0, factors=["gate"], top=1)


@pytest.mark.parametrize(("mixer", "factor"), [("based", "linear_attention"), ("deltanet", "delta")])
def test_a_matrix_with_one_head_is_drawn_as_it_is(runs, mixer, factor):
    run = runs(mixer)
    figure = phi_figure(run, 0, factors=factor)
    (drawn,) = images(figure)
    assert "head 0" in figure.get_suptitle()
    close(drawn, cs.phi(run.load(), tokens_of(run, 0), 0, factors=factor)[0, 0])
