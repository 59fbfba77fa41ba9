"""Random numbers for analyses: a generator of their own, so that torch's global one is left alone."""

import torch

from circuitscope.errors import UserError, shown


def seeded(seed: int) -> torch.Generator:
    """A generator that starts from a seed."""
    if not 0 <= seed < 2**63:
        raise UserError(f"seed: expected a whole number from 0 to 2^63 − 1, got {shown(seed)}")
    return torch.Generator().manual_seed(seed)
