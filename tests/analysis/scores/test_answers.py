"""Loss and most likely token from slices of logits, against torch on all of them."""

import pytest
import torch
import torch.nn.functional as F

from circuitscope.analysis.scores.answers import answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_slices_give_what_all_logits_give(size, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (30 * torch.randn(40, 50, generator=generator)).to(dtype)
    target = torch.randint(50, (40,), generator=generator)
    found = answers(logits.clone().split(size), target)
    assert torch.allclose(found.loss, F.cross_entropy(logits, target, reduction="none"), atol=1e-5)
    assert torch.equal(found.token, logits.argmax(dim=1))


def test_of_equal_logits_the_first_token_is_the_answer():
    found = answers([torch.zeros(3, 8)], torch.tensor([0, 1, 7]))
    assert found.token.tolist() == [0, 0, 0]
    assert found.loss.tolist() == pytest.approx([torch.tensor(8.0).log().item()] * 3)


def test_logits_that_are_not_numbers_give_a_loss_that_is_none():
    assert answers([torch.full((2, 4), float("nan"))], torch.tensor([0, 1])).loss.isnan().all()
