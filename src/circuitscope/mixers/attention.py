"""Causal softmax attention: Φ is the attention pattern itself. A config can add short convs before the projections.

A centred conv reads later positions, and with it the layer is not causal; the pattern stays causal.
"""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from circuitscope.errors import UserError
from circuitscope.hooks import hook, wanted
from circuitscope.kernels.attention import causal_scores, fused_attention
from circuitscope.memory import check_fits
from circuitscope.mixers.matched_token import MATCHED, key_parts, matched_token
from circuitscope.mixers.mixer import MixerConfig, Stream, check_divides
from circuitscope.mixers.positions import alibi, check_rotates, rotate
from circuitscope.mixers.reading import Build, Factor, Reading
from circuitscope.mixers.registry import register
from circuitscope.mixers.state import Carry, MixerState, first_position
from circuitscope.mixers.two_paths import Heads, mix, short_convolve
from circuitscope.section import Added, Unit


class AttentionConfig(MixerConfig):
    """softmax(QKᵀ/√d) V, causal; each of Q, K, V reads x or a short conv of x."""

    positions_inside: ClassVar[frozenset[str]] = frozenset({"rope", "alibi"})
    blind_to_order: ClassVar[bool] = True
    default_init: ClassVar[str] = "gpt2"

    name: Literal["attention"] = "attention"
    n_heads: Annotated[int, Unit("heads")] = Field(default=1, ge=1, description="attention heads; must divide d_model")
    qkv_bias: bool = Field(default=True, description="bias in the query, key and value projections")
    conv_on: Literal["", "q", "k", "v", "qk", "qv", "kv", "qkv"] = Field(
        default="",
        description='which of Q, K, V read a short conv of the stream instead of the stream; "": none of them',
    )
    conv_width: Annotated[int, Unit("taps")] = Field(
        default=4, ge=1, description="length of each short conv; the last tap is the position itself"
    )
    conv_mode: Annotated[Literal["causal", "centred"], Added(3, before="causal")] = Field(
        default="causal",
        description="whether each short conv reads back only, or also conv_width / 2, rounded down, positions ahead, as"
        " padding='same' in torch; a model with centred convs cannot generate",
    )
    conv_activation: bool = Field(default=False, description="SiLU after each short conv")
    dropout: Annotated[float, Added(3, before=0.0), Unit("share of the entries")] = Field(
        default=0.0, ge=0, lt=1, description="dropout on the attention pattern, in training only; 0: none"
    )

    @model_validator(mode="after")
    def _a_conv_to_centre(self) -> "AttentionConfig":
        if self.conv_mode == "centred" and not self.conv_on:
            raise UserError(
                "mixer.conv_mode: centred needs a conv, and conv_on is empty; expected causal, or a conv_on"
            )
        return self

    @property
    def sees_ahead(self) -> int:
        return self.conv_width // 2 if self.conv_mode == "centred" else 0

    @property
    def phi_in_passing(self) -> bool:
        return not self.conv_on


class _Read(NamedTuple):
    """What a projection reads, and, if that is a conv of x, the conv's matrix and what it gives before any SiLU."""

    stream: Stream
    matrix: Build | None = None
    pre: Stream | None = None


@register(AttentionConfig)
class Attention(nn.Module):
    """z = softmax(causal(QKᵀ/√d)) V, y = W_O z.

    `hook_attn_scores`, `hook_pattern` and `hook_phi` fire only when something listens to one of them. Then
    the mixer builds the pattern, passes it through the hooks in this order, and computes z from what comes back.

    Each conv is depthwise, causal unless `conv_mode` is centred, has a bias, and acts on x before the projection; Q, K
    and V have separate convs. Their outputs before SiLU are at `hook_conv_q`, `hook_conv_k` and, for the values,
    `hook_conv`; their matrices are at `hook_phi_conv_q`, `hook_phi_conv_k` and `hook_phi_conv`. The convs of Q and K
    make the pattern, which is lower-triangular in either mode; the conv of V is a factor of its own, and is so only if
    causal. With a conv on K the reading also has `matched`, the token whose key a query matched (`matched_token`).

    With dropout, training builds the pattern, and `hook_phi` sees what is left of it. In eval mode nothing is dropped,
    and `reading` never drops anything.
    """

    state_size = None
    no_composed = ""
    no_transition = "attention has no recurrent state: it reads every earlier position anew"

    def __init__(self, config: AttentionConfig, d_model: int, positions: str):
        super().__init__()
        check_divides("n_heads", config.n_heads, f"d_model = {d_model}", d_model)
        self.n_heads, self.d_head = config.n_heads, d_model // config.n_heads
        if positions == "rope":
            check_rotates(self.d_head, "head size d_model / n_heads")
        self.config, self.positions = config, positions
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=config.qkv_bias)
        self.out = nn.Linear(d_model, d_model)
        self.hook_q, self.hook_k, self.hook_v = (hook("batch pos head d_head") for _ in "qkv")
        if positions == "rope":
            self.hook_rot_q, self.hook_rot_k = (hook("batch pos head d_head") for _ in "qk")
        self.hook_attn_scores, self.hook_pattern, self.hook_phi = (hook("batch head dest src") for _ in range(3))
        self.hook_z = hook("batch pos head d_head")
        self._add_convs(config, d_model)

    def _add_convs(self, config: AttentionConfig, d_model: int) -> None:
        for name in config.conv_on:
            of = _suffix(name)
            setattr(self, f"conv_{name}", nn.Conv1d(d_model, d_model, config.conv_width, groups=d_model))
            setattr(self, f"hook_conv{of}", hook("batch pos d_model"))
            setattr(self, f"hook_phi_conv{of}", hook("batch channel dest src", on_demand=True))
        if "v" in config.conv_on:
            self.no_composed = (
                "the conv on V comes before the value projection, so a composed matrix over tokens exists only"
                " per pair of channels; ask for its factors one at a time: pattern, conv"
            )

    def forward(self, x: Stream) -> Stream:
        q, k, v, _ = self._into(x)
        z = mix(
            self,
            v,
            phi=lambda: self._dropped(self._pattern(q, k, x)),
            fused=lambda v: self._fused(q, k, v, x),
            within=(self.hook_attn_scores, self.hook_pattern),
        )
        return self._out(z)

    def start(self, batch: int) -> MixerState:
        """Keys (rotated under rope) and values, which grow with the positions, and the last inputs of the convs."""
        if ahead := self.config.sees_ahead:
            raise UserError(
                f"a recurrent state needs a causal layer, and this one's centred conv reads {ahead} positions ahead;"
                " expected conv_mode: causal"
            )
        zeros = self.out.weight.new_zeros
        cache = {name: zeros(batch, 0, self.n_heads, self.d_head) for name in ("k", "v")}
        if self.config.conv_on:
            cache["conv"] = zeros(batch, self.config.conv_width - 1, self.out.out_features)
        return MixerState(0, cache)

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """The new positions' queries over all keys: the cost of a position grows with the positions before it."""
        carry = Carry(self, state)
        q, k, v, _ = self._into(x, carry)
        k, v = torch.cat([carry["k"], k], 1), torch.cat([carry["v"], self.hook_v(v)], 1)
        carry["k"], carry["v"] = k, v
        bias = None
        if self.positions == "alibi":
            bias = alibi(self.n_heads, k.shape[1], x.device, carry.position).to(x.dtype)
        pattern = self._dropped(causal_scores(q, k, bias).softmax(dim=-1))
        z = torch.einsum("bhij,bjhd->bihd", pattern, v)
        return self._out(self.hook_z(z)), carry.after(x.shape[1])

    def _out(self, z: Heads) -> Stream:
        out: Tensor = self.out(rearrange(z, "batch pos head d_head -> batch pos (head d_head)"))
        return out

    def reading(self, x: Stream) -> Reading:
        """The pattern and, on the channels of x, the matrices of the convs; with a conv on K, the matched token."""
        q, k, _, reads = self._into(x)
        if wanted(self.hook_attn_scores, self.hook_pattern):  # these hooks see all heads at once
            size = x.shape[0] * self.n_heads * x.shape[1] ** 2 * x.element_size()
            check_fits(size, x.device, "the hooked pattern", "use fewer sequences")
            whole = self._pattern(q, k, x)

            def pattern(heads: slice) -> Float[Tensor, "batch head dest src"]:
                return whole[:, heads]
        else:

            def pattern(heads: slice) -> Float[Tensor, "batch head dest src"]:
                bias = self._bias(x)
                return causal_scores(q[:, :, heads], k[:, :, heads], None if bias is None else bias[heads]).softmax(-1)

        causal = not self.config.sees_ahead
        convs = {
            name: Factor(
                f"conv{_suffix(name)}",
                "channel",
                x.shape[2],
                read.matrix,
                causal=causal,
                hook=f"hook_phi_conv{_suffix(name)}",
                reach=self.config.conv_width,
            )
            for name, read in reads.items()
            if read.matrix is not None
        }
        beside = [convs[name] for name in "qk" if name in convs]
        if "k" in convs:
            read, lags = reads["k"], range(-self.config.sees_ahead, self.config.conv_width - self.config.sees_ahead)

            def matched(heads: slice) -> Float[Tensor, "batch head dest src"]:
                assert read.matrix is not None
                assert read.pre is not None
                gate = read.pre.sigmoid() if self.config.conv_activation else None
                parts = key_parts(x, read.matrix, lags, self.W_K[heads], gate, self.positions == "rope")
                return matched_token(pattern(heads), q[:, :, heads], parts)

            beside.append(Factor(MATCHED, "head", self.n_heads, matched, shares=True, causal=causal))
        return Reading(
            x.shape,
            factors=(
                Factor("pattern", "head", self.n_heads, pattern, shares=True, core=True),
                *([convs["v"]] if "v" in convs else []),
            ),
            beside=tuple(beside),
            transition=self.no_transition,
            no_composed=self.no_composed,
        )

    def reading_from(self, phi: Float[Tensor, "batch head dest src"]) -> Reading:
        """The reading of a layer without convs, from the Φ that entered `hook_phi`."""
        pattern = Factor("pattern", "head", self.n_heads, lambda heads: phi[:, heads], shares=True, core=True)
        return Reading((len(phi), phi.shape[2]), factors=(pattern,), transition=self.no_transition)

    def _fused(self, q: Heads, k: Heads, v: Heads, x: Stream) -> Heads:
        """The kernel; with dropout in training the product with a pattern that is dropped as on the path through Φ."""
        if not (self.training and self.config.dropout):
            return fused_attention(q, k, v, self._bias(x))
        pattern = self._dropped(causal_scores(q, k, self._bias(x)).softmax(dim=-1))
        return torch.einsum("bhij,bjhd->bihd", pattern, v)

    def _dropped(self, pattern: Float[Tensor, "batch head dest src"]) -> Float[Tensor, "batch head dest src"]:
        return F.dropout(pattern, self.config.dropout, self.training) if self.config.dropout else pattern

    def _pattern(self, q: Heads, k: Heads, x: Stream) -> Float[Tensor, "batch head dest src"]:
        scores = self.hook_attn_scores(causal_scores(q, k, self._bias(x)))
        pattern = scores.softmax(dim=-1)
        if pattern.requires_grad:  # hooks may write into the copy: softmax's gradient needs its own result unchanged
            pattern = pattern.clone()
        hooked: Tensor = self.hook_pattern(pattern)
        return hooked

    def _into(self, x: Stream, carry: Carry | None = None) -> tuple[Heads, Heads, Heads, dict[str, _Read]]:
        """Queries and keys (rotated under rope), values, and what each of them is read from."""
        reads = {name: self._read(x, name, carry) for name in "qkv"}
        if self.config.conv_on:
            biases = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
            parts = zip(reads.values(), self.qkv.weight.chunk(3), biases, strict=True)
            each = [F.linear(read.stream, weight, bias) for read, weight, bias in parts]
            q, k, v = (
                rearrange(u, "batch pos (head d_head) -> batch pos head d_head", head=self.n_heads) for u in each
            )
        else:
            q, k, v = rearrange(
                self.qkv(x), "batch pos (three head d_head) -> three batch pos head d_head", three=3, head=self.n_heads
            )
        q, k = self.hook_q(q), self.hook_k(k)
        if self.positions == "rope":
            first = first_position(carry)
            q, k = self.hook_rot_q(rotate(q, first)), self.hook_rot_k(rotate(k, first))
        return q, k, v, reads

    def _read(self, x: Stream, name: str, carry: Carry | None) -> _Read:
        """What the projection of Q, K or V reads."""
        if name not in self.config.conv_on:
            return _Read(x)
        conv, point = getattr(self, f"conv_{name}"), getattr(self, f"hook_phi_conv{_suffix(name)}")
        convolved, matrix = short_convolve(point, x, conv.weight[:, 0], conv.bias, self.config.sees_ahead, carry)
        pre = getattr(self, f"hook_conv{_suffix(name)}")(convolved)
        return _Read(F.silu(pre) if self.config.conv_activation else pre, matrix, pre)

    def _bias(self, x: Stream) -> Float[Tensor, "head dest src"] | None:
        if self.positions != "alibi":
            return None
        return alibi(self.n_heads, x.shape[1], x.device).to(x.dtype)

    def mixing_flops(self, length: int) -> int:
        """FLOPs of QKᵀ and of the pattern times V, averaged over causal rows, plus 2 per tap; forward, per token."""
        d_model = self.n_heads * self.d_head
        return d_model * (2 * (length + 1) + 2 * len(self.config.conv_on) * self.config.conv_width)

    # TransformerLens's names for the weights, as views [head, d_model, d_head] and [head, d_head, d_model].

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        return self._weight(0)

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:
        return self._weight(1)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:
        return self._weight(2)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        return rearrange(self.out.weight, "d_model (head d_head) -> head d_head d_model", head=self.n_heads)

    def _weight(self, which: int) -> Float[Tensor, "head d_model d_head"]:
        return rearrange(
            self.qkv.weight.chunk(3)[which], "(head d_head) d_model -> head d_model d_head", head=self.n_heads
        )


def _suffix(name: str) -> str:
    """The end of the names of a conv's hooks and factor; that of the values has none, as in every mixer."""
    return "" if name == "v" else f"_{name}"
