"""Roles: found by number and by name, with one colour each; a task may bring its own."""

import copy
import pickle

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope.tasks import Role, roles

COUNT = 13  # roles that come with the package


@pytest.fixture
def forgotten(monkeypatch):
    """What a test adds is forgotten after it."""
    monkeypatch.setattr(roles, "_KNOWN", dict(roles._KNOWN))


def test_a_role_is_found_by_its_number_and_by_its_name():
    for role in Role:
        assert Role(int(role)) is role
        assert Role.named(role.name) is Role.named(role.name.upper()) is role
    assert [role.name for role in Role][:7] == ["filler", "key", "value", "query", "start", "block", "pair"]
    assert (Role.FILLER, Role.QUERY) == (0, 3)
    assert len(Role) == COUNT


def test_unknown_roles_are_refused_in_one_line():
    with pytest.raises(cs.UserError, match="unknown role 'qeury'; did you mean 'query'"):
        Role.named("qeury")
    for number in (COUNT, -1):
        with pytest.raises(cs.UserError, match=f"no role number {number}; expected 0 to {COUNT - 1}"):
            Role(number)


def test_every_role_has_a_colour_of_its_own_that_shows_on_light_and_on_dark():
    assert len({role.colour for role in Role}) == len(Role)
    for role in Role:
        red, green, blue = (int(role.colour[i : i + 2], 16) for i in (1, 3, 5))
        assert 40 < 0.2126 * red + 0.7152 * green + 0.0722 * blue < 215, role


def test_a_role_stands_in_arrays_and_tensors_and_survives_copying():
    assert torch.full((2,), Role.QUERY, dtype=torch.int8).tolist() == [3, 3]
    assert (np.array([3, 0], dtype=np.int8) == Role.QUERY).tolist() == [True, False]
    assert pickle.loads(pickle.dumps(Role.QUERY)) is copy.deepcopy(Role.QUERY) is Role.QUERY


def test_a_new_role_gets_the_next_number_and_is_found_like_the_others(forgotten):
    noise = Role.add("noise", "#F0E442", "to be ignored")
    assert (int(noise), noise.colour, noise.about) == (COUNT, "#F0E442", "to be ignored")
    assert Role.named("noise") is Role(COUNT) is Role.add("noise", "#F0E442", "to be ignored") is noise
    assert list(Role)[-1] is noise


@pytest.mark.parametrize(
    ("name", "colour", "expected"),
    [
        ("query", "#FF00FF", "the role 'query' exists already"),
        ("noise", "magenta", "a colour such as #0072B2"),
        ("No Se", "#FF00FF", "a name in small letters"),
    ],
)
def test_a_role_can_neither_be_shadowed_nor_be_malformed(forgotten, name, colour, expected):
    with pytest.raises(cs.UserError, match=expected):
        Role.add(name, colour, "another thing")
    assert len(Role) == COUNT
