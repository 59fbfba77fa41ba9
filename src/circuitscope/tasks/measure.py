"""A quantity that is measured on sequences, with its mean and the interval of that mean."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.devices import on_cpu
from circuitscope.tasks.batch import Batch

_DRAWS = 1000  # resampled sets of sequences behind an interval


@dataclass(frozen=True)
class Measure:
    """The sum of a quantity in each sequence, and how often it was measured there: the mean is Σ total / Σ count."""

    total: Float[Tensor, " batch"]
    count: Float[Tensor, " batch"]

    @staticmethod
    def at_labels(batch: Batch, values: Float[Tensor, " label"]) -> "Measure":
        """From a value at each label of a batch; where it is nan, nothing was measured."""
        where, _ = batch.labelled()
        sequence, values = where // batch.length, on_cpu([values])[0].double()
        known = ~values.isnan()
        empty = torch.zeros(len(batch), dtype=torch.float64)
        return Measure(empty.index_add(0, sequence, values.nan_to_num()), empty.index_add(0, sequence, known.double()))

    @staticmethod
    def joined(parts: Sequence["Measure"]) -> "Measure":
        """The same quantity on the sequences of several batches."""
        return Measure(torch.cat([part.total for part in parts]), torch.cat([part.count for part in parts]))

    def mean(self) -> float:
        """The mean over all that was measured; nan if nothing was."""
        return float(self.total.sum() / self.count.sum())

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """The 95% interval of the mean: whole sequences are drawn again, as many as there are, with replacement."""
        n, draw = len(self.total), np.random.default_rng(seed)
        times = torch.from_numpy(draw.multinomial(n, np.full(n, 1 / n), size=_DRAWS)).double()
        means = (times @ self.total) / (times @ self.count)
        low, high = means.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high
