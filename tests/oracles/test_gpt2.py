"""transformers' GPT-2 with the same weights gives the same logits, hidden states and patterns."""

import pytest
import torch

import circuitscope as cs

transformers = pytest.importorskip("transformers")


def pair_of_models(n_heads: int, n_layers: int = 2, width: int = 32, dtype=torch.float64):
    """A random GPT-2 and a HookedLM that holds its weights."""
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=20,
        n_embd=width,
        n_layer=n_layers,
        n_head=n_heads,
        activation_function="gelu",
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(n_heads)
        gpt2 = transformers.GPT2LMHeadModel(config).to(dtype).eval()
        with torch.no_grad():
            for p in gpt2.parameters():
                p.add_(0.1 * torch.randn_like(p))
    ours = cs.model(d_model=width, n_layers=n_layers, n_heads=n_heads, vocab_size=50, max_length=20).to(dtype).eval()
    theirs = gpt2.transformer
    state = {"embed.weight": theirs.wte.weight, "pos_embed": theirs.wpe.weight}
    state |= {f"ln_final.{n}": p for n, p in theirs.ln_f.named_parameters()}
    for i, block in enumerate(theirs.h):
        linears = {
            "mixer.qkv": block.attn.c_attn,
            "mixer.out": block.attn.c_proj,
            "mlp.into": block.mlp.c_fc,
            "mlp.out": block.mlp.c_proj,
        }
        for name, conv in linears.items():  # GPT-2 stores [in, out]
            state[f"blocks.{i}.{name}.weight"], state[f"blocks.{i}.{name}.bias"] = conv.weight.T, conv.bias
        for name, norm in {"ln1": block.ln_1, "ln2": block.ln_2}.items():
            state[f"blocks.{i}.{name}.weight"], state[f"blocks.{i}.{name}.bias"] = norm.weight, norm.bias
    ours.load_state_dict(state)
    return ours, gpt2


@pytest.mark.parametrize("n_heads", [1, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_logits_are_those_of_gpt2(n_heads, dtype, tolerance):
    ours, gpt2 = pair_of_models(n_heads, dtype=dtype)
    tokens = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = gpt2(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= tolerance * expected.abs().max()


def test_residual_stream_and_patterns_are_those_of_gpt2():
    ours, gpt2 = pair_of_models(4)
    tokens = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = gpt2(tokens, output_hidden_states=True, output_attentions=True)
        _, cache = ours.run_with_cache(tokens)
    for i in range(2):
        torch.testing.assert_close(cache["resid_pre", i], theirs.hidden_states[i], rtol=0, atol=1e-11)
        torch.testing.assert_close(cache["phi", i, "mixer"], theirs.attentions[i], rtol=0, atol=1e-11)
    torch.testing.assert_close(cache["ln_final.hook_normalized"], theirs.hidden_states[2], rtol=0, atol=1e-11)


def test_gradients_are_those_of_gpt2():
    ours, gpt2 = pair_of_models(2)
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2))
    for model in (lambda t: ours(t), lambda t: gpt2(t).logits):
        model(tokens).log_softmax(-1)[..., 3].mean().backward()
    torch.testing.assert_close(ours.embed.weight.grad, gpt2.transformer.wte.weight.grad, rtol=1e-8, atol=1e-11)
    for mine, theirs in zip(ours.blocks, gpt2.transformer.h, strict=True):
        torch.testing.assert_close(mine.mixer.qkv.weight.grad, theirs.attn.c_attn.weight.grad.T, rtol=1e-8, atol=1e-11)
