"""What analyses found in one run: their tables by name, and what follows from several of them, each computed once."""

from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from circuitscope.analysis.causal.circuit import circuit_of
from circuitscope.analysis.causal.parts import Circuit
from circuitscope.analysis.phases.order import Order
from circuitscope.analysis.phases.timeline import Timeline, timeline
from circuitscope.runs.run import Run


@dataclass
class Results:
    """The tables of a run's analyses.

    Args:
        steps: the checkpoints that were read, in order.
        sequences: how many held-out sequences each number is averaged over.
        tables: the tables, by the name of their analysis.
        partly: whether the run has checkpoints that were not asked for.
        earlier: the circuit that was found before and is kept beside the run, if it is not among the tables.
    """

    run: Run
    steps: list[int]
    sequences: int
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    partly: bool = False
    earlier: Circuit | None = None

    def __getitem__(self, name: str) -> pd.DataFrame:
        return self.tables[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tables

    @cached_property
    def timeline(self) -> Timeline:
        """Transitions of loss and accuracy and, where they are known, of the scores."""
        return timeline(self.run, self.tables.get("scores"), self.known_circuit)

    @property
    def order(self) -> Order:
        """What happened first, among loss, metric and, where the circuit is known, its parts."""
        return self.timeline.order(self.known_circuit)

    @property
    def known_circuit(self) -> Circuit | None:
        """The recall circuit, where it was looked for now or before."""
        return self.circuit if "circuit" in self else self.earlier

    @cached_property
    def circuit(self) -> Circuit:
        """The recall circuit of the last checkpoint; the analysis "circuit" must be among the tables."""
        rows = self["circuit"]
        return circuit_of(rows[rows.step == rows.step.max()])
