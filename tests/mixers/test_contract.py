"""Every mixer, in every shape of its own, keeps the contract. What is particular to a mixer is in its own file."""

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from contract import (
    briefly_trained,
    check_conv_hooks,
    check_edit_in_place,
    check_edit_one_entry,
    check_factors,
    check_factors_as_hooked,
    check_fused_path_builds_nothing,
    check_gradient_through_phi,
    check_lower_triangular,
    check_phi_identity,
    check_products,
    check_protocol,
    check_skip,
    check_state_beside_phi,
    check_state_gradients,
    check_state_hook,
    check_state_is_the_hooked_one,
    check_state_read,
    check_state_size,
    check_steps,
    check_transition,
    conv_hooks,
    hook_points,
    hooked,
    identity,
    in_steps,
    run,
    shaken,
    stream,
)

import circuitscope as cs
from circuitscope import mixers
from circuitscope.errors import UserError
from circuitscope.mixers import Mixer, MixerConfig, Reading, build_mixer, mixer_config
from circuitscope.mixers.reading import DeltaTransition, GatedTransition

D_MODEL = 16


class Case(NamedTuple):
    """A mixer; and how far back something that `hook_state` does not hold (a conv, a shift) looks."""

    config: MixerConfig
    reach: int = 0
    positions: str = "none"


def case(name: str, reach: int = 0, positions: str = "none", **options: Any) -> Case:
    return Case(mixer_config({"name": name, **options}), reach, positions)


CASES = {
    "attention": case("attention", n_heads=2),
    "attention, rope": case("attention", n_heads=4, positions="rope"),
    "attention, alibi": case("attention", positions="alibi", n_heads=2),
    # rope, because without it softmax does not see the bias of the conv on K
    "attention, convs": case("attention", n_heads=2, conv_on="qkv", positions="rope"),
    "attention, conv and SiLU on V": case("attention", conv_on="v", conv_activation=True, conv_width=3),
    "attention, centred convs": case("attention", n_heads=2, conv_on="qkv", conv_mode="centred", positions="rope"),
    "attention, centred conv and SiLU on V": case(
        "attention", conv_on="v", conv_mode="centred", conv_activation=True, conv_width=3
    ),
    "based": case("based", n_heads=2, feature_dim=4),
    "based, window, head_dim": case("based", n_heads=3, feature_dim=3, head_dim=5, window=5),
    "gated_conv": case("gated_conv"),
    "gated_conv, wide": case("gated_conv", conv_width=20),
    "deltanet": case("deltanet", 3),
    "deltanet, beta to 2": case("deltanet", 3, n_heads=2, allow_neg_eigval=True),
    "gated_deltanet": case("gated_deltanet", 3),
    "gated_deltanet, odd": case("gated_deltanet", 2, n_heads=3, d_key=5, d_value=7, conv_width=3),
    "deltanet, rope": case("deltanet", 3, n_heads=2, rotary=True, positions="rope"),
    "gated_deltanet, rope": case("gated_deltanet", 3, rotary=True, positions="rope"),
    "gated_deltanet, floor and cap": case("gated_deltanet", 3, n_heads=2, decay_floor=0.6, beta_max=0.5),
    "h3": case("h3", 63),
    "h3, short shift": case("h3", 3, d_state=4),
    "h3, heads of two": case("h3", 3, d_state=4, head_dim=2),
    "hyena": case("hyena"),
    "hyena, odd": case("hyena", l_max=40, conv_width=4, filter_bands=3, filter_width=8, filter_layers=0, frequency=5.0),
    "mamba": case("mamba", 3),
    "mamba, no conv": case("mamba", conv=False),
    "mamba, no gate": case("mamba", 3, gate=False),
    "mamba, bare": case("mamba", conv=False, activation=False, gate=False),
    "mamba, odd": case("mamba", 2, d_state=5, conv_width=3, expand=3, dt_rank=2),
    "mamba, rope": case("mamba", 3, rotary=True, positions="rope"),
    "mamba2, rope": case("mamba2", 2, headdim=4, n_groups=2, d_state=6, conv_width=3, rotary=True, positions="rope"),
    "mamba2, one head": case("mamba2", 3, headdim=32, d_state=16),
    "mamba2, heads": case("mamba2", 3, headdim=8, d_state=12),
    "mamba2, groups": case("mamba2", 2, headdim=4, n_groups=2, d_state=5, conv_width=3),
    "mamba2, channels": case("mamba2", 3, headdim=1, d_state=3),
    "rwkv": case("rwkv", 1),
    "s4": case("s4"),
    "s4, one state": case("s4", d_state=2),
    "s4_mamba": case("s4_mamba", 3),
    "s4_mamba, no conv": case("s4_mamba", conv=False),
    "s4_mamba, no gate": case("s4_mamba", 2, gate=False, d_state=4, conv_width=3),
    "s6": case("s6"),
    "s6, odd": case("s6", d_state=3, dt_rank=5),
    "s6, rope": case("s6", d_state=4, rotary=True, positions="rope"),
}
WITHOUT_PHI = {"lstm": case("lstm"), "lstm, wide": case("lstm", d_hidden=21)}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config, _, positions = {**CASES, **WITHOUT_PHI}[name]
    return shaken(build_mixer(config, D_MODEL, positions).to(dtype))


def having(hook: str) -> list[str]:
    return [name for name in CASES if hasattr(build(name), hook)]


def reading(name: str) -> Reading:
    return build(name).reading(stream(3, D_MODEL))


each = pytest.mark.parametrize("name", CASES)
AHEAD = [name for name, one in CASES.items() if one.config.sees_ahead]
with_steps = pytest.mark.parametrize("name", [name for name in {**CASES, **WITHOUT_PHI} if name not in AHEAD])
with_conv = pytest.mark.parametrize("name", [name for name in CASES if conv_hooks(build(name))])
with_state = pytest.mark.parametrize("name", having("hook_state"))
read_by_a_vector = [name for name in having("hook_state") if reading(name).state.by]
# at 256 positions the float64 references are slow, and one sequence will do
SIZES = [
    (length, batch, dtype)
    for length in (1, 2, 17, 256)
    for dtype in (torch.float32, torch.float64)
    for batch in ((1,) if (length, dtype) == (256, torch.float64) else (1, 3))
]
both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def mixer_input(model: cs.HookedLM, tokens: torch.Tensor, layer: int) -> torch.Tensor:
    return model.layers[layer].mixer_input(model.stream_before(tokens, layer)).detach()


def test_every_mixer_is_here_and_has_a_state_where_it_is_finite():
    assert {c.config.name for c in {**CASES, **WITHOUT_PHI}.values()} == set(mixers.names())
    recurrent = {"mamba", "s6", "s4_mamba", "mamba2", "deltanet", "gated_deltanet", "rwkv", "s4", "h3"}
    assert {CASES[name].config.name for name in having("hook_state")} == recurrent
    assert {CASES[name].config.name for name in CASES if reading(name).state is not None} == recurrent
    by = {"mamba", "s6", "mamba2", "deltanet", "gated_deltanet"}
    assert {CASES[name].config.name for name in read_by_a_vector} == by


def test_the_protocol_fits_on_one_screen():
    assert len(inspect.getsource(Mixer).splitlines()) <= 40


@each
def test_it_is_a_mixer_that_builds_phi_only_on_demand(name):
    check_protocol(build(name), stream(9, D_MODEL))
    check_fused_path_builds_nothing(build(name), stream(9, D_MODEL))


@pytest.mark.parametrize(("length", "batch", "dtype"), SIZES)
@each
def test_phi_times_v_is_the_fused_output(name, length, batch, dtype):
    mixer, x = build(name, dtype), stream(length, D_MODEL, batch, dtype)
    check_phi_identity(mixer, x)
    check_lower_triangular(mixer, x)


@each
def test_the_contract_holds_on_trained_weights(name):
    config, reach, positions = CASES[name]
    model, tokens = briefly_trained(config, positions)
    for dtype in (torch.float32, torch.float64):
        mixer, x = model.to(dtype).layers[0].mixer, mixer_input(model, tokens, 0)
        check_phi_identity(mixer, x)
        check_edit_one_entry(mixer, x)
        check_factors(mixer, x)
        check_products(mixer, x)
        check_conv_hooks(mixer, x)
        if hasattr(mixer, "hook_state") and 2 * reach < x.shape[1]:
            check_state_hook(mixer, x, reach)
    check_phi_identity(model.float().layers[0].mixer, stream(256, D_MODEL, 1))


@pytest.mark.parametrize("length", [1, 2, 17])
@each
def test_one_entry_of_phi_moves_one_row(name, length):
    check_edit_one_entry(build(name), stream(length, D_MODEL, 3))


@pytest.mark.parametrize("length", [1, 7])
@each
def test_hooks_may_write_in_place(name, length):
    check_edit_in_place(build(name), stream(length, D_MODEL, 3))


@each
def test_gradients_flow_through_phi(name):
    check_gradient_through_phi(build(name, torch.float64), stream(9, D_MODEL, 2, torch.float64))


@both_precisions
@pytest.mark.parametrize("length", [1, 2, 17])
@with_conv
def test_the_matrix_of_the_conv_can_be_edited(name, length, dtype):
    check_conv_hooks(build(name, dtype), stream(length, D_MODEL, 3, dtype))


@both_precisions
@with_state
def test_a_state_written_at_t_speaks_for_the_past(name, dtype):
    reach = CASES[name].reach
    for length in {2 * reach + 1, max(17, 2 * reach + 2)}:
        check_state_hook(build(name, dtype), stream(length, D_MODEL, 3, dtype), reach)


@with_state
def test_state_and_phi_can_be_hooked_at_once(name):
    check_state_beside_phi(build(name), stream(7, D_MODEL, 3))


@both_precisions
@with_steps
def test_steps_from_a_state_give_what_the_whole_gives(name, dtype):
    check_steps(build(name, dtype), stream(9, D_MODEL, 3, dtype))


@with_steps
def test_a_state_is_as_large_as_the_mixer_says(name):
    mixer = build(name)
    check_state_size(mixer, stream(9, D_MODEL, 2))
    assert (mixer.state_size is None) == (CASES.get(name, WITHOUT_PHI["lstm"]).config.name in {"attention", "hyena"})


@both_precisions
@with_state
def test_a_state_holds_what_its_hook_carries(name, dtype):
    check_state_is_the_hooked_one(build(name, dtype), stream(9, D_MODEL, 2, dtype))


@with_steps
def test_steps_in_bfloat16_round_and_no_more_and_keep_the_types_of_the_state(name):
    mixer, x = build(name), stream(9, D_MODEL)
    want = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, state = in_steps(mixer, x, 1, 1, 7)
    assert float((got - want).detach().abs().max()) <= 0.05 * float(want.detach().abs().max())
    assert {n: part.dtype for n, part in state.parts.items()} == {n: p.dtype for n, p in mixer.start(1).parts.items()}


@with_steps
def test_a_batch_of_none_steps_as_none(name):
    x = stream(5, D_MODEL, 0)
    out, state = in_steps(build(name), x, 1, 4)
    assert out.shape == x.shape
    assert state.position == 5


@with_steps
def test_gradients_flow_into_a_state_and_out_of_it(name):
    check_state_gradients(build(name, torch.float64), stream(7, D_MODEL, 2, torch.float64))


@with_steps
def test_a_step_fires_the_hooks_of_its_positions_and_refuses_those_of_the_whole(name):
    mixer, x = build(name), stream(4, D_MODEL, 2)
    for hook, point in hook_points(mixer).items():
        fired: list[torch.Tensor] = []
        with hooked(mixer, **{hook: lambda value, fired=fired: fired.append(value)}):
            if "src" in point.axes or point.on_demand:
                with pytest.raises(UserError, match=f"{hook} cannot act on a recurrent step"):
                    mixer.step(x, mixer.start(2))
            else:
                mixer.step(x, mixer.start(2))
                assert [value.shape[:2] for value in fired] == [(2, 4)], hook


@pytest.mark.parametrize("name", AHEAD)
def test_a_mixer_that_reads_later_positions_has_no_state(name):
    with pytest.raises(UserError, match=r"needs a causal layer, and this one's centred conv reads \d positions ahead"):
        build(name).start(2)


@pytest.mark.parametrize("length", [1, 11])
@each
def test_the_reading_is_of_the_mixer_in_slices_as_whole(name, length):
    mixer, x = build(name, torch.float64), stream(length, D_MODEL, 2, torch.float64)
    check_factors(mixer, x)
    check_products(mixer, x)
    check_skip(mixer, x)


@each
def test_a_mixer_has_a_transition_or_says_why_not(name):
    found = reading(name).transition
    assert isinstance(found, GatedTransition | DeltaTransition) == (name in having("hook_state"))
    assert not isinstance(found, str) or " " in found


@pytest.mark.parametrize("name", [n for n in having("hook_state") if CASES[n].config.name != "rwkv"])
def test_the_transition_is_that_of_the_recurrence(name):
    """RWKV's output is a quotient of states: its transition is looked at in its own file."""
    check_transition(build(name, torch.float64), stream(9, D_MODEL, 2, torch.float64))


@pytest.mark.parametrize("name", read_by_a_vector)
def test_what_is_read_of_the_states_and_the_skip_term_are_z(name):
    check_state_read(build(name, torch.float64), stream(9, D_MODEL, 2, torch.float64))


@each
def test_factors_are_those_of_the_hooked_mixer(name):
    check_factors_as_hooked(build(name, torch.float64), stream(11, D_MODEL, 2, torch.float64))


@each
def test_a_batch_of_none_is_none(name):
    mixer = build(name)
    for hook in ("", "hook_phi", *conv_hooks(mixer), "hook_state"):
        if not hook or hasattr(mixer, hook):
            x = stream(5, D_MODEL, 0).requires_grad_()
            out, _ = run(mixer, x, **({hook: identity} if hook else {}))
            out.sum().backward()
            assert out.shape == x.shape == x.grad.shape


@each
def test_bfloat16_autocast_rounds_and_no_more(name):
    """5 % of the largest output: bfloat16 keeps 8 bits."""
    mixer, x = build(name), stream(9, D_MODEL)
    want = mixer(x)
    for edits in ({}, {"hook_phi": identity}):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, _ = run(mixer, x, **edits)
        got.float().sum().backward()
        assert float((got - want).detach().abs().max()) <= 0.05 * float(want.detach().abs().max())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())


# -- presets ------------------------------------------------------------------------------------------


@pytest.fixture(params=cs.models.names())
def preset(request) -> tuple[cs.HookedLM, torch.Tensor]:
    model = cs.model(request.param, d_model=32, vocab_size=9, max_length=7).eval()
    return model, torch.randint(9, (2, 7), generator=torch.Generator().manual_seed(0))


def test_every_hook_of_a_preset_names_the_axes_of_what_it_carries(preset):
    """A name stands for one size wherever it is used in a layer."""
    model, tokens = preset
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: True)
    assert set(cache) >= {name for name in model.hook_dict if not name.endswith("hook_attn_scores")}
    known = {"batch": 2, "pos": 7, "dest": 7, "src": 7, "d_model": 32, "scale": 1}
    sizes: dict[str, dict[str, int]] = {}
    for name, value in cache.items():
        axes = model.hook_dict[name].axes
        assert value.ndim == len(axes), name
        of_layer = sizes.setdefault(name.rsplit(".", 1)[0], dict(known))
        for axis, size in zip(axes, value.shape, strict=True):
            assert of_layer.setdefault(axis, size) == size, f"{axis} of {name}"


def test_every_layer_of_a_preset_reads_as_it_mixes(preset):
    model, tokens = preset
    for layer in {config: i for i, config in enumerate(model.config.mixers)}.values():
        mixer = model.layers[layer].mixer
        assert isinstance(mixer, Mixer)
        x = mixer_input(model, tokens, layer)
        if not hasattr(mixer, "hook_phi"):
            assert mixer.reading(x).no_phi
            continue
        check_factors(mixer, x)
        check_products(mixer, x)
        assert model.on_demand >= {
            f"blocks.{layer}.mixer.{name}"
            for name, point in hook_points(mixer).items()
            if "channel dest" in " ".join(point.axes)
        }
