"""AdamW with weight decay on matrices only, and its state by parameter name."""

import torch
from torch import nn

from circuitscope.config.train import TrainConfig

_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; parameters with fewer than two axes or with a true `no_weight_decay` have no weight decay."""
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for parameter in model.parameters():
        bare = parameter.ndim < 2 or getattr(parameter, "no_weight_decay", False)
        (exempt if bare else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    device = next(model.parameters()).device
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cpu", "cuda"),
    )


def moments_of(optimizer: torch.optim.AdamW, model: nn.Module) -> dict[str, torch.Tensor]:
    """Both moments of every parameter, as `first.NAME` and `second.NAME`."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][key]
        for name, parameter in model.named_parameters()
        for moment, key in _MOMENTS.items()
    }


def restore_moments(
    optimizer: torch.optim.AdamW, model: nn.Module, moments: dict[str, torch.Tensor], step: int
) -> None:
    """Restores the moments as they were after `step` updates."""
    on_device = next(model.parameters()).device.type == "cuda"
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        counter = torch.tensor(float(step), dtype=torch.float32)
        state["step"] = counter.to(parameter.device) if on_device else counter
        for moment, key in _MOMENTS.items():
            saved = moments[f"{moment}.{name}"]
            state[key] = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(saved)
