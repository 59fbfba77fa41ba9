"""The contract of mixers as checks any mixer can be put through: a mixer module and its input in, assertions out.

`mixer` is a built module, `x` [batch, pos, d_model] in the mixer's dtype. Checks compare a run with an
identity hook, never the fused path, wherever bits must not change. test_contract puts every mixer through all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import circuitscope as cs
from circuitscope.analysis.decay.lag_profile import profile_by_sequence
from circuitscope.config.train import TrainConfig
from circuitscope.lens import HookPoint
from circuitscope.mixers import Mixer, MixerConfig
from circuitscope.mixers.reading import DeltaTransition, GatedTransition, Product, Reading
from circuitscope.models.config import ModelConfig
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.training.optimizer import make_optimizer

Edit = Callable[[Tensor], Tensor | None]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # of the largest entry
AROUND = {"hook_v", "hook_phi", "hook_state", "hook_z"}  # the product; factors are what stands before it


# -- modules, inputs, runs ----------------------------------------------------------------------------


def stream(length: int, d_model: int, batch: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What a mixer reads: the normalized residual stream."""
    return torch.randn(batch, length, d_model, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def shaken(mixer: nn.Module, by: float = 0.1, seed: int = 0) -> Any:
    """The mixer with noise on every parameter, so that none is a constant, in eval mode."""
    r = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=r, dtype=torch.float64).to(parameter.dtype))
    return mixer.eval()


def briefly_trained(config: MixerConfig, positions: str = "none", steps: int = 30) -> tuple[HookedLM, Tensor]:
    """A 1-layer model of width 16 after `steps` of AdamW on MQAR, and tokens it has not seen."""
    task = cs.task("mqar", length=32, pairs=4, vocab_size=64)
    shape = {"mixers": [config], "n_layers": 1, "d_model": 16, "vocab_size": 64, "max_length": 32}
    model = HookedLM(ModelConfig.model_validate(shape | {"positions": positions}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        batch = task.batch(step, size=16)
        where, labels = batch.labelled()
        loss = F.cross_entropy(model(batch.tokens, where), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), task.batch(0, split="test", size=3).tokens


def identity(value: Tensor) -> Tensor:
    """A hook that asks for a path and changes nothing."""
    return value


@contextmanager
def hooked(mixer: Any, **edits: Edit) -> Iterator[None]:
    """With edits at named hooks."""
    handles = [getattr(mixer, n).register_forward_hook(lambda m, a, out, e=e: e(out)) for n, e in edits.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run(mixer: Any, x: Tensor, **edits: Edit) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and what passed hook_v, hook_z and what holds the output of a conv, with edits at named hooks."""
    seen: dict[str, Tensor] = {}
    watched = [name for name in hook_points(mixer) if name in ("hook_v", "hook_z") or name.startswith("hook_conv")]
    with (
        hooked(mixer, **edits),
        hooked(mixer, **{n: lambda out, n=n: seen.update({n[5:]: out}) for n in watched}),
    ):
        return mixer(x), seen


def seen_at(mixer: Any, x: Tensor, hook: str) -> Tensor:
    """What one hook carries, without gradients."""
    kept: list[Tensor] = []
    with torch.no_grad():
        run(mixer, x, **{hook: lambda value: kept.append(value.clone())})
    assert kept, f"{hook} did not fire"
    return kept[0]


def hook_points(mixer: nn.Module) -> dict[str, Any]:
    """The mixer's hooks by name."""
    return {name: point for name, point in mixer.named_children() if isinstance(point, HookPoint)}


def conv_hooks(mixer: nn.Module) -> list[str]:
    """The names of the mixer's hooks that carry the matrix of a conv or shift."""
    return [name for name in hook_points(mixer) if name.startswith("hook_phi_conv")]


def whole(product: Product, batch: int, skip: bool = True) -> Tensor:
    """A mixing matrix of all units, with the whole batch axis."""
    return product.build(slice(0, product.size), skip).expand(batch, -1, -1, -1)


def built(mixer: Any, x: Tensor) -> dict[str, Tensor]:
    """What each factor of the mixer's reading builds for all units, by name."""
    return {factor.name: factor.build(slice(0, factor.size)) for factor in mixer.reading(x).factors}


def exempt_from_decay(mixer: nn.Module) -> set[str]:
    """Names of the parameters that the package's optimizer spares."""
    groups = make_optimizer(mixer, TrainConfig(weight_decay=0.1)).param_groups
    spared = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    return {name for name, p in mixer.named_parameters() if id(p) in spared}


def assert_close(got: Tensor, want: Tensor, tolerance: float | None = None, what: str = "") -> None:
    """max|got − want| ≤ tolerance · max|want|."""
    tolerance = TOLERANCE[want.dtype] if tolerance is None else tolerance
    error = float((got - want).detach().abs().max())
    assert error <= tolerance * float(want.detach().abs().max()), f"{what}: {error:.3g}, largest {want.abs().max():.3g}"


# -- Φ ------------------------------------------------------------------------------------------------


def check_protocol(mixer: Any, x: Tensor) -> None:
    """The attributes and hooks of a mixer, with the shapes the contract gives them."""
    assert isinstance(mixer, Mixer)
    assert isinstance(mixer.out, nn.Linear)
    heads = (*x.shape[:2], mixer.n_heads, mixer.d_head)
    out, seen = run(mixer, x)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert seen["v"].shape == heads
    assert seen["z"].shape == heads
    assert mixer.reading(x).core.size == mixer.n_heads
    assert mixer.mixing_flops(x.shape[1]) > 0


def check_fused_path_builds_nothing(mixer: Any, x: Tensor) -> None:
    """Without a listener neither Φ nor what is made on demand is built."""
    fired: list[str] = []
    names = {name for name, point in hook_points(mixer).items() if name == "hook_phi" or point.on_demand}
    originals = {name: getattr(mixer, name).forward for name in names}
    try:
        for name in names:
            getattr(mixer, name).forward = lambda v, n=name: (fired.append(n), originals[n](v))[1]
        mixer(x)
        assert fired == []
        run(mixer, x, hook_phi=identity)
        assert fired == ["hook_phi"]
    finally:
        for name in names:
            del getattr(mixer, name).forward


def check_phi_identity(mixer: Any, x: Tensor, tolerance: float | None = None) -> None:
    """Φ·v is the fused z, and the output by either path is the same."""
    with torch.no_grad():
        fused_out, fused = run(mixer, x)
        out, seen = run(mixer, x, hook_phi=identity)
    assert torch.equal(seen["v"], fused["v"])
    assert_close(seen["z"], fused["z"], tolerance, "z")
    assert_close(out, fused_out, tolerance, "output")


def check_lower_triangular(mixer: Any, x: Tensor) -> None:
    """Φ is [batch, head, dest, src] and zero above the diagonal."""
    phi = seen_at(mixer, x, "hook_phi")
    assert phi.shape == (x.shape[0], mixer.n_heads, x.shape[1], x.shape[1])
    assert (phi.triu(1) == 0).all()
    assert phi.isfinite().all()


def check_edit_one_entry(mixer: Any, x: Tensor, by: float = 0.7) -> None:
    """Φ[b, h, i, j] + by moves row i of head h of z by `by` · v[b, j, h], and the output at (b, i): nothing else."""
    batch, length, last = len(x), x.shape[1], mixer.n_heads - 1
    entries = {(batch - 1, last, length - 1, 0), (0, last // 2, length // 2, length // 4), (0, 0, 0, 0)}
    with torch.no_grad():
        before_out, before = run(mixer, x, hook_phi=identity)
        for b, h, i, j in sorted(entries):

            def edit(phi: Tensor, at: tuple[int, ...] = (b, h, i, j)) -> Tensor:
                phi = phi.clone()
                phi[at] += by
                return phi

            after_out, after = run(mixer, x, hook_phi=edit)
            touched = torch.zeros(before["z"].shape[:3], dtype=torch.bool)
            touched[b, i, h] = True
            assert torch.equal(after["z"][~touched], before["z"][~touched])
            moved = (after["z"] - before["z"])[b, i, h]
            want = by * before["v"][b, j, h]
            slack = 4 * torch.finfo(x.dtype).eps * float(after["z"][b, i, h].abs().max() + want.abs().max())
            assert float((moved - want).abs().max()) <= slack
            others = torch.ones(x.shape[:2], dtype=torch.bool)
            others[b, i] = False
            assert torch.equal(after_out[others], before_out[others])
            assert not torch.equal(after_out[b, i], before_out[b, i])


def check_edit_in_place(mixer: Any, x: Tensor) -> None:
    """A hook that writes into its value and returns nothing does what one that returns an edited copy does.

    To the bit, in the gradients too; and it writes into nothing that outlives the run.
    """
    leaves = list(mixer.parameters())
    for hook in ("hook_phi", *conv_hooks(mixer), "hook_state"):
        if not hasattr(mixer, hook):
            continue
        start = seen_at(mixer, x, hook)
        at = (0, -1) if hook == "hook_state" else (0, 0, -1, 0)

        def copied(value: Tensor, at: tuple[int, ...] = at) -> Tensor:
            value = value.clone()
            value[at] += 1
            return value

        def written(value: Tensor, at: tuple[int, ...] = at) -> None:
            value[at] += 1

        (want, seen_want), (got, seen_got) = (run(mixer, x, **{hook: edit}) for edit in (copied, written))
        assert torch.equal(seen_got["z"], seen_want["z"]), f"{hook}: {list(start.shape)} written in place"
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True) for out in (want, got)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), f"gradients through {hook}"
        assert torch.equal(seen_at(mixer, x, hook), start)


def check_gradient_through_phi(mixer: Any, x: Tensor, entries: int = 4) -> None:
    """float64: the gradient at Φ matches finite differences; parameters and input get the fused path's gradients."""
    assert x.dtype == torch.float64, "finite differences want float64"
    r = torch.Generator().manual_seed(1)
    weights = torch.randn(x.shape, generator=r, dtype=x.dtype)
    phi = seen_at(mixer, x, "hook_phi").contiguous().requires_grad_()

    def loss(value: Tensor) -> Tensor:
        return (run(mixer, x, hook_phi=lambda _: value)[0] * weights).sum()

    (gradient,) = torch.autograd.grad(loss(phi), phi)
    for _ in range(entries):
        dest = int(torch.randint(x.shape[1], (), generator=r))
        at = (
            int(torch.randint(x.shape[0], (), generator=r)),
            int(torch.randint(mixer.n_heads, (), generator=r)),
            dest,
            int(torch.randint(dest + 1, (), generator=r)),
        )
        step = torch.zeros_like(phi)
        step[at] = 1e-5
        with torch.no_grad():
            slope = float(loss(phi + step) - loss(phi - step)) / 2e-5
        assert abs(slope - float(gradient[at])) <= 1e-6 * float(gradient.abs().max())

    x = x.detach().requires_grad_()
    leaves = dict(mixer.named_parameters()) | {"x": x}
    fused, through = (
        torch.autograd.grad((run(mixer, x, **edits)[0] * weights).sum(), list(leaves.values()), allow_unused=True)
        for edits in ({}, {"hook_phi": identity})
    )
    for name, want, got in zip(leaves, fused, through, strict=True):
        assert want is not None, f"no gradient at {name}"
        assert got is not None, f"no gradient at {name} through Φ"
        slack = 1e-9 * max(float(want.abs().max()), 1e-6)
        assert float((got - want).abs().max()) <= slack, f"gradient at {name}"


# -- the conv and the state ---------------------------------------------------------------------------


def check_conv_hooks(mixer: Any, x: Tensor) -> None:
    """Each conv's matrix gives the fused conv; an edit of an entry moves the conv there and reaches the output."""
    for hook in conv_hooks(mixer):
        _check_conv_hook(mixer, x, hook)


def _check_conv_hook(mixer: Any, x: Tensor, hook: str) -> None:
    matrix = seen_at(mixer, x, hook)
    channels, gives = matrix.shape[1], hook.replace("hook_phi_", "")
    assert matrix.shape == (x.shape[0], channels, x.shape[1], x.shape[1])
    reading = mixer.reading(x)
    (factor,) = (factor for factor in (*reading.factors, *reading.beside) if factor.hook == hook)
    _check_causal(matrix, factor.causal)
    with torch.no_grad():
        fused_out, fused = run(mixer, x)
        out, seen = run(mixer, x, **{hook: identity})
        for name, want in fused.items():
            assert_close(seen[name], want, what=name)
        assert_close(out, fused_out, what="output")
        b, c, i, j = len(x) - 1, channels // 2, x.shape[1] // 2, x.shape[1] // 4

        def edit(value: Tensor) -> Tensor:
            value = value.clone()
            value[b, c, i, j] += 1
            return value

        # through Φ too: a fused path by FFT leaves rounding before the edit
        out, seen = run(mixer, x, **{hook: identity, "hook_phi": identity})
        edited_out, edited = run(mixer, x, **{hook: edit, "hook_phi": identity})
        if gives in seen:
            touched = torch.zeros(seen[gives].shape, dtype=torch.bool)
            touched[b, i, c] = True
            assert torch.equal(edited[gives][~touched], seen[gives][~touched])
            assert (edited[gives][touched] != seen[gives][touched]).all()
        for after, before in ((edited["z"], seen["z"]), (edited_out, out)):
            untouched = torch.ones(x.shape[:2], dtype=torch.bool)
            untouched[b, i:] = False
            assert torch.equal(after[untouched], before[untouched])
            if factor in reading.factors or x.shape[1] > 1:  # a lone position's weight is 1 whatever its key is
                assert not torch.equal(after[b, i:], before[b, i:])  # where to, a trained pattern may choose


def check_state_hook(mixer: Any, x: Tensor, reach: int = 0) -> None:
    """The state is all that is remembered: readable, writable, and a written one speaks for the past.

    Two sequences that agree after position s part ways only through the state. Writing one's state into
    the other at t = s + reach (`reach` is how far a conv or shift before the values looks back) must
    leave every position before t as it was, bit for bit, and make those after t the other's.
    """
    length = x.shape[1]
    t = length // 2
    s = t - reach
    assert s >= 0, f"reach {reach} asks for a length of at least {2 * reach}, not {length}"
    other = x.clone()
    other[:, : s + 1] = stream(s + 1, x.shape[2], len(x), x.dtype, seed=99)
    donor = seen_at(mixer, other, "hook_state")
    assert donor.shape[:2] == x.shape[:2]

    def write(states: Tensor) -> Tensor:
        states = states.clone()
        states[:, t] = donor[:, t]
        return states

    with torch.no_grad():
        plain_out, plain = run(mixer, x)
        kept_out, kept = run(mixer, x, hook_state=identity)
        assert_close(kept["z"], plain["z"], what="z by the recurrence")
        assert_close(kept_out, plain_out, what="output by the recurrence")
        written_out, written = run(mixer, x, hook_state=write)
        want_out, want = run(mixer, other)
    assert torch.equal(written["z"][:, :t], kept["z"][:, :t])
    assert torch.equal(written_out[:, :t], kept_out[:, :t])
    if t + 1 < length:
        assert not torch.equal(written["z"][:, t + 1 :], kept["z"][:, t + 1 :])
        assert_close(written["z"][:, t + 1 :], want["z"][:, t + 1 :], what="z after the written state")
        assert_close(written_out[:, t + 1 :], want_out[:, t + 1 :], what="output after the written state")


def check_state_beside_phi(mixer: Any, x: Tensor) -> None:
    """With both hooks z is Φ v plus what the edit of the state adds; an identity adds nothing, to the bit."""

    def double(states: Tensor) -> Tensor:
        return torch.cat([states[:, :1], 2 * states[:, 1:2], states[:, 2:]], 1)

    with torch.no_grad():
        by_phi = run(mixer, x, hook_phi=identity)[1]["z"]
        by_state = run(mixer, x, hook_state=identity)[1]["z"]
        assert torch.equal(run(mixer, x, hook_phi=identity, hook_state=identity)[1]["z"], by_phi)
        added = run(mixer, x, hook_state=double)[1]["z"] - by_state
        assert_close(run(mixer, x, hook_phi=identity, hook_state=double)[1]["z"], by_phi + added)


# -- the recurrent step -------------------------------------------------------------------------------


def in_steps(mixer: Any, x: Tensor, *sizes: int) -> tuple[Tensor, Any]:
    """The outputs of so many positions at a time, from the start on, and the state after them."""
    state, out = mixer.start(len(x)), []
    for part in x.split(sizes, dim=1):
        y, state = mixer.step(part, state)
        out.append(y)
    return torch.cat(out, dim=1), state


def check_steps(mixer: Any, x: Tensor) -> None:
    """Steps of one position, and two parts that meet anywhere, give what the mixer gives on the whole."""
    length = x.shape[1]
    with torch.no_grad():
        want = mixer(x)
        got, state = in_steps(mixer, x, *[1] * length)
        assert_close(got, want, what="one position at a time")
        for t in range(1, length):
            got, after = in_steps(mixer, x, t, length - t)
            assert_close(got, want, what=f"parts that meet at {t}")
            for name, part in state.parts.items():
                both = (torch.view_as_real(one + 0j) for one in (after.parts[name], part))
                assert_close(*both, TOLERANCE[x.dtype], name)
    assert state.position == after.position == length


def check_state_size(mixer: Any, x: Tensor) -> None:
    """A finite state never has more numbers than `state_size`; one that grows keeps something of every position."""
    sizes = []
    with torch.no_grad():
        state = mixer.start(len(x))
        for t in range(x.shape[1]):
            _, state = mixer.step(x[:, t : t + 1], state)
            sizes.append(sum(part[0].numel() * (2 if part.is_complex() else 1) for part in state.parts.values()))
            assert all(len(part) == len(x) for part in state.parts.values())
    if mixer.state_size is None:
        assert sizes == sorted(set(sizes))
    else:
        assert sizes[-1] == max(sizes) == mixer.state_size


def check_state_is_the_hooked_one(mixer: Any, x: Tensor) -> None:
    """What `hook_state` carries at the last position is what the state after it holds."""
    shown = seen_at(mixer, x, "hook_state")[:, -1]
    with torch.no_grad():
        parts = list(in_steps(mixer, x, x.shape[1])[1].parts.values())
    scalars = [part for part in parts if part.ndim == 2]  # (num, den, max) are one state of three
    candidates = [*parts, *([torch.stack(scalars, -1)] if len(scalars) == 3 else [])]
    (held,) = (part for part in candidates if part.shape == shown.shape)
    assert_close(held, shown.to(held.dtype), TOLERANCE[x.dtype], "the state at the last position")


def check_state_gradients(mixer: Any, x: Tensor) -> None:
    """float64: through the state between two parts gradients are those of the whole; at a state they are the slopes."""
    assert x.dtype == torch.float64, "finite differences want float64"
    r = torch.Generator().manual_seed(1)
    weights = torch.randn(x.shape, generator=r, dtype=x.dtype)
    x, t = x.detach().requires_grad_(), x.shape[1] // 2
    leaves = dict(mixer.named_parameters()) | {"x": x}
    for sizes in ([t, x.shape[1] - t], [1] * x.shape[1]):
        whole, parts = (
            torch.autograd.grad((out * weights).sum(), list(leaves.values()), materialize_grads=True)
            for out in (mixer(x), in_steps(mixer, x, *sizes)[0])
        )
        for name, want, got in zip(leaves, whole, parts, strict=True):
            slack = 1e-9 * max(float(want.abs().max()), 1e-6)
            assert float((got - want).abs().max()) <= slack, f"gradient at {name} through the state"

    state = in_steps(mixer, x.detach()[:, :t], t)[1].map(lambda part: part.detach().requires_grad_())

    def loss(given: Any) -> Tensor:
        return (mixer.step(x.detach()[:, t:], given)[0] * weights[:, t:]).sum()

    gradients = torch.autograd.grad(loss(state), list(state.parts.values()))
    for name, gradient in zip(state.parts, gradients, strict=True):
        direction = torch.randn(gradient.shape, generator=r, dtype=gradient.dtype)

        def moved(by: float, name: str = name, direction: Tensor = direction) -> Any:
            return type(state)(state.position, {**state.parts, name: state.parts[name] + by * direction})

        with torch.no_grad():
            slope = float(loss(moved(1e-5)) - loss(moved(-1e-5))) / 2e-5
        want = float((gradient.conj() * direction).sum().real)
        assert abs(slope - want) <= 1e-6 * float((gradient * direction).abs().sum()) + 1e-12, f"slope along {name}"


# -- the reading --------------------------------------------------------------------------------------


def check_factors(mixer: Any, x: Tensor) -> None:
    """Factors have the shape that they say, in slices as whole; the core is hook_phi; shares are shares."""
    batch, length = x.shape[:2]
    with torch.no_grad():
        reading = mixer.reading(x)
        assert (reading.batch, reading.length) == (batch, length)
        every = (*reading.factors, *reading.beside)
        assert len({factor.name for factor in every}) == len(every)
        assert not any(factor.core or factor.diagonal for factor in reading.beside)
        for factor in every:
            matrix = factor.build(slice(0, factor.size))
            shape = (factor.size, length) if factor.diagonal else (factor.size, length, length)
            assert matrix.shape[1:] == shape, factor.name
            assert matrix.shape[0] in (1, batch), factor.name
            part = slice(factor.size // 2, factor.size // 2 + 1)
            assert_close(factor.build(part), matrix[:, part], 1e-6, f"a slice of {factor.name}")
            if factor.shares:
                assert not factor.diagonal
                assert (matrix >= 0).all(), factor.name
                assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), 1e-5, f"rows of {factor.name}")
        assert_close(whole(reading.core, batch), seen_at(mixer, x, "hook_phi"), 1e-6, "product of the core")


def check_products(mixer: Any, x: Tensor) -> None:
    """Each product is causal or says that it is not; its hook carries it, with its unit and size, and acts on it."""
    points = hook_points(mixer)
    with torch.no_grad():
        reading = mixer.reading(x)
        plain = {hook: run(mixer, x, **{hook: identity})[0] for hook in ("hook_phi", *conv_hooks(mixer))}
        assert reading.core.name in reading.products()
        for name, product in reading.products(diagonal=True).items():
            assert (name, product) == (product.name, reading.product(name))
            matrix = whole(product, len(x))
            _check_causal(matrix, product.causal)
            if product.diagonal:
                assert (matrix.tril(-1) == 0).all(), name
            if not product.hook:
                continue
            one, unit, *rest = points[product.hook].axes
            assert (one, *rest) == ("batch", "dest", "src")
            assert unit.removeprefix("key_").removeprefix("state_") == product.unit
            carried = seen_at(mixer, x, product.hook)
            assert carried.shape[1] == product.size
            assert_close(matrix, carried, 1e-6, f"{name} at {product.hook}")
            edited, _ = run(mixer, x, **{product.hook: lambda value: 0.5 * value})
            if x.shape[1] == 1 and product.factors[0] in reading.beside:  # a lone weight is 1 whatever its key is
                continue
            assert not torch.equal(edited, plain[product.hook]), f"an edit at {product.hook} does nothing"
        assert {product.hook for product in reading.products(diagonal=True).values()} - {""} == set(plain)


def _check_causal(matrix: Tensor, causal: bool) -> None:
    ahead = matrix.triu(1)
    assert (ahead == 0).all() if causal or matrix.shape[-1] == 1 else (ahead != 0).any()


def check_skip(mixer: Any, x: Tensor) -> None:
    """Without the skip term a matrix is that of the same weights with D = 0; a profile is that of the matrix."""
    parameters = dict(mixer.named_parameters())
    skip = [name for name in ("D", "ssm.D", "skip") if name in parameters]
    bare = deepcopy(mixer)
    with torch.no_grad():
        for name in skip:
            bare.get_parameter(name).zero_()
        reading, without = mixer.reading(x), bare.reading(x)
        assert reading.core.has_skip == bool(skip)
        for name, product in reading.products(diagonal=True).items():
            want = whole(without.product(name), len(x))
            assert_close(whole(product, len(x), skip=False), want, 1e-12, f"{name} without D")
            assert torch.equal(whole(product, len(x)), want) == (not product.has_skip), name
        for factor in reading.factors:
            if factor.profile is not None:
                part = slice(factor.size // 3, factor.size)
                for got, build in zip(factor.profile(part), (factor.build, factor.without_skip), strict=True):
                    assert build is not None
                    assert_close(got, profile_by_sequence(build(part)), 1e-9, f"the profile of {factor.name}")


def check_transition(mixer: Any, x: Tensor, at: int = 2) -> None:
    """What the transition leaves of a change of the state at one position is what later outputs read of it.

    Where no vector of the token reads the state it is complex: then the size of what is read, by the same weights
    at every position, falls as the transition says.
    """
    with torch.no_grad():
        reading = mixer.reading(x)
        transition, state = reading.transition, reading.state
        assert isinstance(transition, GatedTransition | DeltaTransition)
        assert state is not None
        start = seen_at(mixer, x, state.hook)
        if not state.by:
            _check_sizes(mixer, x, transition, start, at)
            return
        left = torch.randn(start[:, at].shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
        moved = _moved(mixer, x, state.hook, at, left)
        by = seen_at(mixer, x, state.by)
        assert (moved[:, :at] == 0).all()
        for i in range(at, x.shape[1]):
            if i > at:
                left = _carried(transition, left, i)
            want = _read_scale(mixer) * state.read(left, by[:, i])
            assert_close(moved[:, i].flatten(1), want.flatten(1), 1e-10, f"what is left at {i}")


def _check_sizes(mixer: Any, x: Tensor, transition: Any, start: Tensor, at: int) -> None:
    """One state of one unit moved by 1 and by i: the root of the sum of squares is the size of what is kept of it."""
    assert start.is_complex()
    ones = {name: torch.ones_like for name in ("hook_q",) if name in hook_points(mixer)}  # reads alike everywhere
    unit, n = transition.rate.shape[0] // 2, transition.rate.shape[1] - 1
    per_unit = start.shape[2] // transition.rate.shape[0]
    size = torch.zeros(x.shape[:2], dtype=x.dtype)
    for by in (1, 1j):
        change = torch.zeros_like(start[:, at])
        change[:, unit * per_unit, n] = by
        size += _moved(mixer, x, "hook_state", at, change, **ones).square().flatten(2).sum(2)
    kept = (transition.rate[unit, n] * transition.time[:, at:, unit].double().cumsum(1)).exp()
    want = (kept / kept[:, :1]).expand(len(x), -1)
    assert_close((size[:, at:] / size[:, at, None]).sqrt(), want, 1e-9, "what is kept of a state")


def _moved(mixer: Any, x: Tensor, hook: str, at: int, change: Tensor, **edits: Edit) -> Tensor:
    """How z moves when the state at one position does."""

    def edit(states: Tensor) -> Tensor:
        states = states.clone()
        states[:, at] += change
        return states

    before, after = (run(mixer, x, **{hook: by}, **edits)[1]["z"] for by in (identity, edit))
    return after - before


def _carried(transition: GatedTransition | DeltaTransition, state: Tensor, i: int) -> Tensor:
    """A_i times a state."""
    if isinstance(transition, DeltaTransition):
        k, beta = transition.k[:, i, :, :, None], transition.beta[:, i, :, None, None]
        decay = 1 if transition.log_decay is None else transition.log_decay[:, i, :, None, None].exp()
        return decay * (state - beta * k * (k * state).sum(2, keepdim=True))
    decay = (transition.time[:, i, :, None] * transition.rate).exp()
    return decay.view(*decay.shape, *[1] * (state.ndim - 3)) * state


def _read_scale(mixer: Any) -> float:
    """The delta rules read q · S / √d_key, all others C · h."""
    return float(mixer.d_key**-0.5) if hasattr(mixer, "d_key") else 1.0


def check_state_read(mixer: Any, x: Tensor) -> None:
    """What the reading vectors read of the states, plus the skip term, is z."""
    with torch.no_grad():
        reading = mixer.reading(x)
        state = reading.state
        assert state is not None
        states, by = seen_at(mixer, x, state.hook), seen_at(mixer, x, state.by)
        assert by[0, 0].numel() == state.groups * by.shape[-1]
        read = _read_scale(mixer) * state.read(states.flatten(0, 1), by.flatten(0, 1))
        assert torch.equal(state.from_heads(state.as_heads(states[:, 0])), states[:, 0])
        seen = run(mixer, x)[1]
        direct = whole(reading.core, len(x)) - whole(reading.core, len(x), skip=False)
        z = read.view_as(seen["z"]) + torch.einsum("bhij,bjhd->bihd", direct, seen["v"])
        assert_close(z, seen["z"], 1e-10, "z from the states")


def check_factors_as_hooked(mixer: Any, x: Tensor) -> None:
    """The reading under a hook is of what the mixer uses under it: its core is what enters hook_phi.

    Every hook but those around the product acts, and none fires twice, there or in a forward.
    """
    fired: list[Tensor] = []

    def edit(value: Tensor) -> Tensor:
        fired.append(0.9 * value)
        return fired[-1]

    names = list(hook_points(mixer))
    assert set(names) >= AROUND - {"hook_state"}
    moving = []
    with torch.no_grad():
        plain = whole(mixer.reading(x).core, len(x))
        for name in names:
            kept: list[Tensor] = []
            watch = mixer.hook_phi.register_forward_pre_hook(lambda m, args, kept=kept: kept.append(args[0].clone()))
            with hooked(mixer, **{name: edit}):
                mixer(x)
                assert len(fired) <= 1, f"{name} fired {len(fired)} times in a forward"
                watch.remove()
                fired.clear()
                reading: Reading = mixer.reading(x)
                parts = {f.name: f.build(slice(0, f.size)) for f in (*reading.factors, *reading.beside)}
                phi = whole(reading.core, len(x))
            assert len(fired) == 0 if name in AROUND else len(fired) <= 1, f"{name} fired {len(fired)} times"
            assert_close(phi, kept[0], 1e-6, f"Φ under an edit at {name}")
            for factor in (*reading.factors, *reading.beside):
                if factor.hook == name:
                    assert torch.equal(parts[factor.name], fired[0])
            if name == "hook_conv" and "silu" in parts:
                assert torch.equal(parts["silu"], fired[0].sigmoid().mT)
            if name == "hook_gate" and "gate" in parts:
                gate = fired[0] if type(mixer).__name__ == "GatedConv" else F.silu(fired[0])
                assert torch.equal(parts["gate"], gate.mT)
            if not torch.equal(phi, plain):
                moving.append(name)
            fired.clear()
    inputs = {"hook_q", "hook_k", "hook_dt", "hook_B", "hook_C", "hook_beta", "hook_decay", "hook_pattern"}
    inputs |= {f"hook_rot_{name}" for name in "qkBC"} | {hook for hook in conv_hooks(mixer) if hook != "hook_phi_conv"}
    assert inputs & set(names) <= set(moving)


def check_composed(mixer: Any, x: Tensor, u: Tensor, tolerance: float = 1e-12) -> None:
    """All factors times u (what enters the first of them, [batch, pos, channel]) is the outer factors times z.

    Exact only where nothing affine stands between the factors: set a conv's bias to zero first.
    """
    with torch.no_grad():
        factors = mixer.reading(x).factors
        core = [i for i, factor in enumerate(factors) if factor.core]
        outer, inner = factors[: core[0]], factors[core[-1] + 1 :]
        seen = run(mixer, x)[1]
        z, v = seen["z"].flatten(2), seen["v"].flatten(2)
        assert u.shape == (*x.shape[:2], max(factor.size for factor in factors))
        if inner:
            assert_close(_times(inner, u), v, tolerance, "what stands before Φ")
        want = _times(outer, z) if outer else z
        assert_close(_times(factors, u), want, tolerance, "the composed matrix")


def _times(factors: Any, u: Tensor) -> Tensor:
    matrix = whole(Product("some", tuple(factors)), len(u))
    per_head = u.shape[2] // matrix.shape[1]  # where all factors live on heads
    return torch.einsum("bcij,bjc->bic", matrix.repeat_interleave(per_head, 1), u)
