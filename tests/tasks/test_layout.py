"""A layout of one's own: from positions alone, with the roles that a task of the package would give."""

import pytest
import torch

import circuitscope as cs
from circuitscope.errors import UserError
from circuitscope.tasks import Layout, Role

POSITIONS = {"key_pos": [[0, 2]], "value_pos": [[1, 3]], "query_pos": [[5]], "query_pair": [[1]]}


def test_positions_give_the_layout_that_the_task_makes():
    made = cs.task("mqar", length=16, pairs=2, vocab_size=64).batch(0, size=6).layout
    names = ("key_pos", "value_pos", "query_pos", "query_pair")
    for form in (lambda x: x, lambda x: x.numpy(), lambda x: x.tolist()):
        own = Layout.of_pairs(16, **{name: form(getattr(made, name)) for name in names})
        assert torch.equal(own.roles, made.roles)
        assert torch.equal(own.answer_pos(), made.answer_pos())


def test_positions_that_are_named_nowhere_are_filler():
    names = [Role(role).name for role in Layout.of_pairs(6, **POSITIONS).roles[0].tolist()]
    assert names == ["key", "value", "key", "value", "filler", "query"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_pos": [[1, 3, 4]]}, r"got value_pos of shape \[1, 3\]"),
        ({"query_pair": [1]}, r"got query_pair of shape \[1\]"),
        ({"key_pos": [[0, 2], [0, 2]]}, r"got value_pos of shape \[1, 2\]"),
        ({"query_pos": [[6]]}, "the position of a query is outside 0 to 5"),
        ({"key_pos": [[-1, 2]]}, "the position of a key is outside 0 to 5"),
        ({"query_pair": [[2]]}, "query_pair names a pair outside 0 to 1"),
    ],
)
def test_positions_that_do_not_fit_are_refused_in_one_line(change, message):
    with pytest.raises(UserError, match=message):
        Layout.of_pairs(6, **POSITIONS | change)
