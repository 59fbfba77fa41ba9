"""Counts what the detector says of the real runs of real_runs.py.

    python studies/transition_power/judge_real.py       # → real_found.csv (per run), real.csv (counts)

Of runs in which recall forms, a midpoint agrees with the knockout if it lies between the checkpoints before and after
which the circuit is there, with one checkpoint more on either side.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from circuitscope.analysis.phases.detection import transitions

HERE = Path(__file__).parent


def judged(curve, name):
    found = transitions(curve.step, curve[name], clock=curve.clock, draws=100)
    fall = name != "accuracy"
    right = [t for t in found if (t.size < 0) == fall]
    main = max(right, key=lambda t: abs(t.size), default=None)
    return {
        "curve": name,
        "transitions": len(found),
        "wrong_way": len(found) - len(right),
        "judged": found.judged,
        "statistic": round(found.statistic, 1),
        **{
            key: np.nan if main is None else round(getattr(main, key), 1)
            for key in ("onset", "midpoint", "end", "size")
        },
        "low": np.nan if main is None else round(main.low, 1),
        "high": np.nan if main is None else round(main.high, 1),
    }


def agrees(row, every):
    return row.low <= row.formed_by + every and row.high >= row.formed_after - every


def main():
    runs = pd.read_csv(HERE / "real_runs.csv")
    curves = dict(iter(pd.read_csv(HERE / "real_curves.csv").groupby("run")))
    rows = [
        {**run, **judged(curves[run["run"]], name)}
        for run in runs.to_dict("records")
        for name in ("loss", "train_loss", "accuracy")
    ]
    found = pd.DataFrame(rows)
    found.to_csv(HERE / "real_found.csv", index=False)
    counts = []
    for (kind, curve), part in found.groupby(["kind", "curve"], sort=False):
        formed = part[part.formed_by.notna()]
        hit = part.transitions > 0
        low, high = binomtest(int(hit.sum()), len(part)).proportion_ci()
        near = [agrees(row, row.formed_by - row.formed_after) for row in formed[formed.transitions > 0].itertuples()]
        counts.append(
            {
                "kind": kind,
                "curve": curve,
                "runs": len(part),
                "with_transition": int(hit.sum()),
                "low": round(low, 3),
                "high": round(high, 3),
                "not_judged": int((~part.judged).sum()),
                "wrong_way": int((part.wrong_way > 0).sum()),
                "formed": len(formed),
                "formed_with_transition": int((formed.transitions > 0).sum()),
                "agree_with_knockout": int(np.sum(near)),
            }
        )
    table = pd.DataFrame(counts)
    table.to_csv(HERE / "real.csv", index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
