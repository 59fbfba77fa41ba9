"""What is made ahead is what would be made on time."""

import threading

import pytest
import torch

from circuitscope.training.ahead import Ahead

CPU = torch.device("cpu")


def test_each_step_gets_its_own_and_nothing_is_made_beyond_the_last():
    made = []
    ahead = Ahead(lambda step: made.append(step) or step * 10, 5, CPU)
    assert [ahead[step] for step in range(5)] == [0, 10, 20, 30, 40]
    assert sorted(made) == [0, 1, 2, 3, 4]


def test_the_next_step_is_made_while_this_one_is_computed():
    begun = threading.Event()
    ahead = Ahead(lambda step: begun.set() if step else None, 3, CPU)
    ahead[0]
    assert begun.wait(10)


def test_a_jump_gets_what_it_asks_for():
    ahead = Ahead(lambda step: step, 100, CPU)
    assert [ahead[step] for step in (3, 4, 50, 51, 4)] == [3, 4, 50, 51, 4]


def test_an_error_is_raised_where_its_step_is_asked_for():
    def make(step):
        if step == 2:
            raise MemoryError("no room")
        return step

    ahead = Ahead(make, 5, CPU)
    assert [ahead[0], ahead[1]] == [0, 1]
    with pytest.raises(MemoryError, match="no room"):
        ahead[2]
