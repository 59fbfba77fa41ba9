"""A generator from a seed; what is no seed is refused in one line."""

import pytest

from circuitscope.analysis.draws import seeded
from circuitscope.errors import UserError


def test_a_seed_gives_the_same_numbers_each_time():
    assert seeded(3).initial_seed() == 3


@pytest.mark.parametrize("seed", [-1, 2**63, 10**20])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(UserError, match="seed: expected a whole number from 0 to"):
        seeded(seed)
