"""Reads circuits out of models: scores, decay, phases, interventions and probes. Models go in, tables come out.

Scores and knockouts share one definition of the edges that a circuit uses (`scores.edges`). Every function takes a
model and a batch, or a bare matrix. `checkpoints` runs analyses over the checkpoints of a run. A name is imported when
it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from circuitscope.analysis import probes as probes
    from circuitscope.analysis.causal.circuit import find_circuit as find_circuit
    from circuitscope.analysis.causal.interventions import Effect as Effect
    from circuitscope.analysis.causal.interventions import ablate as ablate
    from circuitscope.analysis.causal.interventions import accuracy as accuracy
    from circuitscope.analysis.causal.interventions import cut as cut
    from circuitscope.analysis.causal.interventions import knock_out as knock_out
    from circuitscope.analysis.causal.parts import Circuit as Circuit
    from circuitscope.analysis.causal.patching import attribution_patching as attribution_patching
    from circuitscope.analysis.causal.patching import interchange as interchange
    from circuitscope.analysis.checkpoints.runner import analysis_results as analysis_results
    from circuitscope.analysis.checkpoints.runner import analysis_table as analysis_table
    from circuitscope.analysis.checkpoints.runner import circuits as circuits
    from circuitscope.analysis.decay.gradient_reach import gradient_reach as gradient_reach
    from circuitscope.analysis.decay.layer_decay import layer_decay as layer_decay
    from circuitscope.analysis.decay.rows import decay_rows as decay_rows
    from circuitscope.analysis.decay.transition import transition_product as transition_product
    from circuitscope.analysis.reading.opened import Mixing as Mixing
    from circuitscope.analysis.reading.opened import matrices as matrices
    from circuitscope.analysis.reading.opened import opened as opened
    from circuitscope.analysis.reading.opened import pattern_reading as pattern_reading
    from circuitscope.analysis.registry import analysis as analysis
    from circuitscope.analysis.registry import run_analysis as run_analysis
    from circuitscope.analysis.scores.edges import Edges as Edges
    from circuitscope.analysis.scores.edges import named_edges as named_edges
    from circuitscope.analysis.scores.head_weights import compositions as compositions
    from circuitscope.analysis.scores.head_weights import copying_score as copying_score
    from circuitscope.analysis.scores.registry import edge_score as edge_score
    from circuitscope.analysis.scores.registry import row_score as row_score
    from circuitscope.analysis.scores.weight_on_edges import binding_score as binding_score
    from circuitscope.analysis.scores.weight_on_edges import duplicate_score as duplicate_score
    from circuitscope.analysis.scores.weight_on_edges import induction_score as induction_score
    from circuitscope.analysis.scores.weight_on_edges import previous_token_score as previous_token_score
    from circuitscope.analysis.scores.weight_on_edges import recall_score as recall_score
    from circuitscope.analysis.scores.weight_on_edges import score as score
    from circuitscope.analysis.scores.weight_on_edges import summarize as summarize
    from circuitscope.analysis.scores.weight_on_edges import value_score as value_score

_PUBLIC = {
    "causal.circuit": ("find_circuit",),
    "causal.parts": ("Circuit",),
    "causal.interventions": ("Effect", "ablate", "accuracy", "cut", "knock_out"),
    "causal.patching": ("attribution_patching", "interchange"),
    "checkpoints.runner": ("analysis_results", "analysis_table", "circuits"),
    "decay.gradient_reach": ("gradient_reach",),
    "decay.layer_decay": ("layer_decay",),
    "decay.rows": ("decay_rows",),
    "decay.transition": ("transition_product",),
    "reading.opened": ("Mixing", "matrices", "opened", "pattern_reading"),
    "registry": ("analysis", "run_analysis"),
    "scores.edges": ("Edges", "named_edges"),
    "scores.head_weights": ("compositions", "copying_score"),
    "scores.registry": ("edge_score", "row_score"),
    "scores.weight_on_edges": (
        "binding_score",
        "duplicate_score",
        "induction_score",
        "previous_token_score",
        "recall_score",
        "score",
        "summarize",
        "value_score",
    ),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["probes", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"circuitscope.analysis.{_MODULE_OF[name]}"), name)
    if name == "probes":
        return importlib.import_module("circuitscope.analysis.probes")
    raise AttributeError(f"module 'circuitscope.analysis' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
