"""One pass over a model: matrices and logits are those of the model itself, whatever way they are taken."""

import sys

import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.reading.opened import Reading, matrices

module = sys.modules[Reading.__module__]  # `analysis.matrices` is the function
TOKENS = torch.randint(64, (6, 16), generator=torch.Generator().manual_seed(0))


def attention(**options):
    return cs.model("attention", n_layers=2, n_heads=2, d_model=16, vocab_size=64, max_length=16, **options).eval()


@pytest.mark.parametrize("positions", ["learned", "rope", "alibi"])
@pytest.mark.parametrize("heads_at_once", [1, 2])
@pytest.mark.parametrize("with_logits", [True, False])
def test_patterns_and_logits_are_the_models(monkeypatch, positions, heads_at_once, with_logits):
    monkeypatch.setattr(module, "_CHUNK_BYTES", heads_at_once * 4 * 6 * 16**2)
    model, at = attention(positions=positions), torch.tensor([3, 17, 95])
    reading = Reading(model, TOKENS, at=at if with_logits else None)
    logits, cache = model.run_with_cache(TOKENS)
    seen = []
    for layer, factor, heads, of, matrix in reading:
        expected = cache[f"blocks.{layer}.mixer.hook_pattern"][:, heads]
        assert (factor, of) == ("pattern", 2)
        assert torch.allclose(matrix, expected, atol=1e-6)
        seen += [(layer, head) for head in range(heads.start, heads.stop)]
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]
    if with_logits:
        assert not reading.logits.requires_grad
        assert torch.allclose(reading.logits, logits.flatten(0, 1)[at], atol=1e-5)
    else:
        assert reading.logits is None


def test_logits_in_slices_are_the_logits(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2 * 4 * 64)
    reading = Reading(attention(), TOKENS, at=torch.arange(5))
    list(reading)
    slices = list(reading.logit_slices())
    assert [len(part) for part in slices] == [2, 2, 1]
    slices[0].zero_()  # the caller's own
    assert torch.equal(torch.cat(slices)[2:], reading.logits[2:])
    assert reading.logits[:2].abs().sum() > 0


def test_a_pattern_that_a_hook_changes_is_read_as_changed():
    model = attention()

    def even(pattern, hook):
        return torch.ones_like(pattern).tril() / torch.arange(1, 17)[:, None]

    with model.hooks(fwd_hooks=[("blocks.0.mixer.hook_pattern", even)]):
        found = list(Reading(model, TOKENS))
    assert torch.allclose(found[0].matrix[0, 0, 3, :5], torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]))
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_of_the_factors_only_those_named():
    model = cs.model("attention", conv_on="v", n_layers=1, d_model=16, vocab_size=64, max_length=16).eval()
    assert {m.factor for m in matrices(model, TOKENS)} == {"pattern", "conv"}
    assert {m.factor for m in matrices(model, TOKENS, ["conv"])} == {"conv"}
    assert list(matrices(attention(), TOKENS, ["conv"])) == []
