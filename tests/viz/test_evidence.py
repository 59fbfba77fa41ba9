"""The figure of a study's evidence: a panel for each criterion, a point for each seed, the bound, what passes."""

import math

import pandas as pd
import pytest

from circuitscope.errors import UserError
from circuitscope.viz.evidence import OUTCOMES, evidence


def cells(*rows):
    columns = ["criterion", "cell", "value", "outcome", "low", "high"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(words=table["criterion"], seed="1", of="")


TABLE = cells(
    ("solves", "conv on K", 0.99, "holds", 0.95, math.inf),
    ("solves", "conv on K", 0.97, "holds", 0.95, math.inf),
    ("solves", "conv on V", 0.26, "fails", 0.95, math.inf),
    ("sooner", "Mamba", math.inf, "open", -math.inf, 0.99),
    ("sooner", "Mamba", math.nan, "open", -math.inf, 0.99),
    ("never run", "Mamba", math.nan, "not run", -math.inf, 0.99),
)


def points(axes, colour):
    return sorted(float(line.get_xdata()[0]) for line in axes.lines if line.get_color() == colour)


def test_every_known_seed_is_a_point_in_the_colour_of_its_cell():
    figure = evidence(TABLE, title="it")
    first, second = figure.axes
    assert points(first, OUTCOMES["holds"][0]) == [0.97, 0.99]
    assert points(first, OUTCOMES["fails"][0]) == [0.26]
    assert [label.get_text() for label in first.get_yticklabels()] == ["conv on K", "conv on V"]
    assert points(second, OUTCOMES["open"][0]) == [second.get_xlim()[1]]  # infinite: at the edge


def test_what_passes_is_shaded_up_to_the_bound():
    first, second = evidence(TABLE, title="it").axes
    (above,), (below,) = first.patches, second.patches
    assert (above.get_x(), above.get_x() + above.get_width()) == pytest.approx((0.95, first.get_xlim()[1]))
    assert (below.get_x(), below.get_x() + below.get_width()) == pytest.approx((second.get_xlim()[0], 0.99))


def test_the_numbers_are_kept():
    assert list(evidence(TABLE, title="it").data["value"]) == [0.99, 0.97, 0.26, math.inf]


def test_nothing_known_is_one_clear_line():
    with pytest.raises(UserError, match="no trial that a criterion reads is done"):
        evidence(TABLE[TABLE["value"].isna()], title="it")
