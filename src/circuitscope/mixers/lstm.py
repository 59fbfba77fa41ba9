"""LSTM: torch's own implementation, as a plain baseline without Φ."""

from typing import Annotated, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import hook
from circuitscope.mixers.mixer import MixerConfig, Stream
from circuitscope.mixers.reading import Reading
from circuitscope.mixers.registry import register
from circuitscope.mixers.state import Carry, MixerState
from circuitscope.section import DefaultBy, Unit


class LSTMConfig(MixerConfig):
    """c ← f ⊙ c + i ⊙ g, h ← o ⊙ tanh(c); the gates i, f, o and g read x and h."""

    name: Literal["lstm"] = "lstm"
    d_hidden: Annotated[int | None, Unit("channels"), DefaultBy("none: d_model")] = Field(
        default=None, ge=1, description="size of h and c"
    )


@register(LSTMConfig)
class LSTM(nn.Module):
    """y = W_O h, one layer of torch's LSTM. `hook_z` carries h as one head."""

    no_phi = "its gates read the state, so its output is nonlinear in earlier inputs and no mixing matrix Φ exists"
    n_heads = 1

    def __init__(self, config: LSTMConfig, d_model: int, positions: str):
        super().__init__()
        self.d_head = config.d_hidden or d_model
        self.lstm = nn.LSTM(d_model, self.d_head, batch_first=True)
        self.out = nn.Linear(self.d_head, d_model)
        self.hook_z = hook("batch pos head d_head")
        self.state_size = 2 * self.d_head

    def forward(self, x: Stream) -> Stream:
        hidden, _ = self.lstm(x)
        return self._out(hidden)

    def start(self, batch: int) -> MixerState:
        """h and c."""
        return MixerState(0, {name: self.out.weight.new_zeros(batch, self.d_head) for name in ("hidden", "cell")})

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """torch's LSTM from a state."""
        carry = Carry(self, state)
        before = (carry["hidden"], carry["cell"])
        hidden, after = self.lstm(x, tuple(part[None].contiguous() for part in before))
        carry["hidden"], carry["cell"] = (new[0].to(old.dtype) for new, old in zip(after, before, strict=True))
        return self._out(hidden), carry.after(x.shape[1])

    def _out(self, hidden: Float[Tensor, "batch pos d_head"]) -> Stream:
        out: Tensor = self.out(self.hook_z(hidden[:, :, None])[:, :, 0])
        return out

    def reading(self, x: Stream) -> Reading:
        """A reading without factors, which says why there are none."""
        return Reading(
            x.shape,
            transition="an LSTM is nonlinear in its state, so its transition is not a matrix",
            no_phi=self.no_phi,
        )

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the matrices that make the gates, forward, per token: 2 per weight. They mix and project at once."""
        return 2 * sum(p.numel() for p in self.lstm.parameters() if p.ndim == 2)
