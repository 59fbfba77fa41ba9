"""LSTM: a baseline in the same stack that says it has no Φ."""

import contract
import pytest
import torch

import circuitscope as cs
from circuitscope.mixers.lstm import LSTM, LSTMConfig

D_MODEL = 16
TOKENS = torch.randint(9, (3, 11), generator=torch.Generator().manual_seed(0))


def mixer(dtype=torch.float32, **options) -> LSTM:
    torch.manual_seed(0)
    return contract.shaken(LSTM(LSTMConfig(**options), D_MODEL, "none")).to(dtype)


def model(**options) -> cs.HookedLM:
    return cs.model("lstm", **{"d_model": D_MODEL, "n_layers": 2, "vocab_size": 9, "max_length": 11} | options)


@pytest.mark.parametrize(("length", "batch"), [(1, 1), (2, 3), (17, 3), (256, 1)])
def test_it_is_the_recurrence_written_out(length, batch):
    built, x = mixer(torch.float64, d_hidden=5), contract.stream(length, D_MODEL, batch, torch.float64)
    lstm = built.lstm
    h = c = torch.zeros(batch, 5, dtype=torch.float64)
    states = []
    for t in range(length):
        gates = x[:, t] @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + h @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    out, seen = contract.run(built, x)
    contract.assert_close(seen["z"][:, :, 0], torch.stack(states, 1))
    contract.assert_close(out, built.out(torch.stack(states, 1)))


def test_it_has_no_phi_and_says_why():
    assert not hasattr(mixer(), "hook_phi")
    reading = mixer().reading(contract.stream(3, D_MODEL))
    assert (reading.factors, reading.products(), reading.state) == ((), {}, None)
    assert reading.no_phi
    assert reading.transition == "an LSTM is nonlinear in its state, so its transition is not a matrix"
    for ask in (lambda: reading.core, lambda: reading.whole, lambda: reading.product("phi")):
        with pytest.raises(cs.UserError, match=r"^its gates read the state, .*no mixing matrix"):
            ask()
    for factors in ("phi", "composed", "conv"):
        with pytest.raises(cs.UserError, match=r"layer 1 is lstm: .*nonlinear.*no mixing matrix"):
            cs.phi(model(), TOKENS, 1, factors=factors)
    with pytest.raises(cs.UserError, match="unknown hook"):
        model().run_with_cache(TOKENS, names_filter="blocks.0.mixer.hook_phi")


def test_no_matrix_could_stand_for_it():
    """Twice the values would give twice the output if the output were linear in them."""
    built, x = mixer(), contract.stream(5, D_MODEL)
    bias = built.out.bias
    assert (built(2 * x) - bias - 2 * (built(x) - bias)).abs().max() > 0.01


def test_state_size_is_hidden_and_cell():
    assert mixer().state_size == 2 * D_MODEL
    assert mixer(d_hidden=5).state_size == 10


def test_flops_are_two_a_weight_of_the_gates():
    assert mixer(d_hidden=5).mixing_flops(8) == 2 * 4 * 5 * (D_MODEL + 5)


def test_its_output_hook_can_be_edited():
    built, x = mixer(), contract.stream(5, D_MODEL)
    out, _ = contract.run(built, x, hook_z=torch.zeros_like)
    assert torch.equal(out, built.out.bias.expand_as(out))


def test_it_works_in_a_hooked_model():
    built = model()
    assert built.config.positions == "none"
    assert built.cfg.n_heads == 1
    assert built.cfg.d_head == D_MODEL
    logits, cache = built.run_with_cache(TOKENS)
    torch.testing.assert_close(logits, built(TOKENS))  # the norms' hook_scale rounds otherwise
    assert cache["blocks.0.mixer.hook_z"].shape == (3, 11, 1, D_MODEL)
    assert not [name for name in cache if "phi" in name or name.endswith("hook_v")]
    edited = built.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mixer.hook_z", lambda z, hook: 0 * z)])
    assert not torch.equal(edited, logits)


def test_it_is_causal_and_learns():
    built, tokens = contract.briefly_trained(LSTMConfig())
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 64
    before, after = built(tokens), built(changed)
    torch.testing.assert_close(after[:, :20], before[:, :20])
    assert not torch.equal(after[:, 20:], before[:, 20:])


def test_gradients_reach_every_parameter():
    built = model()
    built(TOKENS).pow(2).mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in built.blocks.parameters())


def test_layers_beside_it_keep_their_phi():
    built = cs.HookedLM(cs.models.ModelConfig(mixers=("lstm", "attention"), d_model=D_MODEL, vocab_size=9))
    assert cs.phi(built, TOKENS, 1).shape == (3, 1, 11, 11)
