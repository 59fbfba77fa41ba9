"""A gated linear recurrence per channel: h_t = a_t h_{t−1} + (1 − a_t) v_t with a_t = σ(W x_t), and z = h."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from circuitscope.hooks import hook
from circuitscope.mixers.mixer import MixerConfig
from circuitscope.mixers.reading import Factor, GatedTransition, Reading
from circuitscope.mixers.registry import register
from circuitscope.mixers.two_paths import mix


class ToyConfig(MixerConfig):
    """W_o h, h a moving average whose rate the token sets."""

    name: Literal["toy"] = "toy"


@register(ToyConfig)
class Toy(nn.Module):
    """Φ_ij = a_{j+1} ⋯ a_i (1 − a_j), per channel."""

    d_head = 1

    def __init__(self, config: ToyConfig, d_model: int, positions: str):
        super().__init__()
        self.n_heads = self.state_size = d_model
        self.into, self.out = nn.Linear(d_model, 2 * d_model), nn.Linear(d_model, d_model)
        self.hook_v, self.hook_z = (hook("batch pos channel d_head") for _ in "vz")
        self.hook_phi = hook("batch channel dest src", on_demand=True)

    def forward(self, x: Tensor) -> Tensor:
        v, gate = self.into(x).chunk(2, dim=-1)
        every = slice(0, self.n_heads)
        z = mix(
            self,
            v[..., None],
            phi=lambda: phi(gate, every),
            fused=lambda v: torch.einsum("bcij,bjcd->bicd", phi(gate, every), v),
        )
        return self.out(z[..., 0])

    def reading(self, x: Tensor) -> Reading:
        gate = self.into(x).chunk(2, dim=-1)[1]
        average = Factor("average", "channel", self.n_heads, lambda part: phi(gate, part), core=True)
        transition = GatedTransition(-F.logsigmoid(gate), -torch.ones(self.n_heads, 1))
        return Reading(x.shape, (average,), transition)

    def mixing_flops(self, length: int) -> int:
        return 3 * self.n_heads


def phi(gate: Tensor, part: slice) -> Tensor:
    kept = F.logsigmoid(gate[..., part]).mT.cumsum(-1)
    lower = torch.ones(gate.shape[1], gate.shape[1], dtype=torch.bool).tril()
    between = (kept[..., :, None] - kept[..., None, :]).masked_fill(~lower, -torch.inf)
    return between.exp() * torch.sigmoid(-gate[..., part]).mT[..., None, :]
