"""Annotations are enforced while tests run: the option in pyproject.toml reaches every process that runs tests."""

import sys

import pytest
import torch
from jaxtyping import TypeCheckError

from circuitscope.kernels.wkv import wkv_reference
from circuitscope.progress import Lines
from circuitscope.tasks import Layout

pytestmark = pytest.mark.slow  # make test-fast runs without the option


def test_a_wrong_shape_of_an_argument_is_refused():
    w, u, k, v = torch.ones(3), torch.ones(3), torch.zeros(2, 4, 3), torch.zeros(2, 5, 3)
    with pytest.raises(TypeCheckError, match="parameter 'v'"):
        wkv_reference(w, u, k, v)


def test_a_wrong_type_in_a_dataclass_is_refused():
    with pytest.raises(TypeCheckError, match="parameter 'roles'"):
        Layout(torch.zeros(2, 4))


def test_an_int_will_do_for_a_float():
    assert Lines(seconds=1).seconds == 1


@pytest.mark.usefixtures("without_type_checks")
def test_a_test_can_do_without():
    assert Layout(torch.zeros(2, 4)).roles.dtype == torch.float32


def test_no_module_was_imported_before_the_checks():
    """A plugin or a conftest that imports the package too early would leave what it imports unchecked."""
    unchecked = [
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "circuitscope" and type(module.__spec__.loader).__name__ != "_JaxtypingLoader"
    ]
    assert unchecked == []
