"""H3: a shift-SSM on the keys and a diagonal SSM on keys times values, between two products."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import hook
from circuitscope.kernels.long_conv import long_conv, toeplitz
from circuitscope.kernels.s4d import S4DParams, s4d_kernel, s4d_start, s4d_steps, s4d_with_state_edit, shift_ssm
from circuitscope.mixers.mixer import MixerConfig, Stream, check_divides
from circuitscope.mixers.reading import Build, Factor, Reading, State
from circuitscope.mixers.registry import register
from circuitscope.mixers.s4 import add_s4d_parameters, s4d_transition
from circuitscope.mixers.state import Carry, MixerState
from circuitscope.mixers.two_paths import Heads, convolve, mix
from circuitscope.section import Unit


class H3Config(MixerConfig):
    """W_o(q ⊙ (K * (k̃ ⊙ v) + D k̃ ⊙ v)), k̃ = shift-SSM(k) + D_k k."""

    name: Literal["h3"] = "h3"
    d_state: Annotated[int, Unit("states per channel")] = Field(
        default=64, ge=2, multiple_of=2, description="size N of the state, and taps of the shift-SSM"
    )
    head_dim: Annotated[int, Unit("channels per head")] = Field(
        default=1, ge=1, description="size of a head; must divide d_model"
    )
    dt_min: float = Field(default=1e-3, gt=0, description="smallest initial step size Δ of the state-space model")
    dt_max: float = Field(default=1e-1, gt=0, description="largest initial step size Δ of the state-space model")


@register(H3Config)
class H3(nn.Module):
    """Φ_ij = (q_i · k̃_j)(K_{i−j} + D δ_ij), per head; by default every head has one channel.

    K is the kernel of S4D-Lin with bilinear discretization, in real arithmetic on N/2 conjugate pairs. `hook_k` holds
    k̃, after the shift-SSM, whose matrix, with D_k, is at `hook_phi_conv_k`. `hook_state` holds the S4D states,
    complex [batch, pos, channel, N/2]. With head_dim a > 1 its channels are the products k̃_a v_b of each head, head
    · a² in all. The state of the shift-SSM, the last inputs of k, has no hook. `state_size` counts both states: N − 1
    inputs for the shift, as for a conv of N taps, and 2 for each complex number.
    """

    log_A_real: nn.Parameter
    A_imag: nn.Parameter
    C: nn.Parameter
    log_dt: nn.Parameter
    D: nn.Parameter

    def __init__(self, config: H3Config, d_model: int, positions: str):
        super().__init__()
        check_divides("head_dim", config.head_dim, f"d_model = {d_model}", d_model)
        self.config = config
        heads, size = d_model // config.head_dim, config.head_dim
        self.n_heads, self.d_head = heads, size
        self.qkv = nn.Linear(d_model, 3 * d_model)
        bound = config.d_state**-0.5
        self.shift = nn.Parameter(torch.empty(d_model, config.d_state).uniform_(-bound, bound))  # as torch's conv1d
        self.shift_D = nn.Parameter(torch.randn(d_model))
        self.shift_D.no_weight_decay = True  # type: ignore[attr-defined]
        add_s4d_parameters(self, heads, config.d_state, config.dt_min, config.dt_max)
        self.out = nn.Linear(d_model, d_model)
        unit = "channel" if size == 1 else "head"
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (hook(f"batch pos {unit} d_head") for _ in "qkvz")
        self.hook_phi_conv_k = hook("batch channel dest src", on_demand=True)
        self.hook_phi = hook(f"batch {unit} dest src", on_demand=True)
        self.hook_state = hook("batch pos product state", on_demand=True)
        self.state_size = d_model * (config.d_state - 1) + heads * size**2 * config.d_state

    def forward(self, x: Stream) -> Stream:
        q, k, v, _ = self._into(x)
        length = x.shape[1]

        def phi() -> Float[Tensor, "batch head dest src"]:
            params, D = self._ssm()
            return _scores(q, k) * toeplitz(s4d_kernel(params, length), length, D)

        def fused(v: Heads) -> Heads:
            kernel, copies = s4d_kernel(self._ssm()[0], length), self.d_head**2
            kernel, D = kernel.repeat_interleave(copies, 0), self.D.repeat_interleave(copies)
            return self._read(q, long_conv(self._products(k, v), kernel, D))

        def states(v: Heads, edit: Callable[[Tensor], Tensor]) -> Heads:
            params, D = self._ssm(self.d_head**2)
            return self._read(q, s4d_with_state_edit(self._products(k, v), params, D, edit))

        out: Tensor = self.out(mix(self, v, phi=phi, fused=fused, state=states).flatten(2))
        return out

    def start(self, batch: int) -> MixerState:
        """The S4D states of the products, and the last keys, which the shift-SSM reads."""
        keys = self.shift.new_zeros(batch, self.config.d_state - 1, len(self.shift))
        return MixerState(0, {"conv": keys, "scan": s4d_start(self._ssm(self.d_head**2)[0], batch)})

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """One position after the other from a state."""
        carry = Carry(self, state)
        q, k, v, _ = self._into(x, carry)
        y, carry["scan"] = s4d_steps(
            self._products(k, self.hook_v(v)), *self._ssm(self.d_head**2), initial=carry["scan"]
        )
        return self.out(self.hook_z(self._read(q, y)).flatten(2)), carry.after(x.shape[1])

    def reading(self, x: Stream) -> Reading:
        """diag(q) · Toeplitz(K + Dδ) · diag(k̃), per channel; a single factor where a head has several channels."""
        q, k, _, shift = self._into(x)
        n, length = self.n_heads, x.shape[1]
        params = self._ssm()[0]
        kernel = s4d_kernel(params, length)

        def ssm(part: slice) -> Float[Tensor, "1 head dest src"]:
            return toeplitz(kernel[part], length, self.D[part])[None]

        def bare(part: slice) -> Float[Tensor, "1 head dest src"]:
            return toeplitz(kernel[part], length)[None]

        def scores(part: slice) -> Float[Tensor, "batch head dest src"]:
            return _scores(q[:, :, part], k[:, :, part])

        found: tuple[Factor, ...]
        if self.d_head > 1:
            build, without = (lambda h: scores(h) * ssm(h)), (lambda h: scores(h) * bare(h))
            found = (Factor("qk_ssm", "head", n, build, core=True, without_skip=without),)
        else:
            options: dict[str, Any] = {"diagonal": True, "core": True}
            found = (
                Factor("q", "channel", n, lambda c: q[:, :, c, 0].mT, **options),
                Factor("ssm", "channel", n, ssm, core=True, without_skip=bare),
                Factor("k", "channel", n, lambda c: k[:, :, c, 0].mT, **options),
            )
        transition = s4d_transition(params, length)  # of the S4D, not of the shift register on its keys
        beside = (Factor("shift_k", "channel", x.shape[2], shift, hook="hook_phi_conv_k", reach=self.config.d_state),)
        return Reading(x.shape, factors=found, beside=beside, transition=transition, state=State())

    def mixing_flops(self, length: int) -> int:
        """FLOPs of both convolutions and the products, forward, per token: 2 per tap.

        The long convolution is averaged over causal rows and counted as a sum over taps; the FFT, which is used for
        long inputs, needs fewer.
        """
        products = self.n_heads * self.d_head**2
        taps = min(self.config.d_state, length)
        return self.n_heads * self.d_head * (2 * taps + 2) + products * (length + 1 + 2 + 3)

    def _into(self, x: Stream, carry: Carry | None = None) -> tuple[Heads, Heads, Heads, Build]:
        """Queries, k̃, values, and the matrix of the shift that makes k̃ of the keys."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        shifted, shift = convolve(
            self.hook_phi_conv_k,
            k,
            matrix=lambda c: toeplitz(self.shift[c], x.shape[1], self.shift_D[c]),
            bias=None,
            fused=lambda k: (
                shift_ssm(k, self.shift, self.shift_D)
                if carry is None
                else carry.convolved(k, self.shift.flip(1)) + self.shift_D * k
            ),
        )
        q, k, v = (rearrange(u, "batch pos (head d) -> batch pos head d", head=self.n_heads) for u in (q, shifted, v))
        return self.hook_q(q), self.hook_k(k), v, shift

    def _ssm(self, copies: int = 1) -> tuple[S4DParams, Float[Tensor, " channel"]]:
        """The SSM's parameters and D, with those of each head repeated for `copies` channels."""
        log_A_real, A_imag, C, log_dt, D = (
            p.repeat_interleave(copies, 0) if copies > 1 else p
            for p in (self.log_A_real, self.A_imag, self.C, self.log_dt, self.D)
        )
        return S4DParams(log_A_real, A_imag, C, log_dt, "bilinear"), D

    def _products(self, k: Heads, v: Heads) -> Float[Tensor, "batch pos product"]:
        """k̃_a v_b of every head."""
        return (k[..., :, None] * v[..., None, :]).flatten(2)

    def _read(self, q: Heads, y: Float[Tensor, "batch pos product"]) -> Heads:
        """Σ_a q_a y_ab."""
        by_head = y.unflatten(2, (self.n_heads, self.d_head, self.d_head))
        z: Tensor = (q[..., None] * by_head).sum(3)
        return z


def _scores(q: Heads, k: Heads) -> Float[Tensor, "batch head dest src"]:
    """q_i · k̃_j of every head."""
    return torch.einsum("bihd,bjhd->bhij", q, k)
