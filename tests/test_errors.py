"""Messages are one line of printable text, whatever they quote."""

import pytest
from pydantic import TypeAdapter, ValidationError

from circuitscope.errors import RunFailed, UserError, escaped, unknown
from circuitscope.explain import problem


@pytest.mark.parametrize("kind", [UserError, RunFailed])
def test_a_newline_a_tab_and_an_escape_in_a_message_are_shown_not_printed(kind):
    assert str(kind("no run 'a\nb\t\x1b[31mc\u202e\udcff' in Φ")) == r"no run 'a\nb\t\x1b[31mc\u202e\udcff' in Φ"


def test_what_is_escaped_once_stays_as_it_is():
    once = escaped("a\nb")
    assert escaped(once) == once == r"a\nb"


def test_an_unknown_name_and_the_valid_ones_are_escaped():
    said = str(unknown("run", "a\x1b]0;b", ["a\x1b]0;c"]))
    assert said == r"unknown run 'a\x1b]0;b'; did you mean 'a\x1b]0;c'? valid: a\x1b]0;c"


def test_an_unknown_name_where_there_is_nothing_to_choose_from_says_so():
    assert str(unknown("sweep", "nope", [])) == "unknown sweep 'nope'; there is none"


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (int, "abc", "expected an integer, got 'abc'"),
        (int, 2.5, "expected an integer, got 2.5"),
        (float, "fast", "expected a number, got 'fast'"),
        (str, 5, "expected a string, got 5"),
    ],
)
def test_a_value_of_the_wrong_type_is_said_in_grammatical_words_with_the_value(kind, value, says):
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(value)
    assert problem(refused.value) == says
