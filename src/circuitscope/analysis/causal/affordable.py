"""How many sequences interventions run on by default: fewer where the mixing matrices that they build are large."""

import torch

from circuitscope.analysis.reading.opened import opened
from circuitscope.config import RunConfig
from circuitscope.models.build import build_model

_ENTRIES = 2**27  # of Φ, over all sequences: 256 sequences of length 64 with 128 channels
_FEWEST = 16


@torch.no_grad()
def affordable(config: RunConfig) -> int:
    """The largest number of sequences whose Φ has at most _ENTRIES entries in every layer, but at least _FEWEST."""
    model = build_model(config.model).eval()  # how many units a layer has does not depend on its weights
    inputs = config.task.batch(0, size=1).inputs
    units = [reading.core.size for _, reading in opened(model).walk(inputs) if not reading.no_phi]
    return max(_FEWEST, _ENTRIES // (max(units, default=1) * inputs.shape[1] ** 2))
