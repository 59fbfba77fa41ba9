"""The decay figure shows the profiles and the rates of the table."""

import numpy as np
import pytest
from laid_out import assert_legend_apart, entries
from made_up_runs import decay_table

from circuitscope.errors import UserError
from circuitscope.viz.decay import CURVES, decay
from circuitscope.viz.step_axis import StepAxis
from circuitscope.viz.words.decay import decay_lines

RATES = {0: {step: 0.3 - step / 10_000 for step in range(0, 1600, 100)}, 1: dict.fromkeys(range(0, 1600, 100), 0.1)}


def panels(figure):
    """Axes of profiles, then those of rates."""
    return [a for a in figure.axes if not a.get_label().startswith("<colorbar>")]


def lines(axes, style: str):
    return [x for x in axes.lines if x.get_linestyle() == style]


def test_profiles_are_the_medians_at_first_last_and_steps_between_on_a_log_axis():
    figure = decay({"run": decay_table(RATES)})
    left = panels(figure)[0]
    assert left.get_yscale() == "log"
    found = {int(x.get_label().removeprefix("_step ")): np.array(x.get_data(), float) for x in lines(left, "-")}
    assert len(found) == CURVES
    assert {0, 1500} <= set(found)
    for step, (lag, m) in found.items():
        np.testing.assert_array_equal(lag, np.arange(32))
        np.testing.assert_allclose(m, 2 * np.exp(-RATES[0][step] * lag), rtol=1e-12)


def test_the_fitted_line_has_the_rate_of_the_table_and_lies_on_an_exponential_profile():
    left = panels(decay({"run": decay_table(RATES)}))[0]
    first, last = lines(left, "--")
    for line, step in ((first, 0), (last, 1500)):
        lag, m = np.array(line.get_data(), float)
        assert lag[0] == 1
        np.testing.assert_allclose(-np.diff(np.log(m)), RATES[0][step], rtol=1e-9)
        np.testing.assert_allclose(m, 2 * np.exp(-RATES[0][step] * lag), rtol=1e-9)
    assert [x.get_label() for x in (first, last)] == [
        "step 0: κ = 0.3, R² = 0.95",
        "step 1500: κ = 0.15, R² = 0.95",
    ]


def test_rates_over_steps_have_their_quartiles_as_a_band():
    right = panels(decay({"run": decay_table(RATES)}))[2]
    (line,) = lines(right, "-")
    np.testing.assert_array_equal(line.get_xdata(), list(RATES[0]))
    np.testing.assert_allclose(line.get_ydata(), list(RATES[0].values()), rtol=1e-12)
    points = right.collections[0].get_paths()[0].vertices
    at = points[points[:, 0] == 500, 1]
    assert (at.min(), at.max()) == pytest.approx((0.5 * RATES[0][500], 2 * RATES[0][500]))


def test_every_run_and_layer_has_a_panel_that_says_so_and_every_layer_one_for_the_rates():
    tables = {"one": decay_table(RATES), "two": decay_table({0: {0: 0.2, 100: 0.3}}, heads=1)}
    figure = decay(tables)
    titles = [a.get_title("left").split("\nstep")[0].replace("\n", " ") for a in panels(figure)]
    of = "|Φ|, median of 3 heads or channels"
    assert titles == [
        *(f"one, layer 0: {of}", f"one, layer 1: {of}", "two, layer 0: |Φ|"),
        *("layer 0: rate κ of exp(−κ δ)", "layer 1: rate κ of exp(−κ δ)"),
    ]
    rates = panels(figure)[3]
    assert [x.get_label() for x in lines(rates, "-")] == ["one", "two"]
    assert len({x.get_color() for x in lines(rates, "-")}) == 2
    assert not rates.collections  # bands of several runs would cover each other
    assert len(panels(decay(tables, layers=[0]))) == 3


def test_quartiles_are_named_only_where_there_are_several_heads():
    one, several = (decay({"run": decay_table(RATES, heads=heads)}) for heads in (1, 3))
    texts = [" ".join([*entries(f), *(a.get_title("left") + a.get_ylabel() for a in f.axes)]) for f in (one, several)]
    assert "quartiles" not in texts[0]
    assert "median" not in texts[0]
    assert "bands: quartiles over heads or channels" in texts[1]


def test_what_was_fitted_stands_above_the_profiles_and_not_on_them():
    figure = decay({"run": decay_table(RATES)})
    fits = panels(figure)[0].get_title("left").split("\n")
    assert fits[-2:] == ["step 0: κ = 0.3, R² = 0.95", "step 1500: κ = 0.15, R² = 0.95"]
    assert_legend_apart(figure)


@pytest.mark.parametrize(("runs", "layers", "inches"), [(1, 1, 4), (1, 2, 6), (6, 1, 8), (6, 2, 10), (1, 6, 9)])
def test_many_runs_and_layers_fit_a_page_with_one_legend_and_one_colour_bar(runs, layers, inches):
    table = decay_table({layer: {0: 0.2, 100: 0.1} for layer in range(layers)}, length=8)
    figure = decay({f"a-run-with-a-name-{i}": table for i in range(runs)})
    assert_legend_apart(figure)
    assert len(panels(figure)) == runs * layers + layers
    assert len(figure.axes) == len(panels(figure)) + 1
    width, height = figure.get_size_inches()
    assert width <= 9
    assert height <= inches
    for axes in panels(figure):
        assert axes.get_window_extent().width / figure.dpi > 1.2
        assert axes.get_window_extent().height / figure.dpi > 1.0


def test_steps_can_be_limited_and_on_a_log_axis():
    figure = decay({"run": decay_table({0: RATES[0]})}, axis=StepAxis(log=True, first=200, last=900))
    left, right = panels(figure)
    assert [int(x.get_label().removeprefix("_step ")) for x in lines(left, "-")] == list(range(200, 1000, 100))
    assert right.get_xscale() == "log"
    assert right.get_ylim()[1] < 0.7  # the upper quartile at step 200 is 0.56; at step 0 it is 0.6
    assert right.get_xlabel() == "step (log scale)"


def test_zeros_do_not_break_a_log_axis():
    table = decay_table({0: {0: 0.2, 100: 0.2}})
    table.loc[table.quantity.str.startswith("profile") & (table.lag > 3), "value"] = 0.0
    figure = decay({"run": table})
    figure.draw_without_rendering()
    (_, m) = np.array(lines(panels(figure)[0], "-")[-1].get_data(), float)
    assert np.isfinite(m[:4]).all()
    assert np.isnan(m[4:]).all()
    fitted = np.array(lines(panels(figure)[0], "--")[-1].get_data(), float)[1]
    np.testing.assert_allclose(fitted[:3], m[1:4], rtol=1e-9)


def test_a_table_that_lacks_some_quartiles_is_drawn_without_their_band():
    whole = decay_table({0: {0: 0.2, 100: 0.2}})
    missing = (whole.quantity == "profile_q25") & (whole.lag % 2 == 1)
    missing |= (whole.quantity == "kappa_q25") & (whole.step == 0)
    figure = decay({"run": whole[~missing]})
    assert not panels(figure)[0].collections
    np.testing.assert_array_equal(lines(panels(figure)[0], "-")[-1].get_xdata(), np.arange(32))


def test_the_axis_spans_at_most_eight_decades():
    left = panels(decay({"run": decay_table({0: {0: 2.0}})}))[0]
    assert left.get_ylim()[0] >= 2e-8 * (1 - 1e-9)


def test_the_data_are_profiles_and_rates():
    data = decay({"run": decay_table(RATES)}).data
    assert list(data) == ["run", "layer", "step", "quantity", "lag", "value"]
    m = data[(data.quantity == "m") & (data.layer == 0) & (data.step == 1500)]
    np.testing.assert_allclose(m.value, 2 * np.exp(-0.15 * m.lag.astype(float)), rtol=1e-12)
    rate = data[(data.quantity == "kappa_median") & (data.layer == 1)]
    assert rate.value.tolist() == [0.1] * 16


@pytest.mark.parametrize(
    ("options", "says"),
    [({"factor": "phy"}, "did you mean 'phi'"), ({"layers": [5]}, "got 5"), ({"factor": "phi_without_D"}, "phi")],
)
def test_what_is_not_there_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        decay({"run": decay_table(RATES)}, **options)
    with pytest.raises(UserError, match="at least one run"):
        decay({})


def test_the_loss_bump_is_shaded_where_steps_are_the_axis_and_of_several_runs_a_bar_on_top():
    *profiles, first, second = panels(decay({"run": decay_table(RATES)}, bump=(300, 600)))
    assert [len(a.patches) for a in profiles] == [0, 0]
    for axes in (first, second):
        (span,) = axes.patches
        assert (span.get_x(), span.get_width()) == (300, 300)
    both = decay({"a": decay_table(RATES), "b": decay_table(RATES)}, bump={"a": (300, 600), "b": None})
    (bar,) = panels(both)[-1].patches
    assert bar.get_x() == 300
    assert 0.9 < bar.get_y() < 1
    assert list(panels(decay({"run": decay_table(RATES)}))[-1].patches) == []


def test_where_no_exponential_fits_no_line_is_drawn_and_the_panel_says_so():
    table = decay_table(RATES, r2=0.05)
    table.loc[table.quantity.str.startswith("kappa") & ~table.quantity.str.contains("r2"), "value"] = np.nan
    figure = decay({"run": table})
    profiles, rates = panels(figure)[:2], panels(figure)[2:]
    for axes in profiles:
        assert lines(axes, "--") == []
        assert "step 0: no exponential fits, R² = 0.05 (bound 0.8)" in axes.get_title(loc="left")
    for axes in rates:
        assert [t.get_text().split("\n")[0] for t in axes.texts] == ["no rate: no exponential fits"]
    assert "dashed: exp(c − κ δ), fitted" not in entries(figure)


def test_the_fitted_line_follows_even_and_odd_lags():
    """Keys and values in turn: m(δ) is ten times larger at even lags."""
    table = decay_table({0: {0: 0.2, 100: 0.2}})
    by_lag = table.lag.notna() & (table.lag % 2 == 0).fillna(False)
    table.loc[by_lag, "value"] *= 10
    (fitted, *_) = lines(panels(decay({"run": table}))[0], "--")
    m = table[(table.step == 0) & (table.quantity == "profile_median") & (table.lag >= 1)].sort_values("lag").value
    np.testing.assert_allclose(fitted.get_ydata(), m, rtol=1e-9)


def test_the_words_say_no_fit_and_why():
    table = decay_table(RATES, r2=0.05)
    table.loc[table.quantity.str.startswith("kappa") & ~table.quantity.str.contains("r2"), "value"] = np.nan
    said = {line[1]: line[2] for line in decay_lines({"run": table})}
    assert said["rate κ of |Φ|, median over heads or channels"] == "no fit → no fit"
    assert said["R² of the exponential"] == "0.05 → 0.05"
    fits = {line[1]: line[2] for line in decay_lines({"run": decay_table(RATES)}) if line[0] == "L0"}
    assert fits["rate κ of |Φ|, median over heads or channels"] == "0.3 → 0.15"
