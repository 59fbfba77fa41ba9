"""What a probe reads is what the hooks carry there; a state is read as its layer says."""

from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

import circuitscope as cs
from circuitscope.analysis.probes import Definition, collect, examples_of
from circuitscope.analysis.probes.activations import matching_hooks
from circuitscope.analysis.probes.over_run import probe_model
from circuitscope.analysis.probes.states import check_has_state, state_at
from circuitscope.errors import UserError
from circuitscope.hooks import hook
from circuitscope.mixers.mixer import MixerConfig
from circuitscope.mixers.reading import Reading, State
from circuitscope.mixers.registry import MIXERS, register


def build(name, **options):
    options = {"headdim": 16, **options} if name == "mamba2" else options
    return cs.model(name, d_model=16, n_layers=2, vocab_size=64, max_length=32, **options).eval()


def defined(**fields):
    return Definition.parse({"target": "bound-value", "roles": ["query"], "model": "embedding", **fields})


@pytest.fixture(scope="module")
def batch():
    return cs.task("mqar", length=32, pairs=3, vocab_size=64).batch(0, size=12)


def cached(model, batch, hook):
    with torch.no_grad():
        return model.run_with_cache(batch.tokens, names_filter=hook)[1][hook].numpy()


@pytest.mark.parametrize("name", ["attention", "mamba", "mamba2", "deltanet", "gated_deltanet"])
def test_activations_are_those_of_the_hooks_at_the_positions(batch, name):
    model = build(name)
    examples = examples_of(defined(target="own-token", roles=["key", "query"]), batch)
    hooks = ["hook_embed", "blocks.0.hook_resid_mid", "blocks.1.hook_resid_post", "blocks.1.mixer.hook_z"]
    hooks += ["blocks.0.mixer.hook_state"] if name != "attention" else []
    found = collect(model, batch.tokens, hooks, examples)
    assert set(found) == {(name, role) for name in hooks for role in ("key", "query")}
    for (at, role), X in found.items():
        e = examples[role]
        expected = cached(model, batch, at)[e.sequence, e.pos].reshape(len(e), -1)
        assert X.dtype == np.float32
        np.testing.assert_allclose(X, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_slices_of_sequences_change_nothing(batch, monkeypatch):
    model, examples = build("mamba"), examples_of(defined(), batch)
    hooks = ["blocks.0.mixer.hook_state", "blocks.1.hook_resid_post"]
    whole = collect(model, batch.tokens, hooks, examples)
    monkeypatch.setattr("circuitscope.analysis.reading.hooked.SLICE_BYTES", 1.0)  # one sequence at a time
    for key, X in collect(model, batch.tokens, hooks, examples).items():
        np.testing.assert_allclose(X, whole[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mamba", "s6", "mamba2", "deltanet", "gated_deltanet"])
def test_a_state_read_at_its_own_position_gives_what_the_mixer_reads(batch, name):
    """z = C · h + D v (q · S / √d_key for the delta rules): read_out at the query itself is z without the skip."""
    model = build(name)
    e = examples_of(defined(), batch)["query"]
    read = collect(model, batch.tokens, ["blocks.0.mixer.hook_state"], {"query": e}, read_out=True)
    (X,) = read.values()
    z, v = (cached(model, batch, f"blocks.0.mixer.{hook}")[e.sequence, e.pos] for hook in ("hook_z", "hook_v"))
    mixer = model.layers[0].mixer
    if "delta" in name:
        expected = z * mixer.d_key**0.5
    else:
        D = (mixer.ssm.D if hasattr(mixer, "ssm") else mixer.D).detach().numpy()
        expected = z - D[:, None] * v
    np.testing.assert_allclose(X, expected.reshape(len(e), -1), rtol=1e-3, atol=1e-5 * np.abs(z).max())


def test_heads_in_groups_are_read_by_their_own_c(batch):
    model = build("mamba2", headdim=8, n_groups=2)
    e = examples_of(defined(), batch)["query"]
    (X,) = collect(model, batch.tokens, ["blocks.0.mixer.hook_state"], {"query": e}, read_out=True).values()
    z, v = (cached(model, batch, f"blocks.0.mixer.{hook}")[e.sequence, e.pos] for hook in ("hook_z", "hook_v"))
    expected = z - model.layers[0].mixer.D.detach().numpy()[:, None] * v
    np.testing.assert_allclose(X, expected.reshape(len(e), -1), rtol=1e-3, atol=1e-5 * np.abs(z).max())


def test_a_state_before_the_query_is_read_by_the_vector_of_the_query(batch):
    model = build("mamba")
    e = examples_of(defined(at="before"), batch)["query"]
    (X,) = collect(model, batch.tokens, ["blocks.0.mixer.hook_state"], {"query": e}, read_out=True).values()
    h, C = (cached(model, batch, f"blocks.0.mixer.{hook}") for hook in ("hook_state", "hook_C"))
    expected = np.einsum("ecn,en->ec", h[e.sequence, e.anchor - 1], C[e.sequence, e.anchor])
    np.testing.assert_allclose(X, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["s4", "h3", "rwkv"])
def test_a_state_that_no_vector_of_the_token_reads_has_no_read_out(batch, name):
    with pytest.raises(UserError, match=rf"layer 0 is {name}, where no such vector reads it"):
        collect(build(name), batch.tokens, ["blocks.0.mixer.hook_state"], examples_of(defined(), batch), read_out=True)


@pytest.mark.parametrize("name", ["attention", "lstm", "hyena"])
def test_a_layer_without_a_state_has_no_read_out(batch, name):
    model = build(name)
    with pytest.raises(UserError, match=rf"layer 1 is {name}, which has none that can be read"):
        collect(model, batch.tokens, ["blocks.1.hook_resid_post"], examples_of(defined(), batch), read_out=True)
    with pytest.raises(UserError, match=f"no layer of this model has one: they are {name}$"):
        check_has_state(model, batch.tokens)


def test_a_hook_that_carries_no_state_has_no_read_out(batch):
    model, examples = build("mamba"), examples_of(defined(), batch)
    with pytest.raises(UserError, match=r"is mamba, whose state is at blocks\.0\.mixer\.hook_state; got"):
        collect(model, batch.tokens, ["blocks.0.hook_resid_post"], examples, read_out=True)
    with pytest.raises(UserError, match="hook_embed belongs to none"):
        collect(model, batch.tokens, ["hook_embed"], examples, read_out=True)


def test_a_hybrid_has_states_where_its_layers_have_them(batch):
    model = build("mamba_one_hybrid")
    check_has_state(model, batch.tokens)
    assert state_at(model, batch.tokens, "blocks.0.mixer.hook_z") is None
    assert state_at(model, batch.tokens, "blocks.1.mixer.hook_z") is None
    assert state_at(model, batch.tokens, "blocks.1.mixer.hook_state").by == "hook_C"


def test_more_than_the_memory_is_refused_before_anything_is_kept(batch):
    examples = examples_of(defined(), batch)
    hooks = ["blocks.0.mixer.hook_state"]
    need = 4 * 36 * 32 * 16  # 36 queries of 32 channels with 16 states
    collect(build("mamba"), batch.tokens, hooks, examples, memory=need)
    with pytest.raises(UserError, match=r"would take 0\.0 GB.*use fewer sequences, hooks or roles"):
        collect(build("mamba"), batch.tokens, hooks, examples, memory=need - 1)


def test_patterns_name_hooks_in_the_order_of_the_model():
    model = build("mamba")
    assert matching_hooks(model, ["blocks.*.hook_resid_post"]) == [f"blocks.{i}.hook_resid_post" for i in (0, 1)]
    assert matching_hooks(model, ["blocks.1.*resid_pre", "hook_embed"]) == ["hook_embed", "blocks.1.hook_resid_pre"]
    wild = matching_hooks(model, ["blocks.*.mixer.*"])
    assert "blocks.0.mixer.hook_z" in wild
    assert not any("state" in name or "phi" in name for name in wild)
    assert matching_hooks(model, ["blocks.*.mixer.hook_state"]) == [f"blocks.{i}.mixer.hook_state" for i in (0, 1)]
    assert matching_hooks(build("attention"), ["blocks.0.attn.hook_q"]) == ["blocks.0.mixer.hook_q"]


def test_hooks_that_do_not_exist_or_carry_no_positions_are_refused():
    model = build("attention")
    with pytest.raises(UserError, match=r"unknown hook 'blocks.*hook_resid_pots'; did you mean 'blocks.0.hook_resid_p"):
        matching_hooks(model, ["blocks.0.hook_resid_pots"])
    with pytest.raises(UserError, match=r"unknown hook 'blocks\.7\.\*'.*valid: .*hook_embed"):
        matching_hooks(model, ["blocks.7.*"])
    with pytest.raises(UserError, match="carries a matrix"):
        matching_hooks(model, ["blocks.0.mixer.hook_pattern"])


def test_collecting_leaves_the_model_as_it_was(batch):
    model = build("attention")
    model.train()
    collect(model, batch.tokens, ["hook_embed"], examples_of(defined(), batch))
    assert model.training
    assert not any(point._forward_hooks for point in model.hook_dict.values())


# -- a mixer of somebody else -------------------------------------------------------------------------


class MemoryConfig(MixerConfig):
    name: Literal["memory"] = "memory"


class Memory(nn.Module):
    """M_t = M_{t−1} + k_t v_tᵀ in two heads, read by one r_t for both; the hooks have names of their own."""

    n_heads, d_head, state_size = 2, 4, 2 * 3 * 4

    def __init__(self, config, d_model, positions):
        super().__init__()
        self.into, self.out = nn.Linear(d_model, 3 + 2 * 3 + 2 * 4), nn.Linear(2 * 4, d_model)
        self.hook_memory, self.hook_r = hook("batch pos head state d_head"), hook("batch pos state")
        self.hook_mixing = hook("batch head dest src")

    def forward(self, x):
        r, k, v = self.into(x).split([3, 2 * 3, 2 * 4], dim=-1)
        k, v = k.unflatten(-1, (2, 3)), v.unflatten(-1, (2, 4))
        memory = self.hook_memory(torch.einsum("blhn,blhd->blhnd", k, v).cumsum(dim=1))
        return self.out(torch.einsum("blhnd,bln->blhd", memory, self.hook_r(r)).flatten(2))

    def reading(self, x):
        return Reading(x.shape, no_phi="not shown", state=State(by="hook_r", hook="hook_memory"))

    def mixing_flops(self, length):
        return 0


@pytest.fixture
def memory(monkeypatch):
    for what in ("_things", "_from"):
        monkeypatch.setattr(MIXERS, what, dict(getattr(MIXERS, what)))
    register(MemoryConfig)(Memory)
    return cs.model(mixers=["memory"], d_model=16, n_layers=2, vocab_size=64, max_length=32).eval()


def test_the_state_of_a_mixer_from_outside_is_read_as_it_says(memory, batch):
    e = examples_of(defined(at="before"), batch)["query"]
    name = "blocks.1.mixer.hook_memory"
    (X,) = collect(memory, batch.tokens, [name], {"query": e}, read_out=True).values()
    M, r = cached(memory, batch, name)[e.sequence, e.pos], cached(memory, batch, "blocks.1.mixer.hook_r")
    expected = np.einsum("ehnd,en->ehd", M, r[e.sequence, e.anchor]).reshape(len(e), 8)
    np.testing.assert_allclose(X, expected, rtol=1e-4, atol=1e-6)


def test_a_mixer_from_outside_is_probed_with_its_state_removed(memory):
    batch = cs.task("mqar", length=32, pairs=3, vocab_size=64).batch(0, size=60)
    found = probe_model(memory, batch, "bound-value-in-state", hooks="blocks.*.mixer.hook_memory", causal=True)
    assert list(found.layer) == [0, 1]
    assert found.accuracy.between(0, 1).all()
    assert found.lost.notna().all()


def test_a_matrix_is_known_by_the_axes_of_its_hook(memory):
    assert matching_hooks(memory, ["blocks.0.mixer.*"]) == ["blocks.0.mixer.hook_memory", "blocks.0.mixer.hook_r"]
    with pytest.raises(UserError, match=r"blocks\.\*\.mixer\.hook_mixing carries a matrix"):
        matching_hooks(memory, ["blocks.*.mixer.hook_mixing"])
