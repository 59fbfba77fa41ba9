"""DeltaNet and Gated DeltaNet: the state is a linear map from keys to values, which every write corrects."""

from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from circuitscope.errors import UserError
from circuitscope.hooks import hook
from circuitscope.kernels.delta_rule import delta_phi, delta_rule, delta_rule_steps, delta_with_state_edit
from circuitscope.mixers.mamba import dt_bias
from circuitscope.mixers.mixer import RotaryConfig, Stream, check_divides
from circuitscope.mixers.positions import check_rotates, rotate
from circuitscope.mixers.reading import Build, DeltaTransition, Factor, Reading, State
from circuitscope.mixers.registry import register
from circuitscope.mixers.state import Carry, MixerState, first_position
from circuitscope.mixers.two_paths import Channels, Heads, mix, short_convolve_parts
from circuitscope.section import Added, DefaultBy, Unit

PerHead = Float[Tensor, "batch pos head"]
Gate = Float[Tensor, "batch pos head d_value"]


class DeltaConfig(RotaryConfig):
    """What both delta rules have in common."""

    gated: ClassVar[bool]
    n_heads: Annotated[int, Unit("heads")] = Field(
        default=1, ge=1, description="heads; must divide d_model unless d_key and d_value are given"
    )
    d_key: Annotated[int | None, Unit("channels per head"), DefaultBy("none: d_model / n_heads")] = Field(
        default=None, ge=1, description="size of queries and keys"
    )
    d_value: Annotated[int | None, Unit("channels per head"), DefaultBy("none: d_model / n_heads")] = Field(
        default=None, ge=1, description="size of values"
    )
    conv_width: Annotated[int, Unit("taps")] = Field(
        default=4, ge=1, description="length of the short convs on queries, keys and values"
    )
    allow_neg_eigval: bool = Field(
        default=False, description="β goes up to 2, not 1, so a write can flip what a key held"
    )
    beta_max: Annotated[float | None, Added(3, before=None), DefaultBy("none: 2 with allow_neg_eigval, else 1")] = (
        Field(
            default=None,
            gt=0,
            le=2,
            description="the cap on β, which is in (0, beta_max); above 1 needs allow_neg_eigval",
        )
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the norm on each head's output")

    @model_validator(mode="after")
    def _no_negative_eigenvalue_unless_allowed(self) -> "DeltaConfig":
        if self.beta_max is not None and self.beta_max > 1 and not self.allow_neg_eigval:
            raise UserError(
                f"mixer.beta_max: {self.beta_max} makes the eigenvalue 1 − β of a write negative; expected at most 1,"
                " or allow_neg_eigval: true"
            )
        return self

    @property
    def cap(self) -> float:
        """What β stays below."""
        return self.beta_max if self.beta_max is not None else 2 if self.allow_neg_eigval else 1


class DeltaNetConfig(DeltaConfig):
    """W_o RMSNorm(o), S_t = S_{t−1}(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, o_t = S_t q_t / √d_key."""

    gated: ClassVar[bool] = False
    name: Literal["deltanet"] = "deltanet"


class GatedDeltaNetConfig(DeltaConfig):
    """W_o (RMSNorm(o) ⊙ SiLU(gate)); like DeltaNet, but the state first decays by e^{g_t}."""

    gated: ClassVar[bool] = True
    name: Literal["gated_deltanet"] = "gated_deltanet"
    decay_floor: Annotated[float, Added(3, before=0.0)] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="the least share f of the state that a step keeps: it keeps f + (1 − f) α where it would keep α",
    )


@register(DeltaNetConfig, GatedDeltaNetConfig)
class DeltaNet(nn.Module):
    """Φ is the delta rule's matrix, per head, with Γ all ones where there is no gate:

    Φ = d_key^−½ (Γ ⊙ tril(QKᵀ)) · (I + diag β (Γ ⊙ tril(KKᵀ, −1)))⁻¹ · diag β.

    q, k = l2norm(SiLU(conv(W x))), v = SiLU(conv(W x)), β = β_max σ(W x), with β_max 1, or 2 with `allow_neg_eigval`,
    or as `beta_max` says. The norm and the output gate act on z at each position alone. The norm is not linear in z, so
    neither of them is a factor.

    The state keeps the share α = exp(−exp(A_log) · softplus(W x + dt_bias)) per step or, with a `decay_floor` f, the
    share f + (1 − f) α, which is in (f, 1) and passes a gradient to α everywhere.

    `hook_q` and `hook_k` hold q and k after conv, SiLU and norm, which the rule reads; with rope it reads them rotated,
    as they are at `hook_rot_q` and `hook_rot_k`. `hook_decay` holds g, the logarithm of the share that
    is kept; `hook_gate` holds the gate before SiLU; `hook_state` is [batch, pos, head, d_key, d_head]. `hook_phi_conv`
    is the conv on the values, `hook_phi_conv_q` and `hook_phi_conv_k` are those on the queries and keys, which Φ is
    made with.
    """

    def __init__(self, config: DeltaConfig, d_model: int, positions: str):
        super().__init__()
        self.config = config
        self.n_heads = config.n_heads
        self.d_key = config.d_key or _share(d_model, config.n_heads)
        self.d_head = config.d_value or _share(d_model, config.n_heads)
        keys, values = self.n_heads * self.d_key, self.n_heads * self.d_head
        self.convolved = (keys, keys, values)
        channels = sum(self.convolved)
        # what the conv reads, β; with a gate also the step and the output gate
        self.sizes = [channels, self.n_heads, *([self.n_heads, values] if config.gated else [])]
        self.in_proj = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.conv = nn.Conv1d(channels, channels, config.conv_width, groups=channels, bias=False)
        self.norm = nn.RMSNorm(self.d_head, config.norm_eps)
        self.out = nn.Linear(values, d_model, bias=False)
        if config.gated:
            self.A_log = nn.Parameter(torch.empty(self.n_heads).uniform_(0.01, 16).log())
            self.dt_bias = nn.Parameter(dt_bias(self.n_heads))
            self.A_log.no_weight_decay = self.dt_bias.no_weight_decay = True  # type: ignore[attr-defined]
            self.hook_decay, self.hook_gate = hook("batch pos head"), hook("batch pos head d_head")
        self.hook_q, self.hook_k = (hook("batch pos head d_key") for _ in "qk")
        if config.rotary:
            check_rotates(self.d_key, "d_key")
            self.hook_rot_q, self.hook_rot_k = (hook("batch pos head d_key") for _ in "qk")
        self.hook_beta = hook("batch pos head")
        self.hook_phi_conv_q, self.hook_phi_conv_k = (hook("batch key_channel dest src", on_demand=True) for _ in "qk")
        self.hook_phi_conv = hook("batch channel dest src", on_demand=True)
        self.hook_conv = hook("batch pos channel")
        self.hook_v, self.hook_z = (hook("batch pos head d_head") for _ in "vz")
        self.hook_phi = hook("batch head dest src")
        self.hook_state = hook("batch pos head d_key d_head", on_demand=True)
        self.state_size = keys * self.d_head + (config.conv_width - 1) * channels

    def forward(self, x: Stream) -> Stream:
        q, k, pre, beta, g, gate, _ = self._into(x)
        z = mix(
            self,
            self._heads(F.silu(pre)),
            phi=lambda: delta_phi(q, k, beta, g),
            fused=lambda v: delta_rule(q, k, v, beta, g),
            state=lambda v, edit: delta_with_state_edit(q, k, v, beta, g, edit),
        )
        return self._out(z, gate)

    def start(self, batch: int) -> MixerState:
        """The state S of every head, a map from keys to values, and the last inputs of the convs."""
        zeros = self.conv.weight.new_zeros
        conv = zeros(batch, self.config.conv_width - 1, self.sizes[0])
        return MixerState(0, {"conv": conv, "map": zeros(batch, self.n_heads, self.d_key, self.d_head)})

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """One position after the other from a state."""
        carry = Carry(self, state)
        q, k, pre, beta, g, gate, _ = self._into(x, carry)
        v = self.hook_v(self._heads(F.silu(pre)))
        z, carry["map"] = delta_rule_steps(q, k, v, beta, g, initial=carry["map"])
        return self._out(self.hook_z(z), gate), carry.after(x.shape[1])

    def _out(self, z: Heads, gate: Gate | None) -> Stream:
        z = self.norm(z)
        if gate is not None:
            z = z * F.silu(gate)
        out: Tensor = self.out(z.flatten(2))
        return out

    def reading(self, x: Stream) -> Reading:
        """Φ_delta, per head, · diag(σ(pre)) · Φ_conv, per channel of the values; SiLU(pre) = σ(pre) · pre."""
        q, k, pre, beta, g, _, (conv_q, conv_k, conv) = self._into(x)
        keys, _, channels = self.convolved

        def delta(h: slice) -> Float[Tensor, "batch head dest src"]:
            return delta_phi(q[:, :, h], k[:, :, h], beta[..., h], None if g is None else g[..., h])

        return Reading(
            x.shape,
            factors=(
                Factor("delta", "head", self.n_heads, delta, core=True),
                Factor("silu", "channel", channels, lambda c: pre[..., c].sigmoid().mT, diagonal=True),
                Factor("conv", "channel", channels, conv, hook="hook_phi_conv", reach=self.config.conv_width),
            ),
            beside=(
                Factor("conv_q", "channel", keys, conv_q, hook="hook_phi_conv_q", reach=self.config.conv_width),
                Factor("conv_k", "channel", keys, conv_k, hook="hook_phi_conv_k", reach=self.config.conv_width),
            ),
            transition=DeltaTransition(k, beta, g),
            state=State(by="hook_rot_q" if self.config.rotary else "hook_q", groups=self.n_heads),
        )

    def mixing_flops(self, length: int) -> int:
        """FLOPs of convs and recurrence, forward, per token: 2 per tap; 6 per entry of the state, 7 with decay.

        k reads each entry, a write changes it, q reads it. The chunked kernel computes matrix products instead.
        """
        channels = self.sizes[0]
        entry = 7 if self.config.gated else 6
        return 2 * self.config.conv_width * channels + entry * self.n_heads * self.d_key * self.d_head

    def _into(
        self, x: Stream, carry: Carry | None = None
    ) -> tuple[Heads, Heads, Channels, PerHead, PerHead | None, Gate | None, list[Build]]:
        """q, k, the input of the values' SiLU, β, log decay, output gate, and the matrices of the three convs."""
        u, beta, *rest = self.in_proj(x).split(self.sizes, dim=-1)
        points = (self.hook_phi_conv_q, self.hook_phi_conv_k, self.hook_phi_conv)
        convolved = short_convolve_parts(points, u, self.convolved, self.conv.weight[:, 0], None, carry)
        (q, k, pre), convs = [out for out, _ in convolved], [matrix for _, matrix in convolved]
        q, k = (self._heads(F.silu(u)) for u in (q, k))
        q, k = self.hook_q(_l2norm(q)), self.hook_k(_l2norm(k))
        if self.config.rotary:
            first = first_position(carry)
            q, k = self.hook_rot_q(rotate(q, first)), self.hook_rot_k(rotate(k, first))
        pre = self.hook_conv(pre)
        beta = self.hook_beta(self.config.cap * beta.sigmoid())
        if not isinstance(self.config, GatedDeltaNetConfig):
            return q, k, pre, beta, None, None, convs
        step, gate = rest
        g = -self.A_log.exp() * F.softplus(step + self.dt_bias)
        if floor := self.config.decay_floor:
            g = torch.log1p((1 - floor) * torch.expm1(g))  # log(f + (1 − f) e^g), exact where little decays
        g = self.hook_decay(g)
        return q, k, pre, beta, g, self.hook_gate(self._heads(gate)), convs

    def _heads(self, u: Channels) -> Heads:
        return rearrange(u, "batch pos (head d) -> batch pos head d", head=self.n_heads)


def _share(d_model: int, n_heads: int) -> int:
    check_divides("n_heads", n_heads, f"d_model = {d_model}", d_model, "; or give d_key and d_value")
    return d_model // n_heads


def _l2norm(x: Heads) -> Heads:
    """x / √(Σ x² + 1e-6), as in fla and Qwen3-Next."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
