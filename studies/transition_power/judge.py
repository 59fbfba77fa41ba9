"""Counts what the detector finds on drawn curves: false alarms where there is no step, steps found where there is one.

    python studies/transition_power/judge.py development    # → development.csv
    python studies/transition_power/judge.py held_out_first # → held_out_first.csv, kinds that were held out once
    python studies/transition_power/judge.py held_out       # → held_out.csv, run once, when nothing changes any more

With --keep FILE what was counted of every curve is appended to a file, and a judgement that was stopped goes on there.
"""

import argparse
import importlib
import json
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
from curves import POINTS
from scipy.stats import binomtest

from circuitscope.analysis.phases.detection import transitions


def judged(found, drawn):
    """What is counted of one curve: alarms, steps in place, intervals that hold the midpoint, unmarked alarms."""
    near = 0.05 * np.log((drawn.steps[-1] + drawn.steps[1]) / drawn.steps[1])
    largest = max(found, key=lambda t: abs(t.size), default=None)
    off = [abs(np.log((t.midpoint + drawn.steps[1]) / (drawn.midpoint + drawn.steps[1]))) for t in found]
    return {
        "alarm": bool(found),
        "unmarked": any(not any(t.onset_low <= b <= t.end_high for b in drawn.boundaries) for t in found),
        "in_place": bool(any(o <= near for o in off)),
        "covered": bool(largest and largest.low <= drawn.midpoint <= largest.high),
        "several": len(found) > 1,
        "not_judged": not found.judged,
        "statistic": found.statistic,
    }


def rows(kinds, curves, points=POINTS, keep=None):
    """What is counted of each curve, in order; those that the file `keep` has are taken from there."""
    kept = (
        {}
        if keep is None or not keep.exists()
        else {(r.kind, r.curve): r for r in pd.read_json(keep, lines=True).itertuples(index=False)}
    )
    for kind, draw in kinds.items():
        for i in range(curves):
            if (kind, i) in kept:
                yield kept[kind, i]._asdict()
                continue
            rng = np.random.default_rng([zlib.crc32(kind.encode()), i])
            drawn = draw(points[i % len(points)], rng)
            found = transitions(drawn.steps, drawn.values, clock=drawn.clock, draws=60)
            row = {"kind": kind, "curve": i, "points": len(drawn.steps), **judged(found, drawn)}
            if keep is not None:
                with keep.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            yield row


def summary(frame, column, group="kind"):
    """The share of a column by kind, with its 95% interval (Clopper and Pearson)."""
    out = []
    for kind, part in frame.groupby(group, sort=False):
        hits = int(part[column].sum())
        low, high = binomtest(hits, len(part)).proportion_ci()
        out.append(
            {group: kind, "curves": len(part), column: hits, "share": hits / len(part), "low": low, "high": high}
        )
    return pd.DataFrame(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", choices=["development", "held_out_first", "held_out"])
    parser.add_argument("--curves", type=int, default=200, help="of each kind")
    parser.add_argument("--only", choices=["nulls", "steps"], help="one half of the work; the table keeps the other")
    parser.add_argument("--keep", type=Path, help="a file for what is counted of every curve, to go on with later")
    options = parser.parse_args()
    made = importlib.import_module(options.kinds)
    tables = []
    if options.only != "steps":
        null = pd.DataFrame(rows(made.NULLS, options.curves, keep=options.keep))
        tables += [
            summary(null, "unmarked").assign(what="false alarms"),
            summary(null, "not_judged").assign(what="smooth, not judged"),
        ]
    if options.only != "nulls":
        step = pd.DataFrame(rows(made.STEPS, options.curves, keep=options.keep))
        tables += [
            summary(step, "in_place").assign(what="found in place"),
            summary(step[step.alarm], "covered").assign(what="interval holds the midpoint"),
            summary(step, "several").assign(what="more than one reported"),
        ]
    table = pd.concat([t.rename(columns={t.columns[2]: "count"}) for t in tables])
    table = table[["what", "kind", "curves", "count", "share", "low", "high"]]
    path = Path(__file__).with_name(f"{options.kinds}.csv")
    if options.only and path.exists():
        before = pd.read_csv(path)
        table = pd.concat([before[~before.what.isin(table.what)], table])
    table.to_csv(path, index=False, float_format="%.3f")
    print(table.to_string(index=False, float_format="%.3f"))


if __name__ == "__main__":
    main()
