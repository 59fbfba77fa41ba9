"""What a probe reads is what the hooks carry there; what is projected out of the model is gone."""

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.causal.interventions import accuracy
from circuitscope.analysis.probes import Definition, collect, examples_of, remove
from circuitscope.analysis.probes.activations import embedding_of, matching_hooks, read
from circuitscope.analysis.probes.removal import _projecting, accuracy_without, mean_at, random_directions
from circuitscope.errors import UserError


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
    assert set(found) == {(hook, role) for hook in hooks for role in ("key", "query")}
    for (hook, role), X in found.items():
        e = examples[role]
        expected = cached(model, batch, hook)[e.sequence, e.pos].reshape(len(e), -1)
        assert X.dtype == np.float32
        np.testing.assert_allclose(X, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_slices_of_sequences_change_nothing(batch, monkeypatch):
    model, examples = build("mamba"), examples_of(defined(), batch)
    hooks = ["blocks.0.mixer.hook_state", "blocks.1.hook_resid_post"]
    whole = collect(model, batch.tokens, hooks, examples)
    monkeypatch.setattr("circuitscope.analysis.sites.SLICE_BYTES", 1.0)  # one sequence at a time
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


def test_only_a_state_that_is_read_by_the_token_has_a_read_out(batch):
    examples = examples_of(defined(), batch)
    with pytest.raises(UserError, match="read_out is for hook_state"):
        collect(build("mamba"), batch.tokens, ["blocks.0.hook_resid_post"], examples, read_out=True)
    with pytest.raises(UserError, match=r"mamba, s6, mamba2, deltanet, gated_deltanet; got s4"):
        collect(build("s4"), batch.tokens, ["blocks.0.mixer.hook_state"], examples, read_out=True)


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
    np.testing.assert_array_equal(embedding_of(model), model.embed.weight.detach().numpy())


# -- removal ------------------------------------------------------------------------------------------


def queries(batch):
    where = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    where[torch.arange(len(batch))[:, None], batch.layout.query_pos] = True
    return where


def kept_after(model, batch, hook, where, monkeypatch, **options):
    """What a later reader sees at the hook, and what was there."""
    import circuitscope.analysis.probes.removal as module

    seen = {}
    plain = cached(model, batch, hook)

    def watching(model, part, hooks):
        ((_, edit),) = hooks
        rows = len(seen.setdefault("rows", []))
        edited = edit(torch.tensor(plain[rows : rows + len(part)]), None)
        seen["rows"] += list(edited.numpy())
        return torch.zeros(len(part))

    monkeypatch.setattr(module, "accuracy", watching)
    accuracy_without(model, batch, hook, where, **options)
    return plain, np.stack(seen["rows"])


@pytest.mark.parametrize("hook", ["blocks.0.hook_resid_post", "blocks.0.mixer.hook_z"])
def test_the_directions_are_at_their_mean_and_the_rest_is_untouched(batch, hook, monkeypatch):
    model, where = build("mamba2"), queries(batch)
    width = cached(model, batch, hook)[0, 0].size
    U = random_directions(3, width, seed=1)
    mean = mean_at(model, batch, hook, where)
    before, after = kept_after(model, batch, hook, where, monkeypatch, directions=U, mean=mean)
    before, after = (x.reshape(*where.shape, width) for x in (before, after))
    np.testing.assert_array_equal(after[~where], before[~where])
    at = after[where] - mean.numpy().ravel()
    np.testing.assert_allclose(at @ U.T, 0, atol=1e-4 * np.abs(before).max())
    rest = np.eye(width) - U.T @ U
    np.testing.assert_allclose(
        at @ rest, (before[where] - mean.numpy().ravel()) @ rest, atol=1e-4 * np.abs(before).max()
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("mamba", {}), ("mamba2", {}), ("mamba2", {"headdim": 8, "n_groups": 2}), ("deltanet", {"n_heads": 2})],
)
def test_of_a_state_the_first_position_alone_is_edited_and_no_vector_reads_it_there(batch, name, options, monkeypatch):
    model, where, hook = build(name, **options), queries(batch), "blocks.0.mixer.hook_state"
    e = examples_of(defined(), batch)["query"]
    width = collect(model, batch.tokens, [hook], {"query": e}, read_out=True)[hook, "query"].shape[1]
    U = random_directions(2, width, seed=2)
    plain, edited = kept_after(model, batch, hook, where, monkeypatch, directions=U, mean=0.0, read_out=True)
    first = where & (where.cumsum(dim=1) == 1)
    np.testing.assert_array_equal(edited[~first], plain[~first])
    by = cached(model, batch, "blocks.0.mixer." + ("hook_q" if name == "deltanet" else "hook_C"))[where][:12]
    any_vector = torch.tensor(np.random.default_rng(3).normal(size=by.shape), dtype=torch.float32)
    for state, gone in ((plain, False), (edited, True)):
        found = read(torch.tensor(state[first]), any_vector).flatten(1).numpy() @ U.T
        assert (np.abs(found).max() < 1e-5 * np.abs(plain[first]).max() * width) == gone


def test_an_edited_state_is_what_later_positions_see(batch):
    """All directions of the state, at the first query: what was bound before it is read by no later query."""
    model, hook = build("deltanet"), "blocks.0.mixer.hook_state"
    width = model.layers[0].mixer.d_head
    seen = {}

    def watch(name):
        return ("blocks.0.mixer.hook_z", lambda z, hook: seen.__setitem__(name, z.clone()))

    where = queries(batch)
    first = where & (where.cumsum(dim=1) == 1)
    edit = _projecting(first, torch.eye(width), torch.tensor(0.0), 1)
    with torch.no_grad():
        model.run_with_hooks(batch.tokens, fwd_hooks=[watch("plain")])
        model.run_with_hooks(batch.tokens, fwd_hooks=[(hook, edit), watch("edited")])
    at = first.int().argmax(dim=1)
    for row, pos in enumerate(at.tolist()):
        torch.testing.assert_close(seen["edited"][row, :pos], seen["plain"][row, :pos])
        assert seen["edited"][row, pos].abs().max() < 1e-6
        assert not torch.allclose(seen["edited"][row, pos + 1], seen["plain"][row, pos + 1], rtol=1e-3)


def test_removing_everything_removes_what_the_model_knows(batch):
    """A mean in place of the stream before the unembedding: every answer is the same token."""
    model, where, hook = build("attention"), queries(batch), "ln_final.hook_normalized"
    with torch.no_grad():
        model.embed.weight.mul_(50)  # a stream with room for the token itself
    own = cs.Batch(batch.tokens, torch.where(where, batch.tokens, -100), batch.layout)
    effect = remove(model, own, hook, where, np.eye(16))
    assert effect.before > 0.9
    assert effect.after < 0.2
    assert effect.lost == pytest.approx(effect.before - effect.after)
    assert effect.n == 12
    nothing = remove(model, own, hook, ~where, np.eye(16))
    assert nothing.lost == 0  # other positions are not asked


def test_no_directions_is_the_accuracy_of_the_model(batch):
    model = build("mamba")
    found = accuracy_without(model, batch, "blocks.0.mixer.hook_state", queries(batch), None)
    torch.testing.assert_close(found, accuracy(model, batch))


@pytest.mark.parametrize(
    ("directions", "where", "message"),
    [
        (np.ones((2, 16)), None, "orthonormal"),
        (np.eye(16)[:2], torch.zeros(12, 32, dtype=torch.bool), "at least one true"),
        (np.eye(16)[:2], torch.ones(3, 32, dtype=torch.bool), r"a mask \(12, 32\)"),
    ],
)
def test_a_removal_that_makes_no_sense_is_refused(batch, directions, where, message):
    with pytest.raises(UserError, match=message):
        remove(build("attention"), batch, "hook_embed", queries(batch) if where is None else where, directions, mean=0)
