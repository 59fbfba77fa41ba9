"""Compares the detector with others on the curves of development.py: false alarms, and 12 σ steps found in place.

    python studies/transition_power/compare.py METHOD …      # → comparison.csv, one row per method and kind

    mixture       circuitscope.analysis.phases, as it is
    ruptures      PELT, an autoregressive cost, penalty 3 · log(points) · σ² (pip install ruptures)
    ruptures-linear  PELT, piecewise straight lines, the same penalty
    beast         a Bayesian ensemble of trends, a change of probability above one half (pip install Rbeast)
    bayes-factor  what circuitscope had before: with commit f70a668 on PYTHONPATH

Methods other than the mixture get the curve over the log of its steps; those that ask for σ get the true one.
"""

import sys
import zlib
from pathlib import Path

import development
import numpy as np
import pandas as pd
from curves import POINTS, Drawn

NULLS = ("constant, ρ 0.5", "exponential, ρ 0", "two exponentials, ρ 0.5", "power law, ρ 0.5", "stretched, ρ 0",
         "logarithm, ρ 0.8", "exponential, falling", "schedule", "accuracy rising to 1")  # fmt: skip
TABLE = Path(__file__).with_name("comparison.csv")


def mixture(drawn: Drawn):
    from circuitscope.analysis.phases.detection import transitions

    return [t.midpoint for t in transitions(drawn.steps, drawn.values, clock=drawn.clock, draws=2)]


def bayes_factor(drawn: Drawn):
    from circuitscope.analysis.phases.detection import transitions

    return [t.midpoint for t in transitions(drawn.steps, drawn.values, draws=2)]


def _pelt(drawn, cost, **options):
    import ruptures

    scale = np.median(np.abs(np.diff(drawn.values))) / 0.954  # robust: of independent noise this is σ
    y = drawn.values / max(scale, 1e-9)
    found = ruptures.Pelt(model=cost, min_size=4, jump=1, **options).fit(y).predict(pen=3 * np.log(len(y)))
    return [float(drawn.steps[i]) for i in found[:-1]]


def ruptures_ar(drawn):
    return _pelt(drawn, "ar", params={"order": 1})


def ruptures_linear(drawn):
    return _pelt(drawn, "clinear")


def beast(drawn):
    import Rbeast

    found = Rbeast.beast(drawn.values, season="none", quiet=True, print_param=False, print_progress=False)
    places = np.atleast_1d(found.trend.cp)
    likely = np.atleast_1d(found.trend.cpPr)
    return [float(drawn.steps[int(p) - 1]) for p, c in zip(places, likely, strict=True) if np.isfinite(p) and c > 0.5]


METHODS = {
    "mixture": mixture,
    "bayes-factor": bayes_factor,
    "ruptures": ruptures_ar,
    "ruptures-linear": ruptures_linear,
    "beast": beast,
}


def main(methods, curves=24):
    kinds = {name: development.NULLS[name] for name in NULLS}
    kinds |= {name: draw for name, draw in development.STEPS.items() if ", 12 σ" in name}
    rows = []
    for kind, draw in kinds.items():
        for i in range(curves):
            drawn = draw(POINTS[i % len(POINTS)], np.random.default_rng([zlib.crc32(kind.encode()), i]))
            near = 0.05 * np.log((drawn.steps[-1] + drawn.steps[1]) / drawn.steps[1])
            for method in methods:
                found = METHODS[method](drawn)
                off = [abs(np.log((f + drawn.steps[1]) / (drawn.midpoint + drawn.steps[1]))) for f in found]
                hit = any(o <= near for o in off) if np.isfinite(drawn.midpoint) else bool(found)
                what = "found in place" if np.isfinite(drawn.midpoint) else "false alarms"
                rows.append({"method": method, "what": what, "kind": kind, "count": int(hit), "curves": 1})
    table = pd.DataFrame(rows).groupby(["method", "what", "kind"], sort=False).sum().reset_index()
    if TABLE.exists():
        before = pd.read_csv(TABLE)
        table = pd.concat([before[~before.method.isin(methods)], table])
    table.to_csv(TABLE, index=False)
    print(table[table.method.isin(methods)].groupby(["method", "what"])[["count", "curves"]].sum())


if __name__ == "__main__":
    main(sys.argv[1:] or list(METHODS)[:1])
