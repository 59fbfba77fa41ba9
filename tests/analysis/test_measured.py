"""A value and its standard error are written with the digits that the error allows."""

import math

import pytest

from circuitscope.analysis.measured import measured


@pytest.mark.parametrize(
    ("value", "stderr", "written"),
    [
        (0.9617, 0.0031, "0.962 ± 0.003"),
        (0.9617, 0.0096, "0.96 ± 0.01"),
        (0.5, 0.123, "0.50 ± 0.10"),
        (0.5, 0.00071, "0.5000 ± 0.0007"),
        (0.12345, 0.00002, "0.12"),
        (1.0, 0.0, "1.00"),
        (0.25, math.nan, "0.25"),
    ],
)
def test_the_error_has_one_digit_that_matters_and_is_left_out_where_it_is_zero_or_unknown(value, stderr, written):
    assert measured(value, stderr) == written


def test_a_sign_is_written_where_it_is_asked_for():
    assert measured(0.5, 0.02, sign=True) == "+0.50 ± 0.02"
    assert measured(-0.5, 0.02, sign=True) == "-0.50 ± 0.02"
