"""Heatmaps draw the matrix they are given: read back from the artists, on made-up matrices and on small models."""

import itertools

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

import circuitscope as cs
from circuitscope.errors import UserError
from circuitscope.tasks import Role
from circuitscope.viz.heatmap import Axis, heatmap, labelled
from circuitscope.viz.scales import DECADES, POWER, Panel, as_drawn, colours, default_scale
from circuitscope.viz.style import look


def random_matrix(length: int, seed: int = 0) -> np.ndarray:
    return np.tril(np.random.default_rng(seed).normal(size=(length, length)))


def matrix_axes(figure):
    """Axes that hold a matrix or a diagonal, left to right and top to bottom."""
    return [a for a in figure.axes if a.images and not a.get_label().startswith("colours")]


def drawn(axes) -> np.ma.MaskedArray:
    return axes.images[0].get_array()


def bars(figure):
    return {a.get_label().removeprefix("colours of "): a for a in figure.axes if a.get_label().startswith("colours")}


def strips(axes) -> dict:
    return {child.get_label(): child for child in axes.child_axes}


# Scales


@pytest.mark.parametrize("sign", [1, -1])
def test_signed_draws_the_matrix_itself_with_colours_centred_on_0(sign):
    matrix = sign * random_matrix(9)
    figure = heatmap([Panel(matrix, "ssm", "channel 3")])
    (axes,) = matrix_axes(figure)
    below = np.tri(9, dtype=bool)
    np.testing.assert_array_equal(drawn(axes).data[below], matrix[below])
    norm = axes.images[0].norm
    assert norm.vmin == -norm.vmax
    assert norm.vmax == pytest.approx(np.abs(matrix).max(), rel=1e-12)
    assert axes.images[0].cmap(norm(0.0))[:3] == pytest.approx((0.97, 0.97, 0.97), abs=0.01)
    assert axes.images[0].get_cmap().name == "RdBu_r"


def test_only_the_causal_half_is_drawn():
    matrix = random_matrix(9) + np.triu(np.full((9, 9), 7.0), 1)  # what lies above the diagonal is not looked at
    for scale in ("signed", "share", "log"):
        (axes,) = matrix_axes(heatmap([Panel(matrix, "ssm")], scale=scale))
        np.testing.assert_array_equal(np.ma.getmaskarray(drawn(axes)), ~np.tri(9, dtype=bool))
        assert np.abs(drawn(axes)).max() < 7


def test_share_is_the_share_of_the_row():
    matrix = random_matrix(9)
    matrix[4] = 0
    (axes,) = matrix_axes(heatmap([Panel(matrix, "ssm")], scale="share"))
    found = drawn(axes).filled(0)
    sums = np.ones(9)
    sums[4] = 0
    np.testing.assert_allclose(found.sum(1), sums, atol=1e-12)
    np.testing.assert_allclose(found[7], np.abs(matrix[7]) / np.abs(matrix[7]).sum(), rtol=1e-12)
    assert (axes.images[0].norm.vmin, axes.images[0].norm.vmax) == (0, 1)
    assert axes.images[0].get_cmap().name == "viridis"


def test_log_draws_sizes_over_at_most_five_decades():
    matrix = np.tril(10.0 ** -np.arange(9)[:, None] * np.where(np.arange(9) % 2, -1, 1))
    (axes,) = matrix_axes(heatmap([Panel(matrix, "ssm")], scale="log"))
    below = np.tri(9, dtype=bool)
    np.testing.assert_allclose(drawn(axes).data[below], np.abs(matrix)[below], rtol=1e-12)
    norm = axes.images[0].norm
    assert norm.vmax == 1
    assert norm.vmin == pytest.approx(10.0**-DECADES)
    assert norm(1e-3) == pytest.approx(2 / 5)  # evenly in the logarithm
    assert norm(0.0) == 0  # zeros in the lowest colour


@pytest.mark.parametrize("scale", ["signed", "share", "log"])
@pytest.mark.parametrize(
    "matrix",
    [
        np.zeros((5, 5)),
        np.eye(5),
        np.ones((1, 1)),
        np.zeros((1, 1)),
        np.full((5, 5), np.nan),  # of a model that diverged
        np.full((5, 5), np.inf),
        np.full((5, 5), 1e-300),
    ],
)
def test_degenerate_matrices_have_colours_too(scale, matrix):
    figure = heatmap([Panel(matrix, "ssm")], scale=scale)
    norm = matrix_axes(figure)[0].images[0].norm
    assert norm.vmin < norm.vmax
    with look():
        figure.draw_without_rendering()


def test_a_large_diagonal_does_not_hide_the_rest():
    matrix = 0.1 * random_matrix(9)
    np.fill_diagonal(matrix, 5.0)
    figure = heatmap([Panel(matrix, "ssm")])
    (axes,) = matrix_axes(figure)
    off = np.abs(np.tril(matrix, -1)).max()
    assert axes.images[0].norm.vmax == pytest.approx(off)
    assert 0.05 < off < 0.5
    faint = np.eye(9) + 1e-9 * random_matrix(9)
    assert colours([as_drawn(Panel(faint, "ssm"), "signed")], "signed")[1].vmax == pytest.approx(0.01, rel=1e-6)


def test_attention_and_means_of_sizes_are_shares_unless_told():
    assert default_scale([Panel(np.eye(3), "any", "head 0", entries="shares")]) == "share"
    assert default_scale([Panel(np.eye(3), "ssm", "mean |·| of 4 channels", entries="sizes")]) == "share"
    assert default_scale([Panel(np.eye(3), "ssm", "mean of 4 channels")]) == "signed"
    assert default_scale([Panel(np.eye(3), "ssm", "channel 0")]) == "signed"
    attention = np.tril(np.random.default_rng(0).random((6, 6)))
    attention /= attention.sum(1, keepdims=True)
    (axes,) = matrix_axes(heatmap([Panel(attention, "pattern", "head 0", entries="shares")]))
    np.testing.assert_allclose(drawn(axes).filled(0), attention, rtol=1e-12)


# Panels


def test_panels_of_one_factor_share_their_colours_and_others_do_not():
    panels = [Panel(random_matrix(6, s) * (s + 1), "ssm", step=100 * s) for s in range(3)]
    figure = heatmap([*panels, *[Panel(random_matrix(6, 9) * 50, "conv", step=100 * s) for s in range(3)]])
    norms = [a.images[0].norm for a in matrix_axes(figure)]
    ssm, conv = {n.vmax for n in norms[:3]}, {n.vmax for n in norms[3:]}
    assert len(ssm) == len(conv) == 1
    assert ssm.pop() == pytest.approx(max(np.abs(p.values).max() for p in panels))
    assert set(bars(figure)) == {"ssm", "conv"}


def place(axes):
    box = axes.get_position()
    return box.x0, box.y0, box.x1, box.y1


def test_a_strip_over_steps_is_one_row_in_order_of_step():
    figure = heatmap([Panel(random_matrix(6, s), "pattern", "head 0", s) for s in (0, 400, 800, 1200)])
    found = matrix_axes(figure)
    assert [a.get_title() for a in found] == ["step 0", "step 400", "step 800", "step 1200"]
    assert len({round(place(a)[1], 9) for a in found}) == 1
    assert all(place(a)[2] < place(b)[0] for a, b in itertools.pairwise(found))


def test_factors_stand_side_by_side_in_the_order_they_multiply():
    gate = np.linspace(-1, 2, 6)
    figure = heatmap(
        [
            Panel(gate, "gate", "channel 0"),
            Panel(random_matrix(6), "ssm", "channel 0"),
            Panel(random_matrix(6, 1), "conv", "channel 0"),
            Panel(random_matrix(6, 2), "composed", "channel 0"),
        ]
    )
    found = matrix_axes(figure)
    assert [a.get_title() for a in found] == ["gate", "ssm", "conv", "composed"]
    assert all(place(a)[2] < place(b)[0] for a, b in itertools.pairwise(found))
    np.testing.assert_array_equal(drawn(found[0])[:, 0], gate)  # a diagonal is a strip along the destinations
    assert place(found[0])[2] - place(found[0])[0] < 0.2 * (place(found[1])[2] - place(found[1])[0])
    assert [round(place(a)[1], 9) for a in found] == [round(place(found[0])[1], 9)] * 4
    assert [round(place(a)[3], 9) for a in found] == [round(place(found[0])[3], 9)] * 4


def test_many_heads_wrap_and_no_two_panels_overlap():
    figure = heatmap([Panel(random_matrix(6, h), "ssm", f"channel {h}") for h in range(10)])
    found = matrix_axes(figure)
    assert [a.get_title() for a in found] == [f"channel {h}" for h in range(10)]
    boxes = [place(a) for a in found]
    for i, a in enumerate(boxes):
        assert min(a) >= 0
        assert max(a) <= 1
        for b in boxes[i + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    assert len({round(b[1], 9) for b in boxes}) == 3  # rows of four


def test_a_bare_matrix_or_tensor_is_a_panel():
    matrix = random_matrix(5)
    for given in (matrix, torch.tensor(matrix, requires_grad=True)):
        (axes,) = matrix_axes(heatmap(given))
        np.testing.assert_array_equal(drawn(axes).data[np.tri(5, dtype=bool)], matrix[np.tri(5, dtype=bool)])


def test_the_data_are_the_entries_of_the_causal_half():
    matrix = random_matrix(5)
    panels = [Panel(np.arange(5.0), "gate", "channel 1", 7), Panel(matrix, "ssm", "channel 1", 7)]
    data = heatmap(panels, scale="share", about={"run": "r", "layer": 2}).data
    assert list(data) == ["run", "layer", "step", "factor", "head", "dest", "src", "value", "drawn"]
    ssm = data[data.factor == "ssm"]
    assert len(ssm) == 15
    assert (ssm.src <= ssm.dest).all()
    np.testing.assert_array_equal(ssm.value, matrix[ssm.dest, ssm.src])
    np.testing.assert_allclose(ssm.groupby("dest").drawn.sum(), 1, rtol=1e-12)
    gate = data[data.factor == "gate"]
    assert gate.value.tolist() == gate.drawn.tolist() == [0, 1, 2, 3, 4]


# Axes


def mqar(length: int, pairs: int) -> Axis:
    batch = cs.task("mqar", length=length, pairs=pairs, vocab_size=8192).batch(0, size=1)
    return Axis(batch.tokens[0].tolist(), batch.layout.roles[0].tolist())


def test_every_position_has_the_colour_of_its_role_on_both_axes():
    axis = mqar(16, 2)
    (axes,) = matrix_axes(heatmap([Panel(random_matrix(16), "ssm")], axis=axis))
    for which in "xy":
        rgb = strips(axes)[f"roles {which}"].images[0].get_array().reshape(16, 3)
        expected = [Role(r).colour for r in axis.roles]
        found = ["#" + "".join(f"{round(255 * c):02X}" for c in pixel) for pixel in rgb]
        assert found == expected


def labels_of(axes, which: str):
    axis = getattr(strips(axes)[f"roles {which}"], f"{which}axis")
    return list(zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True))


@pytest.mark.parametrize(("length", "pairs"), [(16, 2), (64, 4), (512, 64)])
@pytest.mark.parametrize("count", [1, 4])
def test_token_labels_are_the_tokens_in_their_roles_colour_and_do_not_overlap(length, pairs, count):
    axis = mqar(length, pairs)
    panels = [Panel(np.eye(length), "ssm", f"channel {c}") for c in range(count)]
    figure = heatmap(panels, axis=axis, title="a run")
    with look():
        figure.draw_without_rendering()
    first = matrix_axes(figure)[0]
    for which in "xy":
        found = labels_of(first, which)
        assert len(found) >= min(length, 16) - 4 * (count > 1)
        for at, text in found:
            assert text.get_text() == str(axis.tokens[int(at)])
            if axis.roles[int(at)] != Role.FILLER:
                assert text.get_color() == Role(axis.roles[int(at)]).colour
        boxes = [text.get_window_extent() for _, text in found]
        spans = sorted((b.x0, b.x1) if which == "x" else (b.y0, b.y1) for b in boxes)
        assert all(a[1] <= b[0] + 0.5 for a, b in itertools.pairwise(spans))  # half a pixel
    ticks = [t.get_window_extent() for t in first.get_xticklabels() if t.get_visible() and t.get_text()]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(ticks))


SHEETS = {
    "factors": ("gate", "ssm", "conv", "composed"),
    "two": ("ssm", "conv"),
    "one": ("ssm",),
    "strip": ("gate",),
}


@pytest.mark.parametrize("length", [16, 64, 512])
@pytest.mark.parametrize("names", list(SHEETS))
@pytest.mark.parametrize("roles", [True, False])
def test_nothing_is_cut_off_at_the_edge_of_the_figure(length, names, roles):
    values = {name: np.arange(length) / length if name == "gate" else np.eye(length) for name in SHEETS[names]}
    panels = [Panel(v, name, "channel 0") for name, v in values.items()]
    figure = heatmap(panels, axis=mqar(length, 2) if roles else None, title="a run with a long name · " * 12)
    with look():
        figure.draw_without_rendering()
        tight = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert tight.x0 >= 0
    assert tight.y0 >= 0
    assert tight.x1 <= width
    assert tight.y1 <= height


@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("count", [1, 4])
def test_every_entry_has_at_least_two_pixels(length, count):
    figure = heatmap([Panel(np.eye(length), "ssm", f"channel {c}") for c in range(count)])
    for axes in matrix_axes(figure):
        assert axes.get_window_extent().width >= 2 * length - 1e-6
        assert axes.get_window_extent().height >= 2 * length - 1e-6


def test_positions_with_a_part_in_the_task_are_labelled_first_and_thinned_evenly():
    axis = mqar(64, 4)
    every = labelled(axis, 64, spacing=0.9)
    assert every == list(range(64))
    some = labelled(axis, 64, spacing=2.5)
    assert min(np.diff(some)) >= 3
    query = [i for i, r in enumerate(axis.roles) if r == Role.QUERY]
    assert query[-1] in some
    assert {axis.roles[i] for i in some if i < 8} == {Role.KEY, Role.VALUE}  # not only every second
    assert labelled(Axis(), 64, 1.0) == []


def test_a_role_that_nobody_knows_is_shown_by_its_number():
    axis = Axis([5, 6, 7], [1, 99, 0])
    figure = heatmap([Panel(random_matrix(3), "ssm")], axis=axis)
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["key", "role 99", "filler"]


def test_marks_point_at_their_edges():
    figure = heatmap([Panel(random_matrix(8), "ssm")], marks={"recall": ([5, 7], [1, 3]), "binding": ([1], [0])})
    (axes,) = matrix_axes(figure)
    recall, binding = axes.collections
    np.testing.assert_array_equal(recall.get_offsets(), [[1, 5], [3, 7]])  # x is the source
    np.testing.assert_array_equal(binding.get_offsets(), [[0, 1]])
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["recall", "binding"]


@pytest.mark.parametrize("length", [8, 64])
@pytest.mark.parametrize("count", [1, 4])
def test_marks_are_as_large_as_their_cell_and_no_larger(length, count):
    names = ("recall", "binding", "value", "previous_token")
    panels = [Panel(random_matrix(length), "ssm", f"channel {c}") for c in range(count)]
    figure = heatmap(panels, marks={name: ([5], [1]) for name in names})
    axes = matrix_axes(figure)[0]
    cell = axes.get_window_extent().width / figure.dpi * 72 / length
    assert len(axes.collections) == 4
    for mark in axes.collections:
        outline = mark.get_path_effects()[0]._gc["linewidth"]
        shape = mark.get_paths()[0].get_extents()
        side = max(shape.width, shape.height) * mark.get_sizes()[0] ** 0.5 + outline
        assert 0.8 * cell < side < 1.05 * cell


def test_a_mark_shows_on_grey_light_and_dark():
    figure = heatmap([Panel(random_matrix(8), "ssm")], marks={name: ([5], [1]) for name in "abcd"})
    for mark in matrix_axes(figure)[0].collections:
        tones = [to_rgb(mark.get_edgecolor()[0]), to_rgb(mark.get_path_effects()[0]._gc["foreground"])]
        for under in ("#E8E8E8", "#000000", "#FFFFFF", "#440154", "#21918C", "#FDE725", "#67001F", "#053061"):
            assert max(contrast(tone, to_rgb(under)) for tone in tones) > 4, under


def contrast(a, b) -> float:
    """Of two colours, as the web's guidelines for accessibility define it: from 1 to 21."""
    light = []
    for rgb in (a, b):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_sets_of_edges_beyond_the_shapes_there_are_are_refused():
    with pytest.raises(UserError, match="at most 4 sets of edges, got 5: a, b, c, d, e"):
        heatmap(random_matrix(8), marks={name: ([5], [1]) for name in "abcde"})


@pytest.mark.parametrize(
    ("panel", "scale", "says"),
    [
        (Panel(np.eye(3), "pattern", entries="shares"), "share", "share of the row, square-root scale"),
        (Panel(np.eye(3), "ssm", entries="sizes"), "share", "|Φ ssm| / row sum, square-root scale"),
        (Panel(np.eye(3), "phi"), "log", "|Φ|, log scale"),
        (Panel(np.eye(3), "phi"), "signed", "Φ"),
        (Panel(np.arange(3.0), "gate"), "share", "Φ gate"),
    ],
)
def test_the_colour_bar_says_its_scale(panel, scale, says):
    (bar,) = bars(heatmap([panel], scale=scale)).values()
    assert bar.get_ylabel() == says
    norm = colours([as_drawn(panel, scale)], scale)[1]
    assert ("square-root" in says) == (getattr(norm, "gamma", 1) == POWER == 0.5)


def test_the_legend_names_the_roles_that_are_there():
    figure = heatmap([Panel(random_matrix(16), "ssm")], axis=mqar(16, 2))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["key", "value", "query", "filler"]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: heatmap([]), "at least one"),
        (lambda: heatmap(np.zeros((3, 4))), r"\[3, 4\]"),
        (lambda: heatmap([Panel(np.eye(3), "a"), Panel(np.eye(4), "a")]), r"\[3, 4\]"),
        (lambda: heatmap(np.eye(3), scale="lgo"), "did you mean 'log'"),
        (lambda: heatmap(np.eye(3), axis=Axis(tokens=[1, 2])), "tokens"),
        (lambda: heatmap(np.eye(3), axis=Axis(roles=[1, 2, 3, 0])), "roles"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(UserError, match=says):
        call()
