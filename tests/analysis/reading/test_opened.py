"""Any model as layers with readings: matrices and logits are those of the model itself, whatever way they are taken."""

import pandas as pd
import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

import circuitscope as cs
from circuitscope.analysis import find_circuit, matrices, opened, pattern_reading, recall_score
from circuitscope.analysis.decay.rows import decay_rows
from circuitscope.analysis.reading import opened as module
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.analysis.scores.rows import score_rows
from circuitscope.mixers import reading as reading_module
from circuitscope.mixers.reading import Factor, Reading
from foreign import Foreign
from planted import planted_induction, planted_task

TOKENS = torch.randint(64, (6, 16), generator=torch.Generator().manual_seed(0))
AT = torch.tensor([3, 17, 95])
SCORES = ("binding", "recall", "previous_token", "induction", "model")


def attention(**options) -> cs.HookedLM:
    return cs.model("attention", n_layers=2, n_heads=2, d_model=16, vocab_size=64, max_length=16, **options).eval()


def foreign(model: cs.HookedLM | None = None) -> Foreign:
    return Foreign(model or attention(tied=False, state_mixer="none")).eval()


def bridge() -> TransformerBridge:
    return TransformerBridge.boot_native(
        {"n_layers": 2, "d_model": 16, "n_ctx": 16, "d_head": 8, "n_heads": 2, "d_mlp": 32, "d_vocab": 64,
         "act_fn": "gelu", "normalization_type": "LN", "seed": 0, "init_weights": True, "initializer_range": 0.5}
    ).eval()  # fmt: skip


def slice_bytes(monkeypatch, size: int) -> None:
    for where in (module, reading_module):
        monkeypatch.setattr(where, "SLICE_BYTES", size)


@pytest.mark.parametrize("positions", ["learned", "rope", "alibi"])
@pytest.mark.parametrize("heads_at_once", [1, 2])
@pytest.mark.parametrize("with_logits", [True, False])
def test_patterns_and_logits_are_the_models(monkeypatch, positions, heads_at_once, with_logits):
    slice_bytes(monkeypatch, heads_at_once * 4 * 6 * 16**2)
    model = attention(positions=positions)
    walk = opened(model).walk(TOKENS, at=AT if with_logits else None)
    logits, cache = model.run_with_cache(TOKENS)
    seen = []
    for layer, product, heads, matrix in walk.matrices():
        expected = cache[f"blocks.{layer}.mixer.hook_pattern"][:, heads]
        assert (product.name, product.unit, product.size, product.shares) == ("pattern", "head", 2, True)
        assert torch.allclose(matrix, expected, atol=1e-6)
        assert heads.stop - heads.start == heads_at_once
        seen += [(layer, head) for head in range(heads.start, heads.stop)]
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]
    if with_logits:
        assert not walk.logits.requires_grad
        assert torch.allclose(walk.logits, logits.flatten(0, 1)[AT], atol=1e-5)
    else:
        assert walk.logits is None


def test_logits_in_slices_are_the_logits(monkeypatch):
    slice_bytes(monkeypatch, 2 * 4 * 64)
    walk = opened(attention()).walk(TOKENS, at=torch.arange(5))
    list(walk)
    slices = list(walk.logit_slices())
    assert [len(part) for part in slices] == [2, 2, 1]
    slices[0].zero_()  # the caller's own
    assert torch.equal(torch.cat(slices)[2:], walk.logits[2:])
    assert walk.logits[:2].abs().sum() > 0


def test_a_pattern_that_a_hook_changes_is_read_as_changed():
    model = attention()

    def even(pattern, hook):
        return torch.ones_like(pattern).tril() / torch.arange(1, 17)[:, None]

    with model.hooks(fwd_hooks=[("blocks.0.mixer.hook_pattern", even)]):
        found = list(matrices(model, TOKENS))
    assert torch.allclose(found[0].matrix[0, 0, 3, :5], torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]))
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_of_the_factors_only_those_named():
    model = cs.model("attention", conv_on="v", n_layers=1, d_model=16, vocab_size=64, max_length=16).eval()
    assert {m.product.name for m in matrices(model, TOKENS)} == {"pattern", "conv"}
    assert {m.product.name for m in matrices(model, TOKENS, ["conv"])} == {"conv"}


def test_the_last_slice_of_a_matrix_says_so(monkeypatch):
    slice_bytes(monkeypatch, 1)
    assert [m.is_last for m in matrices(attention(), TOKENS)] == [False, True, False, True]


# -- the caller's loop --------------------------------------------------------------------------------

KINDS = {
    "attention": attention,
    "mamba": lambda: cs.model("mamba", n_layers=2, d_model=16, vocab_size=64).eval(),
    "foreign": foreign,
    "bridge": bridge,
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_on_in_the_body_of_a_loop_over_matrices(kind):
    model = KINDS[kind]()
    for found in matrices(model, TOKENS):
        assert torch.is_grad_enabled()
        assert not found.matrix.requires_grad  # the walk itself makes none
        assert model(TOKENS).requires_grad
    assert torch.is_grad_enabled()
    for layer, _ in opened(model).walk(TOKENS):
        assert torch.is_grad_enabled()
        if layer == 0:
            break
    for _ in matrices(model, TOKENS):
        break
    assert torch.is_grad_enabled()
    walk = opened(model).walk(TOKENS, at=AT)
    list(walk)
    for _ in walk.logit_slices():
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_off_stay_off(kind):
    with torch.no_grad():
        for _ in matrices(KINDS[kind](), TOKENS):
            assert not torch.is_grad_enabled()
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_is_left_leaves_no_hook_behind(kind):
    model = KINDS[kind]()
    for _ in matrices(model, TOKENS):
        break
    assert not any(point._forward_hooks for point in model.hook_dict.values())


# -- models of others ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["foreign", "bridge"])
def test_any_model_with_patterns_is_read_at_them(kind):
    model = KINDS[kind]()
    with torch.no_grad():
        logits, cache = model.run_with_cache(TOKENS)
    walk = opened(model).walk(TOKENS, at=AT)
    for layer, reading in walk:
        (name, product), *others = reading.products().items()
        assert (name, product.unit, product.size, product.shares, product.core) == ("pattern", "head", 2, True, True)
        assert not others
        assert torch.equal(product.build(slice(0, 2)), cache[f"blocks.{layer}.attn.hook_pattern"])
        assert isinstance(reading.transition, str)
        assert reading.state is None
        assert opened(model).hook(layer, product.hook) == f"blocks.{layer}.attn.hook_pattern"
    assert torch.allclose(walk.logits, logits.flatten(0, 1)[AT], atol=1e-5)
    assert opened(model).n_layers == 2
    assert torch.equal(
        opened(model).reading(TOKENS, -1).core.build(slice(1, 2)), cache["blocks.1.attn.hook_pattern"][:, 1:]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_has_scores_and_decay(kind):
    model = KINDS[kind]()
    data = HeldOut(cs.task("mqar", length=16, pairs=2, vocab_size=64), longest=16, sequences=4)
    rows = list(score_rows(model, data, SCORES))
    for score in ("recall", "binding", "previous_token", "induction"):
        assert {row["layer"] for row in rows if row["score"] == score} == {0, 1}
    assert {row["score"] for row in rows if row["layer"] is None} >= {"accuracy", "loss"}
    assert {row["layer"] for row in decay_rows(model, TOKENS, probes=0)} == {0, 1}


def test_a_foreign_model_with_the_same_weights_has_the_same_scores_decay_and_circuit():
    ours = planted_induction()
    theirs = foreign(ours)
    data = HeldOut(planted_task(), longest=32, sequences=32)
    for rows in (lambda m: score_rows(m, data, SCORES), lambda m: decay_rows(m, data.own.tokens[:4], probes=0)):
        mine, other = (pd.DataFrame(rows(model)) for model in (ours, theirs))
        assert len(mine) > 40
        pd.testing.assert_frame_equal(other, mine, rtol=1e-3, atol=1e-4)
    found = find_circuit(theirs, data.own)
    assert (found.binding.place, found.recall.place) == ("L0H0", "L1H0")
    assert found.composition is None  # a foreign model shows no weights


def test_a_bare_tensor_of_patterns_is_a_reading():
    batch = planted_task().batch(0, split="test", size=8)
    pattern = cs.phi(planted_induction(), batch.tokens, 1)
    reading = pattern_reading(pattern)
    assert (reading.batch, reading.length, reading.core.name) == (8, 32, "pattern")
    ((heads, matrix),) = reading.slices(reading.product("phi"))
    assert (heads, torch.equal(matrix, pattern)) == (slice(0, 2), True)
    assert recall_score(matrix, batch.layout).mean(0)[0] > 0.95
    with pytest.raises(cs.UserError, match="unknown factor 'conv'"):
        reading.product("conv")


class Bare(HookedRootModule):
    """A block whose attention shows its output alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict({"hook_z": HookPoint()})})])
        self.setup()


def test_a_model_without_patterns_is_refused_in_one_line():
    for ask in (lambda: list(matrices(Bare(), TOKENS)), lambda: opened(Bare()).reading(TOKENS, 0)):
        with pytest.raises(cs.UserError, match=r"^Bare shows no mixing matrix: it has no hook named …hook_pattern"):
            ask()
    with pytest.raises(
        cs.UserError, match=r"layer 0 has no hook_phi: expected a hook named blocks\.0\.attn\.hook_pattern"
    ):
        opened(Bare()).hook(0, "hook_phi")
    with pytest.raises(cs.UserError, match=r"unknown hook 'blocks\.1\.mixer\.hook_state'"):
        opened(attention()).hook(1, "hook_state")


# -- one walk for every preset ------------------------------------------------------------------------


@pytest.mark.parametrize("name", cs.models.names())
def test_a_walk_reads_what_each_layer_says_of_itself(name):
    model = cs.model(name, d_model=32, vocab_size=64, max_length=16).eval()
    with torch.no_grad():
        for layer, walked in opened(model).walk(TOKENS, at=AT):
            alone = model.reading(TOKENS, layer)
            assert walked.no_phi == alone.no_phi
            assert list(walked.products(diagonal=True)) == list(alone.products(diagonal=True))
            for product in walked.products().values():
                part = slice(0, min(2, product.size))
                same = alone.product(product.name)
                assert (product.unit, product.size, product.hook) == (same.unit, same.size, same.hook)
                torch.testing.assert_close(product.build(part), same.build(part), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("phi", [(0, "ssm"), (1, "pattern")]),
        (["conv", "pattern"], [(0, "conv"), (1, "pattern")]),
        ("pattern", [(1, "pattern")]),
    ],
)
def test_matrices_are_chosen_by_the_names_that_layers_give_them(asked, found):
    model = cs.HookedLM(cs.models.ModelConfig(mixers=("mamba", "attention"), d_model=8, vocab_size=64, max_length=16))
    tokens = torch.arange(12).reshape(2, 6)
    assert [(m.layer, m.product.name) for m in matrices(model, tokens, asked)] == found


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("nope", "unknown factor 'nope'; valid: pattern, phi"),
        (["patern"], "unknown factor 'patern'; did you mean 'pattern'"),
        (["phi", "conv"], "unknown factor 'conv'; valid: pattern, phi"),
    ],
)
def test_a_factor_that_no_layer_has_is_an_error(asked, says):
    with pytest.raises(cs.UserError, match=says):
        list(matrices(attention(), TOKENS, asked))


def test_a_factor_that_gives_fewer_units_than_it_says_is_an_error():
    factor = Factor("half", "channel", 8, lambda units: torch.ones(1, 8, 3, 3)[:, units][:, :4], core=True)
    reading = Reading((2, 3), (factor,))
    with pytest.raises(cs.UserError, match="the factor 'half' says that it has 8 channels, and gives 4 for 0 to 7"):
        list(reading.slices(reading.core))


@pytest.mark.parametrize("kind", ["foreign", "bridge"])
def test_phi_of_a_model_of_others_is_its_pattern_and_gradients_flow_through_it(kind):
    model = KINDS[kind]()
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    found = cs.phi(model, TOKENS, layer=-1)
    torch.testing.assert_close(found, cache["blocks.1.attn.hook_pattern"])
    torch.testing.assert_close(cs.phi(model, TOKENS, 0, reduce="mean"), cache["blocks.0.attn.hook_pattern"].mean(1))
    found[..., 0].pow(2).sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert not any(point._forward_hooks for point in model.hook_dict.values())
    with pytest.raises(cs.UserError, match="unknown factor 'conv'"):
        cs.phi(model, TOKENS, 0, factors="conv")


def test_a_circuit_is_looked_for_in_a_bridge():
    found = find_circuit(bridge(), cs.task("mqar", length=16, pairs=2, vocab_size=64).batch(0, split="test", size=8))
    assert {part.layer for part in found.tried} == {0, 1}
    assert found.sentences()[0].startswith("no recall to explain: accuracy")


@pytest.mark.usefixtures("without_type_checks")
def test_a_module_without_hooks_is_refused_in_one_line():
    batch = cs.task("mqar", length=16, pairs=2, vocab_size=64).batch(0, split="test", size=8)
    for ask in (
        lambda m: cs.phi(m, TOKENS, 0),
        lambda m: find_circuit(m, batch),
        lambda m: list(matrices(m, TOKENS)),
        lambda m: cs.analysis.knock_out(m, batch, "recall", layer=0),
    ):
        with pytest.raises(
            cs.UserError, match=r"^expected a model of circuitscope or another model with TransformerLens's hooks"
        ):
            ask(nn.Linear(2, 2))


def test_what_analyses_return_shows_itself_in_one_line():
    model, mamba = attention(), KINDS["mamba"]()
    batch = cs.task("mqar", length=16, pairs=2, vocab_size=64).batch(0, split="test", size=4)
    for found in (
        next(matrices(model, TOKENS)),
        mamba.reading(TOKENS, 0),
        cs.analysis.named_edges("recall", batch.layout),
        cs.analysis.layer_decay(mamba, TOKENS, -1),
        cs.analysis.transition_product(mamba, TOKENS, 0),
        cs.analysis.gradient_reach(model, TOKENS[0], 0),
        find_circuit(model, batch),
    ):
        assert "tensor(" not in repr(found)
        assert "\n" not in repr(found)
        assert len(repr(found)) < 400, repr(found)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("shape", [(2, 16), (1, 1, 4, 5)])
def test_a_pattern_of_another_shape_is_refused_in_one_line(shape):
    with pytest.raises(cs.UserError, match=r"a pattern is .batch, head, dest, src., got"):
        pattern_reading(torch.zeros(shape))
