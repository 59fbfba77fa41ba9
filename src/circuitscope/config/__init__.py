"""A run's config: its model, task and training. It comes from YAML, keywords or dotted overrides, and is strict."""

from circuitscope.config.identity import differ_in_seed_alone, differences
from circuitscope.config.overrides import override, parse_assignments, read_yaml
from circuitscope.config.run import RunConfig
from circuitscope.config.train import TrainConfig

__all__ = [
    "RunConfig",
    "TrainConfig",
    "differ_in_seed_alone",
    "differences",
    "override",
    "parse_assignments",
    "read_yaml",
]
