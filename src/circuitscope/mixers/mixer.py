"""What every token mixer is: z = Φ(x) · v(x), y = Out(z, x), with Φ [batch, head, dest, src]."""

from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from circuitscope.hooks import HookPoint


class MixerConfig(BaseModel):
    """A mixer's own options; `name` chooses the mixer."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str


@runtime_checkable
class Mixer(Protocol):
    """Two paths with one answer: fused, or through Φ when `hook_phi` is listened to.

    `hook_v` and `hook_z` are [batch, pos, head, d_head]; `hook_phi` stands between them.
    `on_demand` names hooks too large to cache unasked.
    """

    n_heads: int
    d_head: int
    on_demand: ClassVar[tuple[str, ...]]
    hook_v: HookPoint
    hook_phi: HookPoint
    hook_z: HookPoint

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]: ...

    def phi(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch head dest src"]: ...
