"""Layer norm with TransformerLens's two hooks."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from circuitscope.hooks import hook, wanted


class HookedLayerNorm(nn.LayerNorm):
    """(x − mean) / scale · weight + bias; `hook_scale` carries the scale on demand, `hook_normalized` the result."""

    def __init__(self, d_model: int, eps: float):
        super().__init__(d_model, eps=eps)
        self.hook_scale, self.hook_normalized = hook("batch pos scale"), hook("batch pos d_model")

    def forward(self, input: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead d_model"]:
        if wanted(self.hook_scale):
            centred = input - input.mean(-1, keepdim=True)
            scale = self.hook_scale((centred.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
            normed = centred / scale * self.weight + self.bias
        else:
            normed = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        out: Tensor = self.hook_normalized(normed)
        return out
