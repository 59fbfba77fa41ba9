"""AdamW with weight decay on matrices only, or on everything, its state by parameter name, and groups of parameters."""

import fnmatch
import re

import torch
from torch import nn

from circuitscope.config.train import TrainConfig
from circuitscope.errors import UserError

_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; parameters with fewer than two axes or with a true `no_weight_decay` have no weight decay.

    With `decay_on: all` every parameter has it.

    A group's `factor` says by how much its learning rate differs from the config's `lr` (`lr_groups`).
    """
    factors = lr_factors(model, config)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        exempt = config.decay_on == "matrices" and (parameter.ndim < 2 or getattr(parameter, "no_weight_decay", False))
        groups.setdefault((exempt, factors[name]), []).append(parameter)
    device = next(model.parameters()).device
    return torch.optim.AdamW(
        [
            {"params": groups[key], "weight_decay": 0.0 if key[0] else config.weight_decay, "factor": key[1]}
            for key in sorted(groups)
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cpu", "cuda"),
    )


def lr_factors(model: nn.Module, config: TrainConfig) -> dict[str, float]:
    """The factor of the learning rate of each parameter, by name; a pattern that no parameter matches is an error."""
    names = [name for name, _ in model.named_parameters()]
    factors = dict.fromkeys(names, 1.0)
    for pattern, factor in config.lr_groups.items():
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise UserError(
                f"train.lr_groups: no parameter matches '{pattern}'; there are {', '.join(sorted(set(_last(names))))}"
                " (write * for what comes before, as in *.A_log)"
            )
        factors |= dict.fromkeys(matched, factor)
    return factors


def _last(names: list[str]) -> list[str]:
    """Names without the place of their layer: mixer.A_log for blocks.0.mixer.A_log."""
    return [re.sub(r"^blocks\.\d+\.", "", name) for name in names]


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of all layers that play the same part, by its name: embed, conv, ssm.A_log, mlp.into.

    A group's name is the parameter's name without its layer, without `mixer.`, without numbers, and without a final
    weight or bias. So the conv of every layer, with its bias, is one group.
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts = [part for part in _last([name])[0].removeprefix("mixer.").split(".") if not part.isdecimal()]
        role = parts[:-1] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts
        groups.setdefault(".".join(role), []).append(parameter)
    return groups


def gradient_norms(groups: dict[str, list[nn.Parameter]]) -> torch.Tensor:
    """The norm of the gradient of each group, in the order of the groups."""
    norm = torch.linalg.vector_norm
    found = []
    for several in groups.values():
        each = [norm(p.grad) for p in several if p.grad is not None]
        found.append(norm(torch.stack(each)) if each else several[0].new_zeros(()))
    return torch.stack(found)


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
