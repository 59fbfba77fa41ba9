"""Knockouts and ablations: they find planted circuits, agree with plain hooks, and leave nothing behind."""

from dataclasses import astuple, replace

import pytest
import torch
from transformer_lens import HookedRootModule
from transformer_lens.model_bridge import TransformerBridge

import circuitscope as cs
from circuitscope.analysis import Edges, binding_score, named_edges, recall_score
from circuitscope.analysis.causal.interventions import Effect, _derangement, ablate, accuracy, cut, knock_out
from circuitscope.analysis.reading import hooked
from circuitscope.tasks import NO_LABEL, Batch
from foreign import Foreign
from planted import planted_conv_mamba, planted_induction, planted_task

pytestmark = pytest.mark.slow

BATCH = planted_task().batch(0, split="test", size=64)
SMALL = planted_task(vocab_size=32, length=20, pairs=3).batch(0, split="test", size=12)
HOWS = ("zero", "mean", "resample")
CLOSE = {"abs": 1e-6}  # of accuracies, which are shares of a few queries


@pytest.fixture(scope="module")
def induction() -> cs.HookedLM:
    return planted_induction()


@pytest.fixture(scope="module")
def mamba() -> cs.HookedLM:
    return planted_conv_mamba()


def build(name: str = "attention", **options) -> cs.HookedLM:
    """A small random model whose answers vary."""
    fits = {"mamba2": {"headdim": 8}}.get(name, {})
    model = cs.model(name, **{"d_model": 16, "n_layers": 2, "vocab_size": 32, "max_length": 20} | fits | options)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g))
    return model.eval()


def answered(model: cs.HookedLM, batch: Batch, hooks=()) -> Batch:
    """The batch with, as labels, what the model answers there: every accuracy is then 1 before an edit."""
    with torch.no_grad():
        best = model.run_with_hooks(batch.tokens, fwd_hooks=list(hooks)).argmax(-1)
    return replace(batch, labels=torch.where(batch.labels == NO_LABEL, NO_LABEL, best))


def every_edge(batch: Batch) -> Edges:
    n, length = batch.tokens.shape
    return Edges.of("every", torch.ones(length, length, dtype=torch.bool).tril().expand(n, -1, -1))


def direct(model, batch: Batch, hooks=()) -> torch.Tensor:
    """Accuracy by sequence the slow way, query by query."""
    with torch.no_grad():
        logits = model.run_with_hooks(batch.tokens, fwd_hooks=list(hooks))
    shares = []
    for row, labels in zip(logits, batch.labels, strict=True):
        right = [int(row[i].argmax()) == int(y) for i, y in enumerate(labels) if y != NO_LABEL]
        shares.append(sum(right) / len(right))
    return torch.tensor(shares)


# -- planted circuits ---------------------------------------------------------------------------------


def test_the_planted_transformer_recalls_by_a_binding_head_and_a_recall_head(induction):
    assert accuracy(induction, BATCH).mean() > 0.99
    patterns = [cs.phi(induction, BATCH.tokens, layer) for layer in (0, 1)]
    binding, recall = binding_score(patterns[0], BATCH.layout), recall_score(patterns[1], BATCH.layout)
    assert binding.mean(0)[0] > 0.95
    assert recall.mean(0)[0] > 0.95
    assert binding.mean(0)[1] < 0.5
    assert recall.mean(0)[1] < 0.5


@pytest.mark.parametrize(
    ("edges", "layer", "heads"), [("binding", 0, None), ("binding", 0, [0]), ("recall", 1, None), ("recall", 1, [0])]
)
def test_cutting_an_edge_of_the_circuit_costs_the_answers(induction, edges, layer, heads):
    effect = knock_out(induction, BATCH, edges, layer=layer, heads=heads)
    assert effect.before > 0.99
    assert effect.lost > 0.9
    assert effect.stderr < 0.02


@pytest.mark.parametrize(
    ("edges", "layer", "heads"),
    [
        ("query<-filler", 0, None),
        ("query<-filler", 1, None),
        ("query<-filler", (0, 1), None),
        ("recall", 0, None),  # the right edges in the wrong layer
        ("binding", 1, None),
        ("binding", 0, [1]),  # … or in the idle head
        ("recall", 1, [1]),
    ],
)
def test_cutting_edges_outside_the_circuit_costs_nothing(induction, edges, layer, heads):
    assert abs(knock_out(induction, BATCH, edges, layer=layer, heads=heads).lost) < 0.05


def test_a_head_that_only_looks_like_recall_scores_like_it_and_is_not_used():
    model = planted_induction(mimic=True)
    assert recall_score(cs.phi(model, BATCH.tokens, 1), BATCH.layout).mean(0)[1] > 0.95
    assert abs(knock_out(model, BATCH, "recall", layer=1, heads=[1]).lost) < 0.05
    assert abs(ablate(model, BATCH, layer=1, heads=[1]).lost) < 0.05
    assert knock_out(model, BATCH, "recall", layer=1, heads=[0]).lost > 0.9


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("frozen", [True, False])
def test_ablating_the_recall_head_costs_the_answers_and_ablating_an_idle_head_nothing(induction, how, frozen):
    assert ablate(induction, BATCH, layer=1, heads=[0], how=how, frozen=frozen).lost > 0.8
    for layer in (0, 1):
        assert abs(ablate(induction, BATCH, layer=layer, heads=[1], how=how, frozen=frozen).lost) < 0.05


@pytest.mark.parametrize("how", HOWS)
def test_the_binding_head_works_through_the_later_pattern_alone(induction, how):
    """Its output is read by keys, never as values: with the pattern held it is not missed."""
    assert abs(ablate(induction, BATCH, layer=0, heads=[0], how=how, frozen=True).lost) < 0.05
    assert ablate(induction, BATCH, layer=0, heads=[0], how=how, frozen=False).lost > 0.5


def test_shuffled_labels_leave_nothing_to_lose(induction):
    labels = BATCH.labels.clone()
    given = labels[labels != NO_LABEL]
    labels[labels != NO_LABEL] = given[torch.randperm(len(given), generator=torch.Generator().manual_seed(0))]
    for edges, layer in (("recall", 1), ("binding", 0)):
        effect = knock_out(induction, replace(BATCH, labels=labels), edges, layer=layer)
        assert effect.before < 0.1
        assert abs(effect.lost) < 0.05


def test_the_planted_mamba_recalls_and_its_conv_carries_the_binding(mamba):
    assert accuracy(mamba, BATCH).mean() > 0.99
    own, before = slice(0, 64), slice(64, 128)  # channels of the own and of the previous token
    score = {
        factor: binding_score(cs.phi(mamba, BATCH.tokens, 0, factors=factor), BATCH.layout, "abs").mean(0)
        for factor in ("conv", "ssm")
    }
    assert score["conv"][before].min() > 0.95
    assert score["conv"][own].max() < 0.05
    assert score["ssm"].max() < 0.05
    assert recall_score(cs.phi(mamba, BATCH.tokens, 0), BATCH.layout, "abs").mean(0).min() > 0.95


@pytest.mark.parametrize(
    ("edges", "factor", "heads", "costs"),
    [
        ("binding", "conv", None, True),
        ("binding", "conv", range(64, 128), True),
        ("binding", "conv", range(64), False),
        ("binding", "phi", None, False),
        ("recall", "phi", None, True),
        ("recall", "phi", range(64), True),
        ("recall", "phi", range(64, 128), False),
        ("recall", "conv", None, False),
        ("query<-filler", "phi", None, False),
        ("query<-filler", "conv", None, False),
    ],
)
def test_knockouts_tell_the_conv_of_a_mamba_from_its_scan(mamba, edges, factor, heads, costs):
    effect = knock_out(mamba, BATCH, edges, layer=0, factor=factor, heads=heads)
    assert effect.lost > 0.9 if costs else abs(effect.lost) < 0.05


# -- the same as plain hooks --------------------------------------------------------------------------

PHI = ("attention", "based", "h3", "hyena", "rwkv", "mamba", "mamba2", "deltanet", "gated_deltanet", "s4", "s6")
CONV = ("hyena", "rwkv", "mamba", "mamba2", "deltanet", "attention_conv_v")


def last_hidden(model: cs.HookedLM, act) -> torch.Tensor:
    """What the unembedding read in the last run that `act` made."""
    seen = []
    handle = model.ln_final.hook_normalized.register_forward_hook(lambda m, a, out: seen.append(out))
    try:
        act()
    finally:
        handle.remove()
    return seen[-1]


@pytest.mark.parametrize("name", PHI)
def test_cutting_every_edge_of_phi_is_zeroing_z(name):
    model = build(name)
    edges, hook = every_edge(SMALL), "blocks.1.mixer.hook_z"
    got = last_hidden(model, lambda: knock_out(model, SMALL, edges, layer=1))
    zero = [(hook, lambda z, hook: torch.zeros_like(z))]
    expected = last_hidden(model, lambda: model.run_with_hooks(SMALL.tokens, fwd_hooks=zero))
    plain = last_hidden(model, lambda: model(SMALL.tokens))
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (plain - expected).abs().max() > 1e-2  # so that there was something to cut
    got = last_hidden(model, lambda: ablate(model, SMALL, layer=1))
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", CONV)
def test_cutting_every_edge_of_the_conv_leaves_its_bias(name):
    model = build(name)
    seen = []
    handle = model.layers[1].mixer.hook_conv.register_forward_hook(lambda m, a, out: seen.append(out))
    knock_out(model, SMALL, every_edge(SMALL), layer=1, factor="shift" if name == "rwkv" else "conv")
    handle.remove()
    assert torch.equal(seen[-1], seen[-1][:1, :1].expand_as(seen[-1]))  # the same everywhere
    assert not torch.equal(seen[-2], seen[-2][:1, :1].expand_as(seen[-2]))


@pytest.mark.parametrize("name", ["attention", "mamba", "mamba2", "deltanet"])
def test_a_knockout_is_what_a_hook_by_hand_does(name):
    model = build(name, **{"n_heads": 2} if name in ("attention", "deltanet") else {})
    batch = answered(model, SMALL)

    def by_hand(phi, hook):
        phi = phi.clone()
        for b in range(len(batch)):
            for query in batch.layout.query_pos[b]:
                for value in batch.layout.value_pos[b]:
                    phi[b, 1:, query, value] = 0
        return phi

    after = direct(model, batch, [("blocks.1.mixer.hook_phi", by_hand)])
    effect = knock_out(model, batch, "value", layer=1, heads=range(1, model.layers[1].mixer.n_heads))
    assert (effect.before, effect.after) == (pytest.approx(1, **CLOSE), pytest.approx(float(after.mean()), **CLOSE))
    assert effect.lost > 0.05


def test_renormalizing_is_never_having_seen_those_positions():
    model = build(n_heads=2)
    edges = named_edges("query<-filler", SMALL.layout)
    hidden = edges.mask()[:, None]
    mask = [("blocks.0.mixer.hook_attn_scores", lambda s, hook: s.masked_fill(hidden, -torch.inf))]
    expected = last_hidden(model, lambda: model.run_with_hooks(SMALL.tokens, fwd_hooks=mask))
    got = last_hidden(model, lambda: knock_out(model, SMALL, edges, layer=0, renormalize=True))
    plain = last_hidden(model, lambda: knock_out(model, SMALL, edges, layer=0))
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (plain - expected).abs().max() > 1e-3


def test_cutting_a_bare_tensor_changes_these_edges_of_these_heads_and_nothing_else():
    g = torch.Generator().manual_seed(0)
    matrix = torch.rand(len(SMALL), 3, 20, 20, generator=g).tril()
    kept = matrix.clone()
    edges = named_edges("recall", SMALL.layout)
    out = cut(matrix, edges, heads=[0, 2])
    expected = torch.zeros_like(matrix, dtype=torch.bool)
    expected[:, [0, 2]] = edges.mask()[:, None]
    assert torch.equal(matrix, kept)
    assert torch.equal(out, matrix.masked_fill(expected, 0))
    scaled = cut(matrix, edges, renormalize=True)
    torch.testing.assert_close(scaled.sum(-1), matrix.sum(-1))
    emptied = cut(matrix, every_edge(SMALL), renormalize=True)
    assert torch.equal(emptied, torch.zeros_like(matrix))


@pytest.mark.parametrize("how", HOWS)
def test_an_ablation_is_what_a_hook_by_hand_does(how):
    model = build(n_heads=4)
    batch = answered(model, SMALL)
    _, cache = model.run_with_cache(batch.tokens)
    clean, later = cache["blocks.0.mixer.hook_z"], cache["blocks.1.mixer.hook_phi"]
    donors = _derangement(len(batch), seed=5)

    def by_hand(z, hook):
        z = z.clone()
        if how == "zero":
            z[:, :, [1, 3]] = 0
        elif how == "mean":
            z[:, :, [1, 3]] = clean[:, :, [1, 3]].mean(0)
        else:
            z[:, :, [1, 3]] = clean[donors][:, :, [1, 3]]
        return z

    z, frozen = ("blocks.0.mixer.hook_z", by_hand), ("blocks.1.mixer.hook_phi", lambda phi, hook: later)
    for hooks, hold in (([z], False), ([z, frozen], True)):
        after = direct(model, batch, hooks)
        effect = ablate(model, batch, layer=0, heads=[1, 3], how=how, frozen=hold, seed=5)
        assert effect.after == pytest.approx(float(after.mean()), **CLOSE)
        assert effect.lost > 0.05


def test_resampling_takes_every_other_sequence_once_and_never_its_own():
    for n in (2, 3, 17):
        for seed in range(20):
            other = _derangement(n, seed)
            assert other.sort().values.tolist() == list(range(n))
            assert (other != torch.arange(n)).all()
    assert not torch.equal(_derangement(17, 0), _derangement(17, 1))


# -- accuracy and the effect --------------------------------------------------------------------------


def test_accuracy_is_that_of_a_direct_computation():
    model = build()
    some = answered(model, SMALL)
    wrong = torch.rand(some.labels.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    labels = torch.where((some.labels != NO_LABEL) & wrong, (some.labels + 1) % 32, some.labels)
    labels[0, :9], labels[1, 3] = 5, 7  # more labels in some sequences than in others
    batch = replace(some, labels=labels)
    got = accuracy(model, batch)
    torch.testing.assert_close(got, direct(model, batch))
    assert len(got.unique()) > 2
    rolled = [("blocks.1.hook_resid_post", lambda x, hook: x.roll(1, dims=-1))]
    torch.testing.assert_close(accuracy(model, batch, rolled), direct(model, batch, rolled))
    assert not torch.equal(accuracy(model, batch, rolled), got)


def test_the_standard_error_is_paired_over_sequences():
    before, after = torch.tensor([1.0, 1.0, 0.5, 1.0]), torch.tensor([0.5, 0.0, 0.5, 1.0])
    effect = Effect.of(before, after)
    lost = [0.5, 1.0, 0.0, 0.0]
    mean = sum(lost) / 4
    spread = (sum((x - mean) ** 2 for x in lost) / 3) ** 0.5
    assert astuple(effect) == pytest.approx((0.875, 0.5, mean, spread / 2, 4))
    assert effect.share == pytest.approx(mean / 0.875)
    one = Effect.of(before[:1], after[:1])
    assert one.stderr != one.stderr  # nan
    assert Effect.of(after[1:2], after[1:2]).share != 0


# -- slices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "mamba", "mamba2", "mambaformer"])
def test_slices_change_nothing_and_bound_what_is_built_at_once(name, monkeypatch):
    model = build(name, n_layers=1 if name == "mambaformer" else 2, **{"n_heads": 2} if "mamba" not in name else {})
    batch = answered(model, SMALL)
    calls = [
        lambda: knock_out(model, batch, "value", layer=0),
        lambda: knock_out(model, batch, "value<-key", layer=(0, 1), heads=[0, 1]),
        *[
            lambda how=how, frozen=frozen: ablate(model, batch, layer=0, heads=[0], how=how, frozen=frozen)
            for how in HOWS
            for frozen in (True, False)
        ],
    ]
    whole = [call() for call in calls]
    rows = []
    handle = model.layers[0].mixer.hook_z.register_forward_hook(lambda m, a, out: rows.append(len(out)))
    monkeypatch.setattr(hooked, "SLICE_BYTES", 5 * 4 * model.layers[0].mixer.n_heads * 20**2)
    sliced = [call() for call in calls]
    handle.remove()
    for a, b in zip(whole, sliced, strict=True):
        assert astuple(b) == pytest.approx(astuple(a), nan_ok=True, **CLOSE)
        assert b.n == 12
    assert rows[:7] == [1, 5, 5, 5, 5, 2, 2]  # for the size, then 12 sequences by at most 5, before and after


def test_phi_of_a_slice_stays_within_the_bound():
    model = cs.model("mamba", n_layers=1, d_model=64, vocab_size=64)  # 128 channels: 2.1 MB of Φ a sequence
    batch = cs.task("mqar", vocab_size=64).batch(0, size=40)
    sizes = []
    handle = model.layers[0].mixer.hook_phi.register_forward_hook(
        lambda m, a, out: sizes.append(out.numel() * out.element_size())
    )
    knock_out(model, batch, "recall", layer=0)
    handle.remove()
    assert max(sizes) <= 64e6
    assert sum(sizes) > 2 * 40 * 2e6  # all sequences, before and after


# -- someone else's model -----------------------------------------------------------------------------


def test_a_foreign_model_with_the_same_weights_gives_the_same_effects(induction):
    foreign = Foreign(induction)
    batch = planted_task().batch(1, split="test", size=32)
    torch.testing.assert_close(foreign(batch.tokens), induction(batch.tokens), rtol=1e-4, atol=1e-4)
    assert torch.equal(accuracy(foreign, batch), accuracy(induction, batch))
    for act in (
        lambda model: knock_out(model, batch, "recall", layer=1, heads=[0]),
        lambda model: knock_out(model, batch, "query<-filler", layer=-1),
        lambda model: knock_out(model, batch, "query<-value", layer=1, renormalize=True),
        lambda model: ablate(model, batch, layer=0, heads=[0], frozen=True),
        lambda model: ablate(model, batch, layer=0, heads=[0], frozen=False, how="resample"),
        lambda model: ablate(model, batch, layer=1, heads=[0]),
    ):
        assert act(foreign) == act(induction)


def test_a_model_of_transformer_lens_itself_can_be_cut_and_ablated():
    bridge = TransformerBridge.boot_native(
        {"n_layers": 2, "d_model": 16, "n_ctx": 20, "d_head": 8, "n_heads": 2, "d_mlp": 32, "d_vocab": 32,
         "act_fn": "gelu", "normalization_type": "LN", "seed": 0, "init_weights": True, "initializer_range": 0.5}
    ).eval()  # fmt: skip
    with torch.no_grad():
        best = bridge(SMALL.tokens).argmax(-1)
    batch = replace(SMALL, labels=torch.where(SMALL.labels == NO_LABEL, NO_LABEL, best))
    nothing = Edges.of("nothing", torch.zeros(12, 20, 20, dtype=torch.bool))
    assert knock_out(bridge, batch, nothing, layer=0).lost == 0
    zero = [("blocks.1.attn.hook_z", lambda z, hook: torch.zeros_like(z))]
    expected = float(direct(bridge, batch, zero).mean())
    assert expected < 1
    assert knock_out(bridge, batch, every_edge(batch), layer=1).after == pytest.approx(expected, **CLOSE)
    assert ablate(bridge, batch, layer=1).after == pytest.approx(expected, **CLOSE)


# -- nothing stays behind -----------------------------------------------------------------------------


def traces(model) -> tuple:
    """Hooks, modes, gradients and weights of a model."""
    hooks = [(len(p._forward_hooks), len(p._backward_hooks), len(p.fwd_hooks)) for p in model.hook_points()]
    modes = [m.training for m in model.modules()]
    return hooks, modes, [p.grad for p in model.parameters()], [float(p.detach().sum()) for p in model.parameters()]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    "act",
    [
        lambda m: accuracy(m, SMALL),
        lambda m: knock_out(m, SMALL, "recall", layer=0),
        lambda m: ablate(m, SMALL, layer=0, how="mean"),
        lambda m: knock_out(m, SMALL, "recall", layer=0, heads=[9]),
        lambda m: ablate(m, SMALL, layer=0, heads=[9], how="resample"),
        lambda m: accuracy(m, SMALL, [("blocks.0.mixer.hook_z", lambda z, hook: z[:, :1])]),
        lambda m: accuracy(m, SMALL, [("blocks.0.mixer.hook_zz", lambda z, hook: z)]),
    ],
)
def test_the_model_is_left_as_it_was_even_by_an_error(act):
    model = build().train()
    model.layers[1].mixer.eval()
    mine = []
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: mine.append(len(x)))
    before = traces(model)
    try:
        act(model)
    except (cs.UserError, RuntimeError):
        pass
    assert traces(model) == before
    assert torch.is_grad_enabled()
    assert model(SMALL.tokens).requires_grad
    mine.clear()
    model(SMALL.tokens)
    assert mine == [12]  # a hook of the caller's own still fires


def test_dropout_of_a_foreign_model_is_off_while_it_is_measured(induction):
    foreign = Foreign(induction)
    foreign.blocks[0].ln1 = torch.nn.Sequential(foreign.blocks[0].ln1, torch.nn.Dropout(0.9))
    foreign.setup()
    foreign.train()
    batch = planted_task().batch(1, split="test", size=16)
    assert knock_out(foreign, batch, "query<-filler", layer=1) == Effect(1, 1, 0, 0, 16)
    assert all(m.training for m in foreign.modules())


# -- bad input ----------------------------------------------------------------------------------------

UNLABELLED = replace(SMALL, labels=torch.full_like(SMALL.labels, NO_LABEL))
PARTLY = replace(SMALL, labels=SMALL.labels.index_fill(0, torch.tensor([4]), NO_LABEL))
ONE = planted_task(vocab_size=32, length=20, pairs=3).batch(0, size=1)
OTHER = planted_task(vocab_size=32, length=18, pairs=3).batch(0, size=12)
PLAIN = cs.task("induction", block=4, repeats=4, vocab_size=32).batch(0, size=4)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("model", "act", "says"),
    [
        ("attention", lambda m: knock_out(m, SMALL, "recall", layer=2), "layer must be from 0 to 1, got 2"),
        ("attention", lambda m: knock_out(m, SMALL, "recall", layer=[0, -3]), "layer must be from 0 to 1, got -3"),
        ("attention", lambda m: ablate(m, SMALL, layer=0.5), "layer must be from 0 to 1, got 0.5"),
        ("attention", lambda m: knock_out(m, SMALL, "recall", layer=0, heads=[1]), "1 heads or channels, 0 to 0"),
        ("mamba", lambda m: ablate(m, SMALL, layer=0, heads=[32]), "32 heads or channels, 0 to 31; got 32"),
        ("mamba", lambda m: ablate(m, SMALL, layer=0, heads=[None]), "32 heads or channels, 0 to 31; got None"),
        ("mamba", lambda m: ablate(m, SMALL, layer=0, heads=[-1]), "0 to 31; got -1"),
        ("lstm", lambda m: knock_out(m, SMALL, "recall", layer=1), "layer 1 is lstm: .* no mixing matrix"),
        ("lstm", lambda m: knock_out(m, SMALL, "recall", layer=1, factor="conv"), "layer 1 is lstm"),
        ("lstm", lambda m: ablate(m, SMALL, layer=0), "layer 1 is lstm.*use frozen=False"),
        ("attention", lambda m: knock_out(m, SMALL, "recall", layer=0, factor="conv"), "unknown factor 'conv'"),
        ("s4", lambda m: knock_out(m, SMALL, "recall", layer=0, factor="conv"), "'conv'.* valid: composed, phi, ssm"),
        ("mamba", lambda m: knock_out(m, SMALL, "recall", layer=0, factor="silu"),
         "layer 0 is mamba, where silu cannot be edited by itself; expected phi or ssm, conv"),
        ("rwkv", lambda m: knock_out(m, SMALL, "recall", layer=0, factor="wkv"), "wkv cannot be edited by itself"),
        ("mamba", lambda m: knock_out(m, SMALL, "recall", layer=0, factor="cnov"), "did you mean 'conv'"),
        ("attention", lambda m: knock_out(m, SMALL, "recal", layer=0), "did you mean 'recall'"),
        ("attention", lambda m: knock_out(m, PLAIN, "recall", layer=0), "keys, values and queries"),
        ("attention", lambda m: ablate(m, SMALL, layer=0, how="meen"), "ablation 'meen'; did you mean 'mean'"),
        ("attention", lambda m: ablate(m, ONE, layer=0, how="resample"), "at least 2, got 1"),
        ("attention", lambda m: accuracy(m, UNLABELLED), "sequence 0 has none"),
        ("attention", lambda m: knock_out(m, PARTLY, "recall", layer=0), "sequence 4 has none"),
        ("attention", lambda m: ablate(m, PARTLY, layer=0), "sequence 4 has none"),
        ("attention", lambda m: knock_out(m, SMALL, every_edge(OTHER), layer=0), "of length 18, the batch has 12 of"),
        ("mamba", lambda m: knock_out(m, SMALL, "recall", layer=0, renormalize=True), "negative entries"),
        ("attention", lambda m: cut(torch.ones(2, 1, 20, 20), every_edge(SMALL)), "12 sequences of length 20"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(model, act, says):
    with pytest.raises(cs.UserError, match=says) as error:
        act(build(model))
    assert "\n" not in str(error.value)


def test_a_model_without_blocks_is_refused():
    bare = HookedRootModule()
    bare.setup()
    with pytest.raises(cs.UserError, match=r"no hooks named blocks\.0"):
        knock_out(bare, SMALL, "recall", layer=0)


def test_an_lstm_can_be_ablated_where_nothing_is_to_be_frozen():
    model = build("lstm")
    batch = answered(model, SMALL)
    assert ablate(model, batch, layer=1).lost > 0.05
    assert ablate(model, batch, layer=0, frozen=False).lost > 0.05


# -- arguments that people give ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    "act",
    [
        lambda model, tokens: knock_out(model, tokens, "recall", layer=0),
        lambda model, tokens: ablate(model, tokens, layer=0),
        accuracy,
        cs.analysis.find_circuit,
        cs.analysis.interchange,
        lambda model, tokens: cs.analysis.probes.probe_model(model, tokens, "bound-value"),
    ],
    ids=["knock_out", "ablate", "accuracy", "find_circuit", "interchange", "probe_model"],
)
def test_tokens_where_a_batch_is_meant_are_refused_in_one_line(act):
    message = r"^expected a Batch with inputs, labels and layout, .* got Tensor of shape \[12, 20\] and type int64$"
    with pytest.raises(cs.UserError, match=message):
        act(build(), SMALL.tokens)


def test_one_head_may_be_given_as_a_number():
    model = build(n_heads=2)
    assert knock_out(model, SMALL, "recall", layer=1, heads=1) == knock_out(model, SMALL, "recall", layer=1, heads=[1])
    assert ablate(model, SMALL, layer=0, heads=1) == ablate(model, SMALL, layer=0, heads=[1])
