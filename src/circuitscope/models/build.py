"""The model of a config: the one place that knows which class reads tokens and which reads vectors."""

from circuitscope.models.config import ModelConfig
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.models.hooked_sequence import HookedSequenceModel
from circuitscope.models.stack import HookedStack


def build_model(config: ModelConfig, seed: int = 0) -> HookedStack:
    """A freshly initialized model; the seed determines its weights."""
    return (HookedSequenceModel if config.reads == "vectors" else HookedLM)(config, seed)
