"""HookedLM: what it computes, from which positions, and how it starts."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import circuitscope as cs

POSITIONS = ["none", "learned", "sinusoidal", "rope", "alibi"]
every_encoding = pytest.mark.parametrize("positions", POSITIONS)


def small(positions: str = "learned", sharp: bool = True, **options) -> cs.HookedLM:
    """A tiny model; `sharp` makes its weights large, so that patterns and logits are far from uniform."""
    model = cs.model(
        **{"d_model": 16, "n_heads": 2, "vocab_size": 23, "max_length": 24, "positions": positions, "seed": 3} | options
    )
    if sharp:
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=g))
    return model.eval()


def some_tokens(batch: int = 3, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(23, (batch, length), generator=torch.Generator().manual_seed(seed))


@every_encoding
@given(at=st.integers(0, 11), to=st.integers(0, 22), seed=st.integers(0, 50))
def test_changing_a_token_leaves_all_earlier_logits_and_other_sequences_alone(positions, at, to, seed):
    model, tokens = small(positions), some_tokens(seed=seed)
    changed = tokens.clone()
    changed[1, at] = to
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[1, :at], before[1, :at], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=1e-5, atol=1e-5)
    if tokens[1, at] != to:
        assert (after[1, at] - before[1, at]).abs().max() > 1e-3


@every_encoding
def test_a_prefix_has_the_logits_it_has_inside_the_whole(positions):
    model, tokens = small(positions), some_tokens()
    whole = model(tokens)
    for length in (1, 2, 7):
        torch.testing.assert_close(model(tokens[:, :length]), whole[:, :length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("positions", "sees_order"), [(p, p != "none") for p in POSITIONS])
def test_only_without_positions_is_the_last_logit_blind_to_the_order_before_it(positions, sees_order):
    model, tokens = small(positions, n_layers=1), some_tokens()
    shuffled = torch.cat([tokens[:, :-1].flip(1), tokens[:, -1:]], dim=1)
    moved = (model(shuffled)[:, -1] - model(tokens)[:, -1]).abs().max().item()
    assert (moved > 1e-2) == sees_order
    assert sees_order or moved < 1e-4


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_sequence_longer_than_the_positions_is_refused_with_the_size_to_ask_for(positions):
    with pytest.raises(cs.UserError, match=r"25 positions.*24.*max_length=25"):
        small(positions)(some_tokens(length=25))


@pytest.mark.parametrize("positions", ["none", "rope", "alibi"])
def test_encodings_without_a_table_take_any_length(positions):
    assert small(positions)(some_tokens(length=60)).shape == (3, 60, 23)


@every_encoding
@pytest.mark.parametrize("state_mixer", ["mlp", "none"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_at_chosen_positions_and_their_gradients_are_those_of_the_full_logits(positions, state_mixer, tied):
    model = small(positions, state_mixer=state_mixer, tied=tied).double()
    tokens = some_tokens()
    at = torch.tensor([0, 5, 11, 12, 35, 20])
    full = model(tokens).flatten(0, 1)[at]
    chosen = model(tokens, at=at)
    torch.testing.assert_close(chosen, full, rtol=1e-10, atol=1e-10)
    target = torch.arange(6)
    grads = [torch.autograd.grad(F.cross_entropy(x, target), list(model.parameters())) for x in (full, chosen)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_positions_of_a_batchs_labels_give_the_logits_at_its_queries():
    batch = cs.task("mqar", length=16, pairs=2, vocab_size=23).batch(0, size=4)
    model = small()
    where, _ = batch.labelled()
    at = batch.layout.query_pos.sort(dim=1).values
    expected = model(batch.tokens).gather(1, at[..., None].expand(-1, -1, 23)).flatten(0, 1)
    torch.testing.assert_close(model(batch.tokens, at=where), expected, rtol=1e-4, atol=1e-4)


def test_the_unembedding_is_the_embedding_only_when_tied():
    tied, free = small(), small(tied=False)
    assert tied.W_U.data_ptr() == tied.embed.weight.data_ptr()
    assert "unembed.weight" not in tied.state_dict()
    assert free.W_U.data_ptr() == free.unembed.weight.data_ptr() != free.embed.weight.data_ptr()
    for model in (tied, free):
        logits = model.hidden(some_tokens()) @ model.W_U
        torch.testing.assert_close(model(some_tokens()), logits, rtol=1e-4, atol=1e-4)


def test_layers_can_have_mixers_of_their_own_and_there_is_one_block_per_layer():
    config = cs.models.ModelConfig(
        mixers=[{"name": "attention", "n_heads": 1}, {"name": "attention", "n_heads": 4}], d_model=16, vocab_size=23
    )
    model = cs.HookedLM(config)
    assert [b.mixer.n_heads for b in model.blocks] == [1, 4]
    assert cs.phi(model, some_tokens(), -1).shape == (3, 4, 12, 12)
    with pytest.raises(cs.UserError, match="layer"):
        cs.phi(model, some_tokens(), 2)


@pytest.mark.parametrize("n_layers", [3, 3.0, "3"])
def test_a_model_of_three_layers_has_three_blocks_however_the_number_is_written(n_layers):
    try:
        model = small(n_layers=n_layers)
    except cs.UserError:
        assert not isinstance(n_layers, int)
        return
    assert len(model.blocks) == model.config.n_layers == 3


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    one, same, other = (cs.model(d_model=16, vocab_size=23, seed=s).state_dict() for s in (5, 5, 6))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert not torch.equal(one["blocks.0.mixer.qkv.weight"], one["blocks.1.mixer.qkv.weight"])


def test_building_a_model_neither_reads_nor_moves_the_global_random_state():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = cs.model(d_model=16, vocab_size=23)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(cs.model(d_model=16, vocab_size=23).embed.weight, one.embed.weight)


def near(tensor: torch.Tensor, std: float) -> bool:
    """Mean 0 and the given deviation, within five standard errors."""
    n = tensor.numel()
    return abs(tensor.mean().item()) < 5 * std / math.sqrt(n) and abs(tensor.std().item() / std - 1) < 5 / math.sqrt(
        2 * n
    )


@pytest.mark.parametrize(("state_mixer", "branches"), [("mlp", 2), ("none", 1)])
@pytest.mark.parametrize("rescale", [True, False])
def test_gpt2_weights_are_normal_and_residual_outputs_shrink_with_depth(state_mixer, branches, rescale):
    layers = 4
    model = cs.model(
        d_model=64, n_layers=layers, vocab_size=500, state_mixer=state_mixer, rescale_residual=rescale, tied=False
    )
    out = 0.02 / math.sqrt(branches * layers) if rescale else 0.02
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif ".ln" in name or name.startswith("ln_final"):
            assert (p == 1).all(), name
        else:
            assert near(p.detach(), out if name.endswith("out.weight") else 0.02), name


def test_native_weights_are_torchs_own_with_a_normal_embedding():
    model = cs.model(d_model=64, vocab_size=500, init="native", rescale_residual=False)
    assert near(model.embed.weight.detach(), 0.02)
    assert near(model.pos_embed.detach(), 0.02)
    for block in model.blocks:
        for linear in (block.mixer.qkv, block.mixer.out, block.mlp.into, block.mlp.out):
            bound = 1 / math.sqrt(linear.in_features)  # torch: uniform in ±1/√fan_in
            assert linear.weight.abs().max() <= bound
            assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
            assert linear.bias.abs().max() > 0


def test_a_fresh_default_model_is_close_to_guessing():
    batch = cs.task("mqar").batch(0, size=8)
    where, labels = batch.labelled()
    with torch.no_grad():
        loss = F.cross_entropy(cs.model()(batch.tokens, at=where), labels)
    assert loss.item() == pytest.approx(math.log(8192), abs=0.1)


def test_weights_survive_a_round_trip_and_nothing_else_is_in_the_state():
    model = small("sinusoidal")
    state = model.state_dict()
    assert set(state) == {n for n, _ in model.named_parameters()}
    other = small("sinusoidal", seed=9)
    other.load_state_dict(state)
    assert torch.equal(other(some_tokens()), model(some_tokens()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"d_modle": 8}, "did you mean 'd_model'"),
        ({"n_head": 8}, "did you mean 'n_heads'"),
        ({"positions": "rotary"}, "'rope'"),
        ({"n_layers": 0}, "n_layers.*0"),
        ({"d_model": -1}, "d_model.*-1"),
        ({"mixers": ["attention"] * 3, "n_layers": 2}, "3 mixers.*2"),
    ],
)
def test_bad_options_of_a_model_are_one_line(options, said):
    with pytest.raises(cs.UserError, match=said) as error:
        cs.model(**options)
    assert "\n" not in str(error.value)


def test_an_unknown_mixer_is_refused_with_the_nearest_name():
    with pytest.raises(cs.UserError, match="did you mean 'attention'"):
        cs.model("atention")


def test_a_config_may_stand_for_the_name_of_a_model():
    built = small(sharp=False)
    again = cs.model(built.config, seed=3)
    assert all(torch.equal(p, q) for p, q in zip(built.parameters(), again.parameters(), strict=True))
    assert cs.model(built.config, d_model=8, n_heads=4).config == small(sharp=False, d_model=8, n_heads=4).config


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("seed", [-1, 2**63, 1e300, "0", True, None])
def test_a_seed_that_is_no_seed_is_refused_in_one_line(seed):
    with pytest.raises(cs.UserError, match=r"seed: expected a whole number from 0 to 2\^63 − 1, got"):
        cs.model("attention", d_model=8, vocab_size=8, n_layers=1, seed=seed)
