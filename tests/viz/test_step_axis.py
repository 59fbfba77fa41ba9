"""The axis of steps shows the steps that are asked for, and gives early ones room on a log scale."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from circuitscope.errors import UserError
from circuitscope.viz.step_axis import StepAxis


def panel(steps=(0, 50, 100, 500, 1000), values=None):
    axes = Figure().subplots()
    axes.plot(steps, values if values is not None else steps)
    return axes


def places(axes, steps) -> np.ndarray:
    """Where steps lie between the left and the right edge of the panel."""
    x = axes.transData.transform(np.column_stack([steps, np.zeros(len(steps))]))[:, 0]
    box = axes.bbox
    return (x - box.x0) / box.width


def ticks(axes) -> list[float]:
    low, high = axes.get_xlim()
    return [t for t in axes.get_xticks() if low <= t <= high]


def test_a_log_axis_gives_early_steps_room_and_keeps_step_0():
    even, log = panel(), panel()
    StepAxis().apply([even])
    StepAxis(log=True).apply([log])
    assert places(even, [100])[0] < 0.15
    assert places(log, [100])[0] > 0.3
    at = places(log, [0, 50, 100, 500, 1000])
    assert (np.diff(at) > 0.05).all()
    assert at[0] >= 0
    assert at[-1] <= 1
    assert ticks(log) == [0, 50, 100, 200, 500, 1000]
    assert [t.get_text() for t in log.get_xticklabels()] == ["0", "50", "100", "200", "500", "1000"]
    assert (StepAxis().label, StepAxis(log=True).label) == ("step", "step (log scale)")


@pytest.mark.parametrize("last", [300, 2_000, 20_000, 500_000])
def test_a_log_axis_has_a_few_ticks_with_plain_numbers(last):
    axes = panel((0, 10, last))
    StepAxis(log=True).apply([axes])
    assert 3 <= len(ticks(axes)) <= 9
    assert all(t.get_text().isdecimal() for t in axes.get_xticklabels())


def test_a_narrow_stretch_of_a_log_axis_has_ticks_too():
    axes = panel(range(0, 1001, 50))
    StepAxis(log=True, first=600, last=900).apply([axes])
    assert len(ticks(axes)) >= 3
    assert places(axes, [600, 900]) == pytest.approx([0.05, 0.95], abs=0.05)


def test_the_limits_are_those_asked_for_and_the_height_fits_what_is_seen():
    steps = np.arange(0, 1001, 50)
    axes, fixed = panel(steps, 10 - steps / 100), panel(steps, 10 - steps / 100)
    fixed.set_ylim(0, 20)
    axes.axhline(100)  # a level is no curve
    axes.autoscale()
    StepAxis(first=225, last=400).apply([axes, fixed])
    assert axes.get_xlim() == (225, 400)
    low, high = axes.get_ylim()
    assert 5.5 < low < 6  # 6 at step 400
    assert 7.75 < high < 8  # 7.75 at step 225, between two points
    assert fixed.get_ylim() == (0, 20)


def test_one_limit_leaves_the_other_to_the_steps():
    axes = panel()
    StepAxis(last=100).apply([axes])
    low, high = axes.get_xlim()
    assert -10 < low < 0
    assert high == 100


def test_limits_that_leave_nothing_are_refused_with_the_steps_there_are():
    with pytest.raises(UserError, match="first step to draw must be below the last, got 5 and 5"):
        StepAxis(first=5, last=5)
    with pytest.raises(UserError, match="0 or more, got -1"):
        StepAxis(first=-1)
    with pytest.raises(UserError, match="nothing to draw from step 2000: the steps are 0 to 1000"):
        StepAxis(first=2000).apply([panel()])


@pytest.mark.parametrize("steps", [[0], [0, 0.0], [300]])
@pytest.mark.parametrize("log", [False, True])
def test_a_single_step_can_be_drawn(steps, log):
    axes = panel(steps)
    StepAxis(log=log).apply([axes])
    axes.figure.draw_without_rendering()
    low, high = axes.get_xlim()
    assert low < high
    norm = StepAxis(log=log).colours(steps)
    assert norm.vmin < norm.vmax
