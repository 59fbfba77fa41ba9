"""Choosing checkpoints by number, list and range."""

import pytest

from circuitscope.analysis.checkpoints.steps import choose_steps
from circuitscope.errors import UserError

SAVED = [0, 100, 200, 250, 300, 400]


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (None, SAVED),
        ("all", SAVED),
        ("0:2000:100", [0, 100, 200, 300, 400]),
        ("100:300", [100, 200, 250, 300]),
        (":200", [0, 100, 200]),
        ("250:", [250, 300, 400]),
        ("400,0", [0, 400]),
        ("0, 250:300", [0, 250, 300]),
        (200, [200]),
        ([300, 0, 0], [0, 300]),
    ],
)
def test_steps(asked, chosen):
    assert choose_steps(asked, SAVED) == chosen


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("260", "no checkpoint at step 260; nearest: 250"),
        (7, "nearest: 0"),
        ("150:190", "no checkpoint in the range 150:190; 6 saved, from 0 to 400"),
        ("first", "got 'first'"),
        ("1:2:3:4", "got '1:2:3:4'"),
        ("0:400:0", "got '0:400:0'"),
        ("-1", "got '-1'"),
        ("", "got ''"),
        ([], "no steps are asked for; 6 saved, from 0 to 400"),
    ],
)
def test_what_cannot_be_chosen(asked, says):
    with pytest.raises(UserError, match=says):
        choose_steps(asked, SAVED)
