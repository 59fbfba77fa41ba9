"""TransformerLens's own tools on a HookedLM: activation patching and the helpers of ActivationCache."""

import inspect

import pytest
import torch
from transformer_lens import ActivationCache, patching

import circuitscope as cs

LENGTH, HEADS, LAYERS, CHANGED = 8, 2, 2, 3
CLEAN = torch.randint(1, 23, (4, LENGTH), generator=torch.Generator().manual_seed(0))
CORRUPTED = CLEAN.clone()
CORRUPTED[:, CHANGED] = (CLEAN[:, CHANGED] + 5) % 23


def build(**options) -> cs.HookedLM:
    model = cs.model(
        **{"d_model": 16, "n_heads": HEADS, "n_layers": LAYERS, "vocab_size": 23, "max_length": LENGTH} | options
    )
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g))
    return model.double().eval()


@pytest.fixture(scope="module")
def model() -> cs.HookedLM:
    return build()


@pytest.fixture(scope="module")
def clean(model) -> ActivationCache:
    with torch.no_grad():
        return model.run_with_cache(CLEAN)[1]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def metric(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 7]).mean()


def by_hand(model, name, clean_value, where) -> float:
    """The metric of the corrupted run with part of one activation replaced, by torch's own hook."""

    def patch(module, args, out):
        out = out.clone()
        out[where] = clean_value[where]
        return out

    handle = model.hook_dict[name].register_forward_hook(patch)
    try:
        return metric(model(CORRUPTED)).item()
    finally:
        handle.remove()


close = {"rel": 1e-5, "abs": 1e-5}  # generic_activation_patch stores in float32


def test_patching_resid_pre_at_the_changed_token_restores_the_clean_run_and_elsewhere_does_nothing(model, clean):
    patched = patching.get_act_patch_resid_pre(model, CORRUPTED, clean, metric)
    good, bad = metric(model(CLEAN)).item(), metric(model(CORRUPTED)).item()
    assert abs(good - bad) > 1e-2
    assert patched.shape == (LAYERS, LENGTH)
    for pos in range(LENGTH):
        assert patched[0, pos].item() == pytest.approx(good if pos == CHANGED else bad, **close)
        name, where = "blocks.1.hook_resid_pre", (slice(None), pos)
        assert patched[1, pos].item() == pytest.approx(by_hand(model, name, clean["resid_pre", 1], where), **close)


def test_patching_the_whole_last_residual_stream_restores_the_clean_metric(model, clean):
    patched = patching.generic_activation_patch(
        model, CORRUPTED, clean, metric, lambda corrupted, index, value: value, "resid_post", ["layer"]
    )
    assert patched[-1].item() == pytest.approx(metric(model(CLEAN)).item(), **close)


def test_patching_z_by_position_and_head_is_what_a_plain_hook_does(model, clean):
    patched = patching.get_act_patch_attn_head_out_by_pos(model, CORRUPTED, clean, metric)
    assert patched.shape == (LAYERS, LENGTH, HEADS)
    for layer in range(LAYERS):
        for pos in (0, CHANGED, LENGTH - 1):
            for head in range(HEADS):
                name, where = f"blocks.{layer}.mixer.hook_z", (slice(None), pos, head)
                expected = by_hand(model, name, clean["z", layer], where)
                assert patched[layer, pos, head].item() == pytest.approx(expected, **close)
    assert len(set(patched.flatten().tolist())) > LENGTH


def test_patching_patterns_is_what_a_plain_hook_on_phi_does(model, clean):
    patched = patching.get_act_patch_attn_head_pattern_all_pos(model, CORRUPTED, clean, metric)
    rows = patching.get_act_patch_attn_head_pattern_by_pos(model, CORRUPTED, clean, metric)
    assert patched.shape == (LAYERS, HEADS)
    for layer in range(LAYERS):
        for head in range(HEADS):
            name, where = f"blocks.{layer}.mixer.hook_phi", (slice(None), head)
            expected = by_hand(model, name, clean["pattern", layer], where)
            assert patched[layer, head].item() == pytest.approx(expected, **close)
    bad = metric(model(CORRUPTED)).item()
    assert abs(patched - bad).max() > 1e-3
    assert (rows[:, :CHANGED] if rows.shape[1] == LENGTH else rows[:, :, :CHANGED]).flatten().tolist() == pytest.approx(
        [bad] * (LAYERS * HEADS * CHANGED), **close
    )


@pytest.mark.parametrize(
    "patch",
    ["resid_mid", "attn_out", "mlp_out", "attn_head_q_all_pos", "attn_head_k_by_pos", "attn_head_v_all_pos"],
)
def test_the_other_ready_made_patches_run_and_move_the_metric(patch, model, clean):
    patched = getattr(patching, f"get_act_patch_{patch}")(model, CORRUPTED, clean, metric)
    assert patched.isfinite().all()
    assert abs(patched - metric(model(CORRUPTED)).item()).max() > 1e-4


@pytest.mark.parametrize("name", ["attention", "mamba", "deltanet", "lstm"])
def test_blocks_of_every_mixer_are_patched_by_transformer_lens(name):
    model = cs.model(name, d_model=16, n_layers=LAYERS, vocab_size=23, max_length=LENGTH).double().eval()
    clean = model.run_with_cache(CLEAN)[1]
    patched = patching.get_act_patch_block_every(model, CORRUPTED, clean, metric)
    assert patched.shape == (3, LAYERS, LENGTH)
    for kind, hook in enumerate(("resid_pre", "mixer_out", "mlp_out")):
        name, where = f"blocks.1.hook_{hook}", (slice(None), CHANGED)
        expected = by_hand(model, name, clean[name], where)
        assert patched[kind, 1, CHANGED].item() == pytest.approx(expected, **close)


def test_a_model_without_an_mlp_says_so_where_its_output_is_asked_for():
    model = cs.model("mamba_bare", d_model=16, n_layers=LAYERS, vocab_size=23).eval()
    with pytest.raises(cs.UserError, match=r"blocks\.0\.hook_mlp_out.*this model has no MLP"):
        patching.get_act_patch_block_every(model, CORRUPTED, model.run_with_cache(CLEAN)[1], metric)


def test_patching_refuses_a_model_in_training_mode(clean):
    with pytest.raises(Exception, match="eval"):
        patching.get_act_patch_resid_pre(build().train(), CORRUPTED, clean, metric)


# ActivationCache's helpers: those that apply give the right numbers.


@pytest.mark.parametrize("options", [{}, {"state_mixer": "none"}, {"positions": "rope"}, {"positions": "sinusoidal"}])
def test_decompose_resid_sums_to_the_residual_stream(options):
    model = build(**options)
    _, cache = model.run_with_cache(CLEAN)
    parts, labels = cache.decompose_resid(return_labels=True)
    assert len(parts) == len(labels)
    torch.testing.assert_close(parts.sum(0), cache["resid_post", -1])
    torch.testing.assert_close(cache.decompose_resid(layer=1).sum(0), cache["resid_pre", 1])
    if model.config.state_mixer == "mlp":
        torch.testing.assert_close(cache.decompose_resid(layer=1, mlp_input=True).sum(0), cache["resid_mid", 1])
    scaled = cache.decompose_resid(apply_ln=True).sum(0) * model.ln_final.weight + model.ln_final.bias
    torch.testing.assert_close(scaled, cache["ln_final.hook_normalized"])


def test_accumulated_resid_is_the_stream_after_each_layer_and_with_the_norm_what_the_unembedding_reads(model, clean):
    stack, labels = clean.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"]
    names = [("resid_pre", 0), ("resid_mid", 0), ("resid_pre", 1), ("resid_mid", 1), ("resid_post", 1)]
    assert all(torch.equal(row, clean[name]) for row, name in zip(stack, names, strict=True))
    normed = clean.accumulated_resid(apply_ln=True)
    torch.testing.assert_close(normed, torch.stack([model.ln_final(row) for row in clean.accumulated_resid()]))
    torch.testing.assert_close(normed[-1] @ model.W_U, model(CLEAN))


def test_apply_ln_to_stack_scales_by_the_cached_norm_of_the_layer(model, clean):
    for layer, norm in ((0, "ln1"), (1, "ln1")):
        stack = clean.accumulated_resid(layer=layer)[-1:]
        scaled = clean.apply_ln_to_stack(stack, layer=layer)[0]
        ln = getattr(model.blocks[layer], norm)
        torch.testing.assert_close(scaled * ln.weight + ln.bias, clean[f"blocks.{layer}.{norm}.hook_normalized"])
    into_mlp = clean.apply_ln_to_stack(clean["resid_mid", 1][None], layer=1, mlp_input=True)[0]
    ln = model.blocks[1].ln2
    torch.testing.assert_close(into_mlp * ln.weight + ln.bias, clean["blocks.1.ln2.hook_normalized"])


def test_head_results_sum_to_what_attention_adds(model):
    _, cache = model.run_with_cache(CLEAN)
    heads, labels = cache.stack_head_results(return_labels=True)
    assert labels == ["L0H0", "L0H1", "L1H0", "L1H1"]
    for layer in range(LAYERS):
        added = heads[layer * HEADS : (layer + 1) * HEADS].sum(0) + model.blocks[layer].mixer.out.bias
        torch.testing.assert_close(added, cache["attn_out", layer])
    whole = cache.stack_head_results(incl_remainder=True)
    torch.testing.assert_close(whole.sum(0), cache["resid_post", -1])
    assert torch.equal(cache["result", 1, "attn"][:, :, 0], heads[HEADS])


def test_compute_head_results_adds_them_to_the_cache(model):
    _, cache = model.run_with_cache(CLEAN)
    cache.compute_head_results()
    assert cache["blocks.0.attn.hook_result"].shape == (4, LENGTH, HEADS, 16)


@pytest.mark.parametrize("name", ["z", "pattern", "resid_pre", "attn_out", "mlp_out", "q", "attn_scores"])
def test_stack_activation_stacks_the_layers(name, clean):
    stack = clean.stack_activation(name)
    assert all(torch.equal(stack[layer], clean[name, layer]) for layer in range(LAYERS))


def test_a_cache_can_be_sliced_by_example_and_still_decomposes(model, clean):
    sliced = clean.apply_slice_to_batch_dim(slice(1, 3))
    assert torch.equal(sliced["resid_post", 1], clean["resid_post", 1][1:3])
    assert torch.equal(sliced["z", 0], clean["z", 0][1:3])
    torch.testing.assert_close(sliced.decompose_resid().sum(0), clean["resid_post", -1][1:3])


def test_a_cache_of_one_example_decomposes_without_its_batch_dimension(model):
    _, cache = model.run_with_cache(CLEAN[:1])
    single = cache.remove_batch_dim()
    assert single["resid_post", 1].shape == (LENGTH, 16)
    torch.testing.assert_close(single.decompose_resid().sum(0), single["resid_post", -1])
    torch.testing.assert_close(single.stack_head_results(incl_remainder=True).sum(0), single["resid_post", -1])


def test_moving_a_cache_keeps_its_names(model):
    _, cache = model.run_with_cache(CLEAN)
    assert torch.equal(cache.to("cpu")["z", 0], cache["blocks.0.mixer.hook_z"])


def test_there_are_no_ssm_layers_to_find(clean):
    assert clean.ssm_layers() == []


# … and those the docstring says do not apply, raise.

NOT_APPLICABLE = {
    "logit_attrs": lambda c: c.logit_attrs(c.decompose_resid(), CLEAN[:, 0]),
    "get_full_resid_decomposition": lambda c: c.get_full_resid_decomposition(expand_neurons=False),
    "compute_ssm_effective_attention": lambda c: c.compute_ssm_effective_attention(),
    "compute_ssm_state": lambda c: c.compute_ssm_state(),
    "stack_neuron_results": lambda c: c.stack_neuron_results(layer=-1),
    "get_neuron_results": lambda c: c.get_neuron_results(0),
    "logit_lens": lambda c: c.logit_lens(),
}


@pytest.mark.parametrize("helper", list(NOT_APPLICABLE))
@pytest.mark.parametrize("tied", [True, False])
def test_a_helper_listed_as_not_applying_raises(helper, tied):
    model = build(tied=tied)
    assert f"`{helper}`" in inspect.getdoc(type(model))
    cache = model.run_with_cache(CLEAN)[1]
    with pytest.raises((AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)):
        NOT_APPLICABLE[helper](cache)


def test_every_public_helper_is_either_tested_here_or_listed_as_not_applying():
    plain = {"keys", "values", "items", "toggle_autodiff"}
    tested = {
        "accumulated_resid",
        "apply_ln_to_stack",
        "apply_slice_to_batch_dim",
        "compute_head_results",
        "decompose_resid",
        "remove_batch_dim",
        "ssm_layers",
        "stack_activation",
        "stack_head_results",
        "to",
    }
    public = {n for n, f in inspect.getmembers(ActivationCache, callable) if not n.startswith("_")}
    assert public == plain | tested | set(NOT_APPLICABLE)
