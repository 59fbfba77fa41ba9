"""Counts what the detector says of the real runs of real_runs.py.

    python studies/transition_power/judge_real.py       # → real_found.csv (per run), real.csv (counts)

Losses are read against the context-free level, accuracies against that of answering with any value of the context: a
transition that goes no further is marked, counted apart, and is none of a circuit. Recall counts as formed where the
accuracy ends above that of any value. Then a transition agrees with the knockout if its interval meets the stretch
between the checkpoints before and after which the circuit is there, with one checkpoint more on either side.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from circuitscope.analysis.phases.detection import transitions
from circuitscope.analysis.phases.verdict import accuracy_level, loss_level
from circuitscope.tasks import MQAR

HERE = Path(__file__).parent
TASK = MQAR(length=16, pairs=4, vocab_size=128)  # of all these runs, but for the shuffled labels
LEVELS = {
    "loss": loss_level(TASK.context_free),
    "train_loss": loss_level(TASK.context_free),
    "accuracy": accuracy_level(TASK.chance),
}


def judged(run, curve, name):
    found = transitions(curve.step, curve[name], clock=curve.clock, level=LEVELS[name], draws=100)
    fall = name != "accuracy"
    right = [t for t in found.beyond if (t.size < 0) == fall]
    main = max(right, key=lambda t: t.steepness, default=None)
    formed = recall_formed(run)
    return {
        "curve": name,
        "transitions": len(found.beyond),
        "marked": len(found) - len(found.beyond),
        "wrong_way": len(found.beyond) - len(right),
        "judged": found.judged,
        "statistic": round(found.statistic, 1),
        **{
            key: np.nan if main is None else round(getattr(main, key), 1)
            for key in ("onset", "midpoint", "end", "size", "low", "high")
        },
        "formed": formed,
        "main_agrees": formed and main is not None and agrees(main, run),
        "one_agrees": formed and any(agrees(t, run) for t in right),
    }


def recall_formed(run):
    """A knockout shows when the recall edges began to matter; that is recall only if any value would not do as well."""
    return bool(np.isfinite(run["formed_by"]) and run["accuracy"] > TASK.chance + LEVELS["accuracy"].slack)


def agrees(one, run):
    every = run["formed_by"] - run["formed_after"]
    return bool(one.low <= run["formed_by"] + every and one.high >= run["formed_after"] - every)


def main():
    runs = pd.read_csv(HERE / "real_runs.csv")
    curves = dict(iter(pd.read_csv(HERE / "real_curves.csv").groupby("run")))
    rows = [{**run, **judged(run, curves[run["run"]], name)} for run in runs.to_dict("records") for name in LEVELS]
    found = pd.DataFrame(rows)
    found.to_csv(HERE / "real_found.csv", index=False)
    counts = []
    for (kind, curve), part in found.groupby(["kind", "curve"], sort=False):
        formed = part[part.formed]
        hit = part.transitions > 0
        low, high = binomtest(int(hit.sum()), len(part)).proportion_ci()
        counts.append(
            {
                "kind": kind,
                "curve": curve,
                "runs": len(part),
                "with_transition": int(hit.sum()),
                "low": round(low, 3),
                "high": round(high, 3),
                "only_marked": int((~hit & (part.marked > 0)).sum()),
                "not_judged": int((~part.judged).sum()),
                "wrong_way": int((part.wrong_way > 0).sum()),
                "formed": len(formed),
                "formed_with_transition": int((formed.transitions > 0).sum()),
                "formed_not_judged": int((~formed.judged).sum()),
                "main_agrees": int(formed.main_agrees.sum()),
                "one_agrees": int(formed.one_agrees.sum()),
            }
        )
    table = pd.DataFrame(counts)
    table.to_csv(HERE / "real.csv", index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
