"""Interchange and attribution patching: they find where planted circuits keep a binding, as other tools do."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from transformer_lens import patching as lens
from transformer_lens.tools.analysis.attribution_patching import cache_activation_and_gradient

import circuitscope as cs
from circuitscope.analysis.causal.patching import attribution_patching, exchange_values, interchange
from circuitscope.analysis.reading import hooked
from circuitscope.tasks import Role
from foreign import Foreign
from planted import planted_conv_mamba, planted_induction, planted_task

pytestmark = pytest.mark.slow

BATCH = planted_task().batch(0, split="test", size=32)
SMALL = planted_task(vocab_size=32, length=20, pairs=3).batch(0, split="test", size=6)
FEW = planted_task().batch(0, split="test", size=8)
BOTH = pytest.mark.parametrize("patch", [interchange, attribution_patching])


@pytest.fixture(scope="module")
def induction() -> cs.HookedLM:
    return planted_induction()


@pytest.fixture(scope="module")
def mamba() -> cs.HookedLM:
    return planted_conv_mamba()


def build(name: str = "attention", **options) -> cs.HookedLM:
    """A small random model in float64."""
    fits = {"mamba2": {"headdim": 8}, "attention": {"n_heads": 2}}.get(name, {})
    model = cs.model(name, **{"d_model": 16, "n_layers": 2, "vocab_size": 32, "max_length": 20} | fits | options)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g))
    return model.double().eval()


def effects(table: pd.DataFrame) -> dict[tuple[str, str | int], float]:
    return {(row.hook, row.position): row.effect for row in table.itertuples()}


def metric(batch: cs.Batch, seed: int = 0):
    """The twins' logit difference by sequence, written out query by query; logits [batch, pos, vocab] in."""
    twins = exchange_values(batch, seed)

    def of(logits: torch.Tensor) -> torch.Tensor:
        out = []
        for b in range(len(batch)):
            asked = [q for q in range(twins.pos.shape[1]) if twins.asked[b, q]]
            each = [
                logits[b, twins.pos[b, q], twins.right[b, q]] - logits[b, twins.pos[b, q], twins.other[b, q]]
                for q in asked
            ]
            out.append(sum(each) / len(each))
        return torch.stack(out)

    return twins, of


# -- the twins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [planted_task(), planted_task(queries=2), cs.task("ar", length=16, pairs=4)])
def test_twins_differ_in_two_values_that_trade_places_and_in_nothing_else(task):
    batch = task.batch(0, size=40)
    layout, twins = batch.layout, exchange_values(batch)
    assert torch.equal(twins.clean, batch.tokens)
    for b in range(40):
        changed = (twins.clean[b] != twins.exchanged[b]).nonzero().squeeze(1)
        assert len(changed) == 2
        assert (layout.roles[b, changed] == Role.VALUE).all()
        assert twins.exchanged[b, changed].tolist() == twins.clean[b, changed].flip(0).tolist()
        for q, pair in enumerate(layout.query_pair[b].tolist()):
            at = layout.value_pos[b, pair]
            assert bool(twins.asked[b, q]) == bool((changed == at).any())
            assert (twins.right[b, q], twins.other[b, q]) == (batch.tokens[b, at], twins.exchanged[b, at])
            assert twins.right[b, q] == batch.labels[b, twins.pos[b, q]]
    assert twins.asked.any(dim=1).all()


def test_the_pairs_that_trade_are_drawn_at_random_from_all():
    batch = planted_task().batch(0, size=400)
    assert torch.equal(exchange_values(batch).exchanged, exchange_values(batch, 0).exchanged)
    assert not torch.equal(exchange_values(batch).exchanged, exchange_values(batch, 1).exchanged)
    moved = (exchange_values(batch).exchanged != batch.tokens).sum(0)[[1, 3, 5, 7]]
    assert moved.sum() == 800
    assert ((moved - 200).abs() < 60).all()  # 200 ± 10


# -- planted circuits ---------------------------------------------------------------------------------


def test_in_the_planted_transformer_the_value_travels_from_its_position_to_the_query_in_layer_1(induction):
    found = effects(interchange(induction, BATCH, hooks=["resid_pre", "resid_post", "mixer_out", "v", "z", "phi"]))
    carriers = {
        ("blocks.0.hook_resid_pre", "value"),
        ("blocks.0.hook_resid_post", "value"),
        ("blocks.1.hook_resid_pre", "value"),
        ("blocks.1.mixer.hook_v", "value"),
        ("blocks.1.mixer.hook_z", "query"),
        ("blocks.1.hook_mixer_out", "query"),
        ("blocks.1.hook_resid_post", "query"),
    }
    assert len(found) == 2 * 6 * 4
    for place, effect in found.items():
        assert effect == pytest.approx(1 if place in carriers else 0, abs=1e-3), place


def test_in_the_planted_mamba_the_value_goes_through_v_and_z_and_not_through_the_step_or_the_matrix(mamba):
    found = effects(interchange(mamba, BATCH, hooks=["resid_pre", "v", "B", "C", "dt", "phi", "z"]))
    carriers = {
        ("blocks.0.hook_resid_pre", "value"),
        ("blocks.0.mixer.hook_v", "value"),
        ("blocks.0.mixer.hook_z", "query"),
    }
    for place, effect in found.items():
        assert effect == pytest.approx(1 if place in carriers else 0, abs=1e-3), place


@BOTH
def test_positions_one_by_one_name_the_context_values(induction, patch):
    table = patch(induction, BATCH, hooks="blocks.1.mixer.hook_v", by="pos")
    assert table.position.tolist() == list(range(32))
    assert table.layer.tolist() == [1] * 32
    at = table.set_index("position").effect
    assert at.drop([1, 3, 5, 7]).abs().max() < 1e-3
    assert at[[1, 3, 5, 7]].min() > 0.1
    whole = patch(induction, BATCH, hooks="blocks.1.mixer.hook_v").set_index("position").effect["value"]
    assert at.sum() == pytest.approx(whole, abs=1e-3)  # here every query reads one position


def test_patching_everything_restores_the_clean_answer(induction):
    table = interchange(induction, BATCH, hooks=["resid_pre", "ln_final.hook_normalized"], by="all")
    assert table.position.tolist() == ["all"] * 3
    assert table.layer.isna().tolist() == [False, False, True]
    assert table.effect.tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert (table.stderr < 1e-5).all()
    assert (table.n == 32).all()


def test_attribution_finds_the_same_places_in_the_planted_transformer(induction):
    hooks = ["resid_pre", "v", "z", "mixer_out"]
    exact, estimate = interchange(induction, BATCH, hooks=hooks), attribution_patching(induction, BATCH, hooks=hooks)
    assert estimate[["layer", "hook", "position", "n"]].equals(exact[["layer", "hook", "position", "n"]])
    assert estimate.gap.tolist() == pytest.approx(exact.gap.tolist(), rel=1e-5)
    carries = exact.effect > 0.5
    assert carries.sum() == 5
    assert estimate.effect[carries].min() > 0.5
    assert estimate.effect[~carries].abs().max() < 0.1


# -- against other tools ------------------------------------------------------------------------------


@pytest.fixture
def _quiet(monkeypatch):
    monkeypatch.setattr(lens, "tqdm", lambda x: x)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("name", ["attention", "mamba", "deltanet"])
def test_interchange_on_the_stream_is_what_transformer_lens_patches(name):
    model = build(name)
    twins, of = metric(SMALL)
    with torch.no_grad():
        _, clean = model.run_with_cache(twins.clean)
        low, high = of(model(twins.exchanged)), of(model(twins.clean))
        theirs = lens.get_act_patch_resid_pre(model, twins.exchanged, clean, of, reduce="none")
    ours = interchange(model, SMALL, hooks="resid_pre", by="pos")
    moved = torch.tensor(ours.moved.tolist()).view(2, 20)
    expected = (theirs.values.double() - low).mean(-1)
    torch.testing.assert_close(moved.double(), expected, rtol=1e-4, atol=1e-5)  # they store in float32
    assert expected.abs().max() > 1e-2
    assert ours.gap.tolist() == pytest.approx([float((high - low).mean())] * 40)


@pytest.mark.usefixtures("_quiet")
def test_interchange_of_z_and_of_patterns_is_what_transformer_lens_patches():
    model = build(n_heads=1)
    twins, of = metric(SMALL)
    with torch.no_grad():
        _, clean = model.run_with_cache(twins.clean)
        low = of(model(twins.exchanged))
        z = lens.get_act_patch_attn_head_out_by_pos(model, twins.exchanged, clean, of, reduce="none")
        rows = lens.get_act_patch_attn_head_pattern_by_pos(model, twins.exchanged, clean, of, reduce="none")
    for hook, theirs in (("z", z.values), ("pattern", rows.values)):
        ours = interchange(model, SMALL, hooks=hook, by="pos")
        moved = torch.tensor(ours.moved.tolist()).double().view(2, 20)
        expected = (theirs.reshape(2, 20, 6).double() - low).mean(-1)
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)
        assert expected.abs().max() > 1e-3


HOOKS = ["blocks.0.hook_resid_pre", "blocks.1.mixer.hook_v", "blocks.1.mixer.hook_phi", "ln_final.hook_normalized"]


@pytest.mark.parametrize("name", ["attention", "mamba2", "deltanet"])
def test_attribution_is_what_the_gradients_of_transformer_lens_give(name):
    model = build(name)
    twins, of = metric(SMALL)
    clean = cache_activation_and_gradient(
        model, twins.clean, lambda x: of(x).sum(), names_filter=HOOKS, compute_gradient=False
    )
    low = cache_activation_and_gradient(model, twins.exchanged, lambda x: of(x).sum(), names_filter=HOOKS)
    ours = attribution_patching(model, SMALL, hooks=HOOKS, by="pos").set_index(["hook", "position"]).moved
    for hook in HOOKS:
        change = (clean.activations[hook] - low.activations[hook]) * low.gradients[hook]
        if hook.endswith("phi"):
            change = change.transpose(1, 2)
        expected = change.flatten(2).sum(2).mean(0)
        assert ours[hook].tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-9)
        assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("name", ["attention", "mamba", "mamba2", "deltanet", "h3", "lstm"])
def test_attribution_is_interchange_to_first_order_in_the_difference_of_the_twins(name):
    model = build(name, tied=False)
    spread = model.embed.weight.detach().clone() - model.embed.weight.detach()[:1]
    hooks = [
        h for h in ("resid_pre", "v", "phi", "z", "mixer_out", "mlp_out") if h not in ("v", "phi") or name != "lstm"
    ]
    errors = []
    for scale in (1e-2, 1e-3):
        with torch.no_grad():
            model.embed.weight[16:] = model.embed.weight[:1] + scale * spread[16:]  # values all but the same
        exact = interchange(model, SMALL, hooks=hooks).moved
        estimate = attribution_patching(model, SMALL, hooks=hooks).moved
        errors.append((exact - estimate).abs().max() / exact.abs().max())
    assert errors[0] < 0.3
    assert errors[1] < 0.2 * errors[0]  # second order: a tenth


@BOTH
def test_where_the_metric_is_linear_in_the_activation_both_are_exact(patch):
    model = build()
    table = patch(model, SMALL, hooks="ln_final.hook_normalized", by="all")
    assert table.moved.tolist() == pytest.approx(table.gap.tolist(), rel=1e-9)


# -- tables -------------------------------------------------------------------------------------------


@BOTH
def test_without_a_choice_the_stream_and_every_branch_are_patched(patch):
    table = patch(build(), SMALL)
    names = [f"blocks.{i}.hook_{n}" for n in ("resid_pre", "mixer_out", "mlp_out") for i in (0, 1)]
    assert list(dict.fromkeys(table.hook)) == names
    assert set(table.position) == {"key", "value", "query", "filler"}
    assert list(table) == ["layer", "hook", "position", "effect", "stderr", "moved", "gap", "n"]


@BOTH
def test_a_model_that_does_not_tell_the_twins_apart_has_no_effect_to_share_out(patch):
    table = patch(cs.model(vocab_size=64), planted_task().batch(0, size=16))
    assert table.effect.isna().all()
    assert table.stderr.isna().all()
    assert table.moved.notna().all()


def test_twins_that_are_equal_have_no_effect_to_share_out(induction):
    equal = replace(FEW, inputs=FEW.tokens.scatter(1, FEW.layout.value_pos, 40))
    table = interchange(induction, equal)
    assert (table.gap == 0).all()
    assert table.effect.isna().all()
    assert table.stderr.isna().all()


def test_the_standard_error_of_an_effect_is_how_much_it_varies_between_batches(induction):
    tables = [
        attribution_patching(induction, planted_task().batch(step, size=16), hooks="blocks.1.mixer.hook_v", by="pos")
        for step in range(30)
    ]
    at = [table.set_index("position").loc[1] for table in tables]  # which pairs trade values varies
    spread = torch.tensor([row.effect for row in at]).std().item()
    stderr = sum(row.stderr for row in at) / len(at)
    assert spread > 0.01
    assert 0.6 < stderr / spread < 1.6  # a spread from 30 batches is known to 13%


@pytest.mark.parametrize("name", ["attention", "mamba"])
@BOTH
def test_slices_change_nothing(name, patch, monkeypatch):
    model = build(name)
    hooks = ["resid_pre", "phi", "blocks.1.mixer.hook_z"]
    whole = patch(model, SMALL, hooks=hooks)
    monkeypatch.setattr(hooked, "SLICE_BYTES", 1)
    pd.testing.assert_frame_equal(patch(model, SMALL, hooks=hooks), whole, rtol=1e-8)


@BOTH
def test_a_foreign_model_with_the_same_weights_gives_the_same_table(induction, patch):
    foreign = Foreign(induction)
    ours = patch(induction, FEW, hooks=["resid_pre", "mixer_out", "v", "pattern"])
    theirs = patch(foreign, FEW, hooks=["resid_pre", "attn_out", "v", "pattern"])
    assert theirs.effect.tolist() == pytest.approx(ours.effect.tolist(), abs=1e-4)
    assert theirs.hook.str.replace("attn", "mixer").tolist() == ours.hook.tolist()
    assert set(patch(foreign, FEW).hook) == {f"blocks.{i}.hook_{n}" for n in ("resid_pre", "attn_out") for i in (0, 1)}


def test_hooks_may_be_named_by_alias_or_chosen_by_a_function(induction):
    by_alias = interchange(induction, FEW, hooks="blocks.1.attn.hook_v")
    by_function = interchange(induction, FEW, hooks=lambda name: name == "blocks.1.mixer.hook_v")
    pd.testing.assert_frame_equal(by_alias, by_function)
    assert by_alias.hook.unique().tolist() == ["blocks.1.mixer.hook_v"]


# -- nothing stays behind; bad input ------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("hooks", ["resid_pre", "blocks.0.mlp.hook_pre", "hook_scale", lambda name: 1 / 0])
def test_the_model_is_left_as_it_was(patch, hooks):
    model = build().train()
    model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    try:
        patch(model, SMALL, hooks=hooks)
    except ZeroDivisionError:
        pass
    assert not any(len(p._forward_hooks) + len(p._backward_hooks) + len(p.fwd_hooks) for p in model.hook_points())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


PLAIN = cs.task("induction", block=4, repeats=4, vocab_size=32).batch(0, size=4)
ONE_PAIR = planted_task(vocab_size=32, length=20, pairs=1).batch(0, size=4)


@pytest.mark.usefixtures("without_type_checks")
@BOTH
@pytest.mark.parametrize(
    ("batch", "options", "says"),
    [
        (SMALL, {"hooks": "resid_pree"}, r"did you mean"),
        (SMALL, {"hooks": ["blocks.0.mixer.hook_vv"]}, r"did you mean 'blocks\.0\.mixer\.hook_v'"),
        (SMALL, {"hooks": lambda name: False}, "no hook of the model is chosen"),
        (SMALL, {"hooks": int}, "expected a name, a list of names or a function"),
        (SMALL, {"hooks": [1]}, "expected a name, a list of names or a function"),
        (SMALL, {"by": "rol"}, "grouping 'rol'; did you mean 'role'"),
        (SMALL, {"hooks": "state"}, r"add up; expected by='pos'"),
        (PLAIN, {}, "keys, values and queries"),
        (ONE_PAIR, {}, "at least 2, got 1"),
    ],
)
def test_bad_input_is_one_line(patch, batch, options, says):
    with pytest.raises(cs.UserError, match=says) as error:
        patch(build("mamba"), batch, **options)
    assert "\n" not in str(error.value)


def test_states_can_be_patched_one_position_at_a_time():
    model = build("mamba", n_layers=1)
    table = interchange(model, SMALL, hooks="state", by="pos")
    moved = table.set_index("position").moved
    assert moved[0] == pytest.approx(0, abs=1e-9)  # no value before
    assert moved[5] != pytest.approx(0, abs=1e-6)  # after all values the state holds all there is to know


def test_attribution_patching_works_under_inference_mode():
    model = build()
    expected = effects(attribution_patching(model, SMALL))
    with torch.inference_mode():
        batch = replace(SMALL, inputs=SMALL.tokens.clone())
        assert effects(attribution_patching(model, batch)) == pytest.approx(expected, nan_ok=True)
