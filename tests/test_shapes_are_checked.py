import pytest
import torch
from jaxtyping import TypeCheckError

from circuitscope.kernels.wkv import wkv


def test_a_wrong_shape_is_refused_by_jaxtyping():
    with pytest.raises(TypeCheckError):
        wkv(torch.zeros(3), torch.zeros(2, 4, 3), torch.zeros(1), torch.zeros(3))
