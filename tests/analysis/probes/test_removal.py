"""What is projected out of the model is gone, at the chosen positions alone; of a state for all later readers."""

import numpy as np
import pytest
import torch
from torch import nn

import circuitscope as cs
from circuitscope.analysis.causal.interventions import accuracy
from circuitscope.analysis.probes import Definition, collect, examples_of, remove
from circuitscope.analysis.probes.removal import _projecting, accuracy_without, mean_at, random_directions
from circuitscope.analysis.probes.states import readable_state
from circuitscope.errors import UserError
from circuitscope.lens import HookedRootModule, HookPoint
from circuitscope.mixers.reading import State


def build(name, **options):
    options = {"headdim": 16, **options} if name == "mamba2" else options
    return cs.model(name, d_model=16, n_layers=2, vocab_size=64, max_length=32, **options).eval()


@pytest.fixture(scope="module")
def batch():
    return cs.task("mqar", length=32, pairs=3, vocab_size=64).batch(0, size=12)


def cached(model, batch, hook):
    with torch.no_grad():
        return model.run_with_cache(batch.tokens, names_filter=hook)[1][hook].numpy()


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
    definition = Definition.parse({"target": "bound-value", "roles": ["query"], "model": "embedding"})
    e = examples_of(definition, batch)["query"]
    width = collect(model, batch.tokens, [hook], {"query": e}, read_out=True)[hook, "query"].shape[1]
    U = random_directions(2, width, seed=2)
    plain, edited = kept_after(model, batch, hook, where, monkeypatch, directions=U, mean=0.0, read_out=True)
    first = where & (where.cumsum(dim=1) == 1)
    np.testing.assert_array_equal(edited[~first], plain[~first])
    by = cached(model, batch, "blocks.0.mixer." + ("hook_q" if name == "deltanet" else "hook_C"))[where][:12]
    any_vector = torch.tensor(np.random.default_rng(3).normal(size=by.shape), dtype=torch.float32)
    read = readable_state(model, batch.tokens, hook).state.read
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
    edit = _projecting(first, torch.eye(width), torch.tensor(0.0), State(by="hook_q"))
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


class Lookup(HookedRootModule):
    """Somebody else's model: it answers every token with itself, and shows neither a pattern nor a state."""

    def __init__(self):
        super().__init__()
        self.W_E = nn.Parameter(torch.eye(64))
        block = nn.Module()
        block.hook_resid_post = HookPoint()
        self.blocks = nn.ModuleList([block])
        self.setup()

    def forward(self, tokens):
        return self.blocks[0].hook_resid_post(self.W_E[tokens]) @ self.W_E.T


def test_a_model_without_patterns_or_states_loses_what_is_removed(batch):
    where = queries(batch)
    own = cs.Batch(batch.tokens, torch.where(where, batch.tokens, -100), batch.layout)
    effect = remove(Lookup(), own, "blocks.0.hook_resid_post", where, np.eye(64), mean=0)
    assert (effect.before, effect.after) == (1, 0)
    with pytest.raises(UserError, match="layer 0 is attention, which has none that can be read"):
        remove(Lookup(), own, "blocks.0.hook_resid_post", where, np.eye(64), mean=0, read_out=True)


def test_no_directions_is_the_accuracy_of_the_model(batch):
    model = build("mamba")
    found = accuracy_without(model, batch, "blocks.0.mixer.hook_state", queries(batch), None)
    torch.testing.assert_close(found, accuracy(model, batch))


def test_every_part_of_the_batch_has_its_own_part_of_the_layout(batch, monkeypatch):
    import circuitscope.analysis.probes.removal as module

    seen = []
    monkeypatch.setattr("circuitscope.analysis.reading.hooked.SLICE_BYTES", 2e4)  # a few sequences at a time
    monkeypatch.setattr(module, "accuracy", lambda model, part, hooks: seen.append(part) or torch.zeros(len(part)))
    accuracy_without(build("attention"), batch, "hook_embed", queries(batch), None)
    assert len(seen) > 1
    assert sum(map(len, seen)) == len(batch)
    for part in seen:
        answers = part.tokens.gather(1, part.layout.answer_pos())
        torch.testing.assert_close(answers, part.labels.gather(1, part.layout.query_pos))
        assert part.layout.roles.shape == part.tokens.shape


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
