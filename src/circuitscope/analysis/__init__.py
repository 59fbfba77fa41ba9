"""Reading circuits out of models: scores, decay, phases, interventions. Model and tokens in, tables out.

Scores and knockouts share one definition of which edges a circuit uses (`edges`); every function takes a
model and a batch, or a bare matrix, and `over_training` runs them over the checkpoints of a run.
"""

import importlib
from typing import TYPE_CHECKING, Any

from circuitscope.analysis.circuit import Circuit as Circuit
from circuitscope.analysis.circuit import find_circuit as find_circuit
from circuitscope.analysis.decay import layer_decay as layer_decay
from circuitscope.analysis.decay_rows import decay_rows as decay_rows
from circuitscope.analysis.edges import Edges as Edges
from circuitscope.analysis.edges import named_edges as named_edges
from circuitscope.analysis.gradient_reach import gradient_reach as gradient_reach
from circuitscope.analysis.interventions import Effect as Effect
from circuitscope.analysis.interventions import ablate as ablate
from circuitscope.analysis.interventions import accuracy as accuracy
from circuitscope.analysis.interventions import cut as cut
from circuitscope.analysis.interventions import knock_out as knock_out
from circuitscope.analysis.matrices import Mixing as Mixing
from circuitscope.analysis.matrices import matrices as matrices
from circuitscope.analysis.patching import attribution_patching as attribution_patching
from circuitscope.analysis.patching import interchange as interchange
from circuitscope.analysis.scores import binding_score as binding_score
from circuitscope.analysis.scores import duplicate_score as duplicate_score
from circuitscope.analysis.scores import induction_score as induction_score
from circuitscope.analysis.scores import previous_token_score as previous_token_score
from circuitscope.analysis.scores import recall_score as recall_score
from circuitscope.analysis.scores import score as score
from circuitscope.analysis.scores import summarize as summarize
from circuitscope.analysis.scores import value_score as value_score
from circuitscope.analysis.transition import transition_product as transition_product
from circuitscope.analysis.weights import compositions as compositions
from circuitscope.analysis.weights import copying_score as copying_score

if TYPE_CHECKING:
    from circuitscope.analysis import over_training as over_training
    from circuitscope.analysis import probes as probes


def __getattr__(name: str) -> Any:
    if name in ("over_training", "probes"):  # loaded when asked for: scikit-learn and pyarrow take their time
        return importlib.import_module(f"circuitscope.analysis.{name}")
    raise AttributeError(f"module 'circuitscope.analysis' has no attribute '{name}'")
