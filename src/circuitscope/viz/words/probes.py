"""A probe in words: where it reads no more than its control."""

from collections.abc import Iterator

import pandas as pd

from circuitscope.analysis.probes.control import no_better


def control_lines(rows: pd.DataFrame) -> Iterator[str]:
    """A sentence for each hook and role of one checkpoint at which the control is as good as the probe."""
    for row in rows[no_better(rows)].to_dict("records"):
        yield (
            f"{row['hook']} at {row['role']}: the control, whose labels are shuffled, reads as well"
            f" ({row['control']:.3f} beside {row['accuracy']:.3f}, 95% interval {row['low']:.3f} to {row['high']:.3f}):"
            " this probe says nothing about what the model represents there"
        )
