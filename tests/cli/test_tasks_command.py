"""`circuitscope tasks` lists what is registered, with whatever it says of itself."""

import re

import pytest
from typer.testing import CliRunner

from circuitscope.cli.tasks import app
from circuitscope.tasks import MQAR, TASKS, register
from registered import added_to


@pytest.mark.parametrize("arguments", [[], ["show", "wordless"]])
def test_a_task_without_a_docstring_is_listed_and_shown(arguments):
    with added_to(TASKS):

        @register("wordless")
        class Wordless(MQAR):
            name: str = "wordless"

        Wordless.__doc__ = None
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "wordless" in result.output


def shown(*arguments):
    result = CliRunner().invoke(app, ["show", *arguments], catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == 0
    return result.output


def points(output):
    """x and y of each point of an example of vectors, as they are printed."""
    lines = re.findall(r"^(?:input|output) +-?\d.*$", output, re.MULTILINE)
    rows = [line.partition("→")[0].split() for line in lines]
    numbers = [[float(number) for number in row[1:]] for row in rows]
    return list(zip(numbers[::2], [y for y, *_ in numbers[1::2]], strict=True))


def test_the_parity_that_is_shown_is_that_of_the_points():
    out = shown("sparse_parity", "--examples", "1")
    first, second = (int(place) - 1 for place in re.search(r"^y = x(\d) · x(\d)$", out, re.MULTILINE).groups())
    assert all(x[first] * x[second] == y for x, y in points(out))


def test_the_tree_that_is_shown_leads_to_the_values_of_the_points():
    out = shown("decision_tree", "--examples", "1")
    conditions = [int(c) - 1 for c in re.findall(r"if x(\d) > 0:", out)]  # the root, its right child, its left child
    leaves = [float(leaf) for leaf in re.findall(r"y = (-?\d\.\d\d)", out)]
    assert (len(conditions), len(leaves)) == (3, 4)
    for x, y in points(out):
        left = x[conditions[0]] <= 0
        assert y == leaves[2 * left + (x[conditions[1 + left]] <= 0)]


def test_the_network_that_is_shown_is_that_of_the_points():
    out = shown("two_layer_network", "--examples", "1", "--set", "hidden=2", "--set", "scaled=true")
    assert "s = relu(W1 x) · √(2/2), y = W2 s" in out
    rows = [[float(number) for number in line.replace("W1", "").replace("W2", "").split()] for line in
            out.split("y = W2 s\n")[1].split("input")[0].splitlines()]  # fmt: skip
    for x, y in points(out):
        s = [max(0.0, sum(w * one for w, one in zip(row, x, strict=True))) for row in rows[:2]]
        assert sum(w * one for w, one in zip(rows[2], s, strict=True)) == pytest.approx(y, abs=0.1)
    assert "\nW1" in out
    assert "\nW1" not in shown("two_layer_network", "--set", "hidden=100")  # too large to print


def test_copies_are_shown_as_letters_and_each_role_in_words_of_the_task():
    out = shown("copy", "--examples", "1", "--set", "form=suffix")
    tokens, labels = (line.split()[1:] for line in out.splitlines() if line.startswith(("tokens", "labels")))
    text = "".join(tokens).rstrip("_")
    string, gram, answer = re.fullmatch(r"\$([a-z]+)\|([a-z]{2})\|([a-z])\.", text).groups()
    assert string[string.index(gram) + 2] == answer
    assert "".join(labels).strip("·") == f"{answer}."
    assert "key     a letter of the n-gram" in out  # a role of this form alone
    assert "what a key stands for" not in out


def test_a_stacked_pair_is_shown_with_its_key_and_its_value():
    tokens, labels = (
        line.split()[1:]
        for line in shown("stacked_mqar", "--examples", "1").splitlines()
        if line.startswith(("tokens", "labels"))
    )
    bound = dict(pair.split(":") for pair in tokens if ":" in pair)
    asked = {token: label for token, label in zip(tokens, labels, strict=True) if label != "·"}
    assert asked == bound
    assert len(bound) == 3
