"""An argument of another type than annotated is named in one line, and only where the call fails because of it."""

import pickle
from pathlib import Path

import pytest
import torch

import circuitscope as cs
from circuitscope.arguments import explained

pytestmark = pytest.mark.usefixtures("without_type_checks")


@explained
def halved(number: float, *rest: int, path: str | Path | None = None, **options: int) -> float:
    """Half of a number."""
    if number == 0:
        raise ZeroDivisionError("a bug of its own")
    return number / 2


@explained
def counted(items: list[int]):
    for item in items:
        yield item + 1


def test_an_argument_of_another_type_is_named_with_what_was_expected():
    with pytest.raises(cs.UserError, match=r"^halved: number must be float, got '3'$") as error:
        halved("3")
    assert isinstance(error.value.__cause__, TypeError)
    with pytest.raises(cs.UserError, match=r"^newest_run: root must be str \| Path \| None, got \['runs'\]$"):
        cs.newest_run(["runs"])
    with pytest.raises(cs.UserError, match=r"^summarize: per_sequence must be Float\[Tensor, 'batch head'\], got None"):
        cs.analysis.summarize(None)
    with pytest.raises(cs.UserError, match=r"^load: path must be str \| Path, got None$"):
        cs.RunConfig.load(None)


def test_a_call_that_works_is_left_alone_whatever_its_types():
    assert halved(torch.tensor(4.0)) == 2
    assert halved(3, "more", path=5, other="x") == 1.5


def test_every_item_of_a_list_is_looked_at():
    for _ in range(10):  # beartype alone draws the item that it looks at
        with pytest.raises(cs.UserError, match=r"^counted: items must be list\[int\], got \[1, 2, '3', 4\]$"):
            list(counted([1, 2, "3", 4]))


def test_errors_that_have_another_reason_stay_as_they_are():
    with pytest.raises(ZeroDivisionError, match="a bug of its own"):
        halved(0)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        halved()
    with pytest.raises(cs.UserError, match=r"^unknown task 'mqra'"):
        cs.task("mqra")


def test_a_generator_is_watched_while_it_runs():
    assert list(counted([1, 2])) == [2, 3]
    with pytest.raises(cs.UserError, match=r"^counted: items must be list\[int\], got \['a'\]$"):
        list(counted(["a"]))


def test_the_public_functions_keep_their_names_and_signatures():
    assert cs.phi.__name__ == "phi"
    assert "layer" in cs.phi.__doc__


def test_a_public_function_can_be_sent_to_another_process():
    assert pickle.loads(pickle.dumps(cs.train)) is cs.train


def test_memory_that_ran_out_is_a_failed_run_in_one_line():
    @explained
    def everything(sequences: int) -> torch.Tensor:
        return torch.empty(sequences, 2**40)

    with pytest.raises(cs.RunFailed, match=r"^everything: out of memory; use fewer or shorter sequences") as error:
        everything(1000)
    assert str(error.value).endswith(" sequences (4,096,000.0 GiB were asked for at once)")  # in our words alone
