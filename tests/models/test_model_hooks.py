"""Hooks of HookedLM: names, shapes, filters, aliases, edits; nothing stays behind."""

import pytest
import torch
from transformer_lens import ActivationCache

import circuitscope as cs

BATCH, LENGTH, WIDTH, HEADS, VOCAB = 3, 10, 16, 2, 23
TOKENS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def build(**options) -> cs.HookedLM:
    model = cs.model(**{"d_model": WIDTH, "n_heads": HEADS, "vocab_size": VOCAB, "max_length": LENGTH} | options)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g))
    return model.eval()


def build_mixer(name: str) -> cs.HookedLM:
    fits = {"mamba2": {"headdim": 8}}.get(name, {})
    return cs.model(name, d_model=WIDTH, n_layers=2, vocab_size=VOCAB, max_length=LENGTH, **fits).eval()


@pytest.fixture(scope="module")
def model() -> cs.HookedLM:
    return build()


def listeners(model: cs.HookedLM) -> int:
    return sum(
        len(p._forward_hooks) + len(p._backward_hooks) + len(p.fwd_hooks) + len(p.bwd_hooks)
        for p in model.hook_points()
    )


def test_every_hook_of_the_design_is_there_and_has_its_shape(model):
    _, cache = model.run_with_cache(TOKENS)
    stream, heads = (BATCH, LENGTH, WIDTH), (BATCH, LENGTH, HEADS, WIDTH // HEADS)
    square, hidden = (BATCH, HEADS, LENGTH, LENGTH), (BATCH, LENGTH, 4 * WIDTH)
    expected = {"hook_embed": stream, "hook_pos_embed": stream, "ln_final.hook_normalized": stream}
    expected |= {"ln_final.hook_scale": (BATCH, LENGTH, 1)}
    for i in range(2):
        for name in ("resid_pre", "resid_mid", "resid_post", "mixer_out", "mlp_out"):
            expected[f"blocks.{i}.hook_{name}"] = stream
        for name in ("q", "k", "v", "z"):
            expected[f"blocks.{i}.mixer.hook_{name}"] = heads
        for name in ("phi", "pattern", "attn_scores"):
            expected[f"blocks.{i}.mixer.hook_{name}"] = square
        for name in ("pre", "post"):
            expected[f"blocks.{i}.mlp.hook_{name}"] = hidden
        for norm in ("ln1", "ln2"):
            expected[f"blocks.{i}.{norm}.hook_normalized"] = stream
            expected[f"blocks.{i}.{norm}.hook_scale"] = (BATCH, LENGTH, 1)
    assert {name: tuple(value.shape) for name, value in cache.items()} == expected


def test_hooks_that_do_not_exist_in_a_model_are_not_offered():
    bare = build(positions="none", state_mixer="none")
    assert not [n for n in bare.hook_dict if "pos_embed" in n or "mlp" in n or "mid" in n]
    rope = build(positions="rope")
    _, cache = rope.run_with_cache(TOKENS, names_filter="blocks.0.mixer.hook_rot_q")
    assert cache["blocks.0.mixer.hook_rot_q"].shape == (BATCH, LENGTH, HEADS, WIDTH // HEADS)


def test_run_with_cache_returns_an_activation_cache_and_the_same_logits(model):
    logits, cache = model.run_with_cache(TOKENS)
    assert isinstance(cache, ActivationCache)
    assert isinstance(logits, torch.Tensor)
    torch.testing.assert_close(logits, model(TOKENS), rtol=1e-4, atol=1e-4)


def test_cached_activations_are_the_ones_the_model_computes_from(model):
    logits, cache = model.run_with_cache(TOKENS)
    assert torch.equal(cache["hook_embed"], model.embed(TOKENS))
    assert torch.equal(cache["hook_embed"] + cache["hook_pos_embed"], cache["resid_pre", 0])
    for i in range(2):
        torch.testing.assert_close(cache["resid_pre", i] + cache["mixer_out", i], cache["resid_mid", i])
        torch.testing.assert_close(cache["resid_mid", i] + cache["mlp_out", i], cache["resid_post", i])
    assert torch.equal(cache["resid_post", 0], cache["resid_pre", 1])
    torch.testing.assert_close(cache["ln_final.hook_normalized"] @ model.W_U, logits, rtol=1e-4, atol=1e-4)


FILTERS = {
    "a name": ("blocks.0.mixer.hook_phi", {"blocks.0.mixer.hook_phi"}),
    "an alias": ("blocks.1.attn.hook_z", {"blocks.1.mixer.hook_z"}),
    "a list": (["hook_embed", "blocks.0.hook_attn_out"], {"hook_embed", "blocks.0.hook_mixer_out"}),
    "a tuple": (("hook_embed", "blocks.0.mixer.hook_v"), {"hook_embed", "blocks.0.mixer.hook_v"}),
    "a function": (lambda n: n.endswith("hook_q"), {"blocks.0.mixer.hook_q", "blocks.1.mixer.hook_q"}),
    "a function of the alias": (lambda n: ".attn.hook_k" in n, {"blocks.0.mixer.hook_k", "blocks.1.mixer.hook_k"}),
}


@pytest.mark.parametrize("kind", list(FILTERS))
def test_a_filter_may_be(kind, model):
    asked, expected = FILTERS[kind]
    assert set(model.run_with_cache(TOKENS, names_filter=asked)[1].keys()) == expected


def test_cached_activations_answer_to_full_short_and_alias_names(model):
    _, cache = model.run_with_cache(TOKENS)
    z = cache["blocks.1.mixer.hook_z"]
    for key in ("blocks.1.attn.hook_z", ("z", 1), ("z", -1), ("z", 1, "attn"), ("z", 1, "mixer")):
        assert torch.equal(cache[key], z), key
    assert torch.equal(cache["attn_out", 0], cache["blocks.0.hook_mixer_out"])
    assert torch.equal(cache["pattern", 0], cache["blocks.0.mixer.hook_phi"])


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.run_with_cache(TOKENS, names_filter="blocks.0.mixer.hook_fi"),
        lambda m: m.run_with_cache(TOKENS, names_filter=["hook_embed", "blocks.0.mixer.hook_fi"]),
        lambda m: m.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mixer.hook_fi", lambda v, hook: v)]),
        lambda m: m.add_hook("blocks.0.mixer.hook_fi", lambda v, hook: v),
    ],
    ids=["cache", "cache list", "run_with_hooks", "add_hook"],
)
def test_an_unknown_hook_is_refused_with_the_nearest_name_and_leaves_nothing_behind(ask, model):
    with pytest.raises(cs.UserError, match=r"did you mean 'blocks\.0\.(mixer|attn)\.hook_phi'"):
        ask(model)
    assert listeners(model) == 0


def test_a_name_that_is_a_module_but_no_hook_is_refused_as_bad_input(model):
    with pytest.raises(cs.UserError, match=r"blocks\.0"):
        model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mixer", lambda v, hook: v)])
    assert listeners(model) == 0


def test_an_activation_that_was_not_cached_is_refused_with_what_to_ask_for(model):
    _, cache = model.run_with_cache(TOKENS, names_filter="blocks.0.mixer.hook_z")
    with pytest.raises(cs.UserError, match=r"does not hold blocks\.1\.mixer\.hook_z, which its names_filter left out"):
        cache["z", 1]
    with pytest.raises(cs.UserError, match=r"did you mean 'blocks\.0\.mixer\.hook_z'"):
        cache["blocks.0.mixer.hook_zz"]


def test_what_is_made_on_demand_is_said_to_need_a_filter():
    mamba = build_mixer("mamba")
    _, cache = mamba.run_with_cache(TOKENS)
    for name in ("phi", "state"):
        with pytest.raises(cs.UserError, match=rf'on demand: add a names_filter.*"blocks\.0\.mixer\.hook_{name}"'):
            cache[name, 0]
    _, cache = mamba.run_with_cache(TOKENS, names_filter="blocks.0.mixer.hook_phi")
    torch.testing.assert_close(cache["phi", 0], cs.phi(mamba, TOKENS, 0))


def test_a_key_that_names_no_activation_is_refused_in_one_line(model):
    _, cache = model.run_with_cache(TOKENS)
    for key in (0, ("phi",), ("phi", "0"), None):
        with pytest.raises(
            cs.UserError, match=r'^expected the name of a hook, or a short name and a layer such as \("phi'
        ):
            cache[key]
    with pytest.raises(cs.UserError, match=r"no blocks\.0\.attn\.hook_pattern.*ask for blocks\.0\.mixer\.hook_phi"):
        build_mixer("mamba").run_with_cache(TOKENS)[1]["pattern", 0]
    with pytest.raises(cs.UserError, match=r"unknown hook 'phi'; did you mean 'blocks\.\d\.mixer\.hook_phi'"):
        model.run_with_cache(TOKENS, names_filter="phi")


@pytest.mark.parametrize("name", ["attention", "mamba", "mamba2", "deltanet", "hyena", "lstm"])
def test_every_mixer_answers_to_the_names_of_attention(name):
    model = build_mixer(name)
    logits, cache = model.run_with_cache(TOKENS)
    assert torch.equal(cache["attn_out", -1], cache["blocks.1.hook_mixer_out"])
    none = [("blocks.1.hook_attn_out", lambda out, hook: 0 * out)]
    assert not torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=none), logits)
    if "blocks.0.mixer.hook_z" in model.hook_dict:
        assert torch.equal(cache["z", 0], cache["blocks.0.mixer.hook_z"])


def test_hooks_leave_nothing_behind_even_when_one_fails(model):
    before = model(TOKENS)

    def fail(value, hook):
        raise ZeroDivisionError

    model.run_with_cache(TOKENS)
    model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_z", lambda v, hook: 0 * v)])
    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mixer.hook_phi", fail), ("hook_embed", lambda v, hook: v)])
    cs.phi(model, TOKENS, 0)
    assert listeners(model) == 0
    assert torch.equal(model(TOKENS), before)


@pytest.mark.parametrize("layer", [0, 1])
def test_an_edit_of_phi_reaches_the_logits_from_its_destination_on_and_no_others(layer, model):
    name, row, dest = f"blocks.{layer}.mixer.hook_phi", 1, 4

    def edit(phi, hook):
        phi = phi.clone()
        phi[row, 0, dest, 2] += 0.7
        return phi

    before = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda v, hook: v)])
    after = model.run_with_hooks(TOKENS, fwd_hooks=[(name, edit)])
    moved = (after != before).any(-1)
    expected = torch.zeros_like(moved)
    expected[row, dest:] = True
    if layer == 1:  # nothing mixes positions after the last mixer
        expected[row, dest + 1 :] = False
    assert torch.equal(moved, expected)


def test_knocking_a_head_out_in_phi_is_zeroing_its_z(model):
    def zero_rows(phi, hook):
        phi = phi.clone()
        phi[:, 1] = 0
        return phi

    def zero_z(z, hook):
        z = z.clone()
        z[:, :, 1] = 0
        return z

    by_phi = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mixer.hook_phi", zero_rows)])
    by_z = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mixer.hook_z", zero_z)])
    torch.testing.assert_close(by_phi, by_z, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "rope", "alibi"])
def test_asking_for_phi_does_not_change_the_logits(positions):
    model = build(positions=positions)
    fused = model(TOKENS)
    materialized, _ = model.run_with_cache(TOKENS, names_filter=lambda n: n.endswith("hook_phi"))
    assert (materialized - fused).abs().max() <= 1e-4 * fused.abs().max()


def test_the_contract_holds_on_trained_weights():
    torch.manual_seed(0)
    task = cs.task("mqar", length=16, pairs=2, vocab_size=16)
    model = cs.model(d_model=32, n_heads=2, vocab_size=16, max_length=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        where, labels = (batch := task.batch(step, size=64)).labelled()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.tokens, at=where), labels).backward()
        optimizer.step()
    tokens = task.batch(0, split="test", size=16).tokens
    captured = []
    for hooks in ([], [("blocks.0.mixer.hook_phi", lambda v, hook: v)]):
        model.run_with_hooks(
            tokens, fwd_hooks=[*hooks, ("blocks.0.mixer.hook_z", lambda v, hook: captured.append(v.detach()))]
        )
    fused, materialized = captured
    assert (materialized - fused).abs().max() <= 1e-5 * fused.abs().max()


def test_gradients_reach_phi_in_the_middle_of_a_model():
    model = build(n_layers=2).double()
    name = "blocks.0.mixer.hook_phi"
    found = []

    def keep(phi, hook):
        phi.retain_grad()
        found.append(phi)

    def loss_with(delta):
        def edit(phi, hook):
            phi = phi.clone()
            phi[1, 0, 6, 3] += delta
            return phi

        return model.run_with_hooks(TOKENS, fwd_hooks=[(name, edit)]).pow(2).mean()

    model.run_with_hooks(TOKENS, fwd_hooks=[(name, keep)]).pow(2).mean().backward()
    with torch.no_grad():
        slope = (loss_with(1e-5) - loss_with(-1e-5)) / 2e-5
    assert found[0].grad[1, 0, 6, 3].item() == pytest.approx(slope.item(), rel=1e-5)


def test_backward_hooks_see_the_gradient_at_phi():
    model = build()
    seen = []
    with model.hooks(bwd_hooks=[("blocks.0.mixer.hook_phi", lambda grad, hook: seen.append(grad))]):
        model(TOKENS).pow(2).mean().backward()
    assert len(seen) == 1
    grad = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert grad.shape == (BATCH, HEADS, LENGTH, LENGTH)
    assert grad.abs().max() > 0


def test_the_norms_scale_hook_changes_nothing_and_can_be_frozen(model):
    plain = model(TOKENS)
    _, cache = model.run_with_cache(TOKENS, names_filter="ln_final.hook_scale")
    resid = model.run_with_cache(TOKENS, names_filter="blocks.1.hook_resid_post")[1]["resid_post", 1]
    expected = (resid.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(cache["ln_final.hook_scale"], expected)
    same = model.run_with_hooks(TOKENS, fwd_hooks=[("ln_final.hook_scale", lambda v, hook: v)])
    torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-4)
    halved = model.run_with_hooks(TOKENS, fwd_hooks=[("ln_final.hook_scale", lambda v, hook: 2 * v)])
    centred = plain - model.ln_final.bias @ model.W_U
    torch.testing.assert_close(halved - model.ln_final.bias @ model.W_U, centred / 2, rtol=1e-3, atol=1e-3)


def test_with_chosen_positions_hooks_after_the_last_mixer_see_those_alone(model):
    at = torch.tensor([3, 17])
    _, cache = model.run_with_cache(TOKENS, at=at)
    assert cache["resid_pre", 1].shape == (BATCH, LENGTH, WIDTH)
    assert cache["resid_post", 1].shape == (2, WIDTH)
    assert cache["ln_final.hook_normalized"].shape == (2, WIDTH)


def test_a_batch_of_one_can_drop_its_batch_dimension(model):
    _, cache = model.run_with_cache(TOKENS[:1], remove_batch_dim=True)
    assert cache["z", 0].shape == (LENGTH, HEADS, WIDTH // HEADS)
    assert not cache.has_batch_dim


def test_tokens_may_be_given_as_lists(model):
    assert torch.equal(model.to_tokens(TOKENS.tolist()), TOKENS)
    assert model.to_tokens([1, 2, 3]).shape == (1, 3)


@pytest.mark.parametrize("given", [lambda t: t.numpy(), lambda t: t.tolist(), lambda t: t.to(torch.int32)])
def test_tokens_in_any_form_give_the_same_logits(model, given):
    assert torch.equal(model(given(TOKENS)), model(TOKENS))


def test_one_sequence_is_a_batch_of_one(model):
    logits, cache = model.run_with_cache(TOKENS[0])
    assert logits.shape == (1, LENGTH, VOCAB)
    assert cache["z", 0].shape == (1, LENGTH, HEADS, WIDTH // HEADS)
    assert torch.equal(model(TOKENS[0]), model(TOKENS[:1]))
    assert model.reading(TOKENS[0], 1).batch == 1
    assert {m.matrix.shape[0] for m in cs.analysis.matrices(model, TOKENS[0])} == {1}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS[None], r"expected token numbers \[batch, pos\].* shape \[1, 3, 10\] and type int64"),
        (TOKENS.float(), r"expected token numbers \[batch, pos\].* type float32"),
        ("some text", r"expected token numbers \[batch, pos\], such as batch.tokens, got 'some text'"),
        (TOKENS + 20, r"^token \d\d, but the model has tokens 0 to 22$"),
        (TOKENS - 23, r"^token -\d+, but the model has tokens 0 to 22$"),
    ],
)
def test_what_is_no_token_is_refused_in_one_line(model, tokens, message):
    with pytest.raises(cs.UserError, match=message):
        model(tokens)


@pytest.mark.usefixtures("without_type_checks")
def test_a_batch_where_tokens_are_meant_is_refused_in_one_line(model):
    batch = cs.task("mqar", length=8, pairs=1, vocab_size=VOCAB).batch(0, size=2)
    with pytest.raises(cs.UserError, match=r"^expected token numbers .*, such as batch.tokens, got Batch\("):
        model(batch)


def test_sizes_by_transformer_lens_names_are_those_of_the_model(model):
    cfg = model.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.d_model) == (2, HEADS, WIDTH // HEADS, WIDTH)
    assert (cfg.d_vocab, cfg.n_ctx, cfg.d_mlp, cfg.attn_only) == (VOCAB, LENGTH, 4 * WIDTH, False)
    assert cfg.device == torch.device("cpu")
    assert build(state_mixer="none").cfg.attn_only
