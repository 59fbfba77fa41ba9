"""Measures how often `phases.transitions` errs, on random curves with and without a transition.

    python -m circuitscope.analysis.phases.simulation               # the tables of docs/phases.md
    python -m circuitscope.analysis.phases.simulation --calibrate   # the critical values in detection.py

Sigma is the marginal standard deviation of the noise, averaged over the curve, whatever its correlation rho from one
evaluation to the next. Every row of a table has its own random numbers.
"""

import argparse
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from circuitscope.analysis.phases.detection import CRITICAL_POINTS, critical, search, transitions
from circuitscope.analysis.phases.evidence import Grid, axis, sigmoid

Array = np.ndarray

SPACINGS = ("even", "log")
SHORT, LONG, DENSE = (20, 30), (45, 60), (100, 150)
SIZES = (5, 8, 12, 20)
MEANS = ("constant", "linear", "log-linear", "exponential", "power law")
NULLS = (
    *[(mean, f"rho {rho}") for mean in MEANS for rho in (0, 0.5, 0.8)],
    *[(mean, f"rho {rho}, falling to a tenth") for mean in ("constant", "exponential") for rho in (0, 0.8)],
    ("decay to a plateau", "rho 0"),
    ("decay to a plateau", "rho 0.5"),
    ("accuracy rising to 1", "binomial"),
)


def evaluations(points: int, spacing: str) -> Float[Array, " step"]:
    """The steps of the evaluations: every 50 steps from 0, or from 10 to 10,000 in equal factors."""
    return 50.0 * np.arange(points) if spacing == "even" else np.geomspace(10, 10_000, points)


def correlated(points: int, curves: int, rho: float, rng: np.random.Generator) -> Float[Array, "step curve"]:
    """AR(1) noise with standard deviation 1."""
    noise = rng.standard_normal((points, curves))
    for i in range(1, points):
        noise[i] = rho * noise[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return noise


def smooth(
    mean: str, steps: Float[Array, " step"], curves: int, rng: np.random.Generator
) -> Float[Array, "step curve"]:
    """Means without a transition, in units of sigma; they rise or fall by 3 to 100."""
    u, _ = axis(steps)
    x = ((steps - steps[0]) / (steps[-1] - steps[0]))[:, None]
    v = ((u - u[0]) / (u[-1] - u[0]))[:, None]
    size = np.exp(rng.uniform(np.log(3), np.log(100), curves)) * rng.choice([-1, 1], curves)
    scale = np.exp(rng.uniform(np.log(0.03), 0, curves))
    if mean == "constant":
        return np.zeros((len(steps), curves))
    if mean == "linear":
        return np.asarray(size * x)
    if mean == "log-linear":
        return np.asarray(size * v)
    if mean == "exponential":
        return np.asarray(size * np.exp(-x / scale))
    if mean == "power law":
        return np.asarray(size * (1 + x / scale) ** -rng.uniform(0.3, 2, curves))
    return np.asarray(size * np.exp(-x / (0.03 + 0.07 * scale)))  # decay to a plateau


def without(kind: tuple[str, str], steps: Float[Array, " step"], curves: int, rng: np.random.Generator) -> Array:
    mean, noise = kind
    if noise == "binomial":
        x = ((steps - steps[0]) / (steps[-1] - steps[0]))[:, None]
        p = 1 - np.exp(-x / np.exp(rng.uniform(np.log(0.03), np.log(0.5), curves)))
        return np.asarray(rng.binomial(512, p) / 512)
    rho = float(noise.split(",")[0].removeprefix("rho "))
    drawn = correlated(len(steps), curves, rho, rng)
    if "tenth" in noise:
        u, _ = axis(steps)
        spread = 10.0 ** (-(u - u[0]) / (u[-1] - u[0]))
        drawn *= (spread / np.sqrt((spread**2).mean()))[:, None]
    return np.asarray(smooth(mean, steps, curves, rng) + drawn)


@dataclass(frozen=True)
class Drawn:
    values: Float[Array, "step curve"]
    midpoint: Float[Array, " curve"]


def stepped(
    steps: Float[Array, " step"], size: float, wide: bool, base: str, rho: float, curves: int, rng: np.random.Generator
) -> Drawn:
    """Curves with one transition, up or down, with four evaluations or more before its onset and after its end.

    From 10% to 90% it takes 2% to 8% of the log-step range, or 8% to 20% if `wide`.
    """
    u, _ = axis(steps)
    width = (u[-1] - u[0]) * (rng.uniform(0.08, 0.2, curves) if wide else rng.uniform(0.02, 0.08, curves))
    midpoint = rng.uniform(u[3] + width / 2, u[-4] - width / 2)
    rise = size * rng.choice([-1, 1], curves) * sigmoid(u, midpoint, width).T
    return Drawn(smooth(base, steps, curves, rng) + rise + correlated(len(steps), curves, rho, rng), midpoint)


def _rng(*words: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(" ".join(map(str, words)).encode()))


def _all(grid: Grid, values: Float[Array, "step curve"]) -> list[list[tuple[float, float]]]:
    """What `transitions` finds in each curve, with one scan for all; `search` gives up at once on weak candidates."""
    scan = grid.scan(values)
    return [search(grid, values[:, i], scan, i)[0] for i in range(values.shape[1])]


def false_alarms(curves: int = 40, kinds: Iterable[tuple[str, str]] = NULLS) -> dict[tuple[str, str], float]:
    """Share of curves without a transition in which one is found; `curves` for each of 4 lengths and 2 spacings."""
    rates: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    for points in (*SHORT, *LONG):
        for spacing in SPACINGS:
            grid = Grid(evaluations(points, spacing))
            for kind, hits in rates.items():
                drawn = without(kind, grid.steps, curves, _rng("null", points, spacing, kind))
                hits.append(float(np.mean([bool(shapes) for shapes in _all(grid, drawn)])))
    return {kind: float(np.mean(hits)) for kind, hits in rates.items()}


@dataclass(frozen=True)
class Row:
    points: tuple[int, ...]
    wide: bool
    base: str
    rho: float


ROWS = (
    *[Row(p, False, b, r) for p in (SHORT, LONG, DENSE) for b in ("constant", "exponential") for r in (0, 0.5, 0.8)],
    *[Row(p, True, b, 0) for p in (SHORT, LONG, DENSE) for b in ("constant", "exponential")],
)


def found(
    curves: int = 20, rows: Iterable[Row] = ROWS, sizes: Iterable[float] = SIZES
) -> dict[Row, dict[float, float]]:
    """Share of transitions found with a midpoint within 5% of the log-step range, by size in sigma."""
    sizes = tuple(sizes)
    hits: dict[Row, dict[float, list[float]]] = {row: {size: [] for size in sizes} for row in rows}
    for points in (*SHORT, *LONG, *DENSE):
        for spacing in SPACINGS:
            grid = Grid(evaluations(points, spacing))
            for row in hits:
                if points not in row.points:
                    continue
                for size in sizes:
                    rng = _rng("step", points, spacing, row, size)
                    drawn = stepped(grid.steps, size, row.wide, row.base, row.rho, curves, rng)
                    scan = grid.scan(drawn.values)
                    near = np.abs(scan.midpoint - drawn.midpoint) <= 0.05 * grid.range
                    hits[row][size].append(float(((scan.evidence > critical(points)) & near).mean()))
    return {row: {size: float(np.mean(h)) for size, h in by.items()} for row, by in hits.items()}


@dataclass(frozen=True)
class Whole:
    """Results on curves of 30 points with one or two narrow transitions of 20 sigma."""

    more: float  # share where more than one is reported though there is only one
    coverage: float  # share where the 95% interval of the midpoint holds it
    both: float  # share where both of two are found


def whole(curves: int = 40) -> Whole:
    """Tests `transitions` as a whole."""
    more, covered, both = [], [], []
    for spacing in SPACINGS:
        steps = evaluations(30, spacing)
        u, s0 = axis(steps)
        rng = _rng("whole", spacing)
        for base in ("constant", "exponential"):
            for rho in (0.0, 0.5):
                drawn = stepped(steps, 20, False, base, rho, curves // 4, rng)
                for values, middle in zip(drawn.values.T, np.exp(drawn.midpoint) - s0, strict=True):
                    result = transitions(steps, values)
                    more.append(len(result) > 1)
                    if result.main is not None:
                        covered.append(result.main.low <= middle <= result.main.high)
        for _ in range(curves // 2):
            centres = np.sort(rng.choice(u[[7, 8, 9]], 1)), np.sort(rng.choice(u[[19, 20, 21]], 1))
            rise = sum(20 * sigmoid(u, m, 0.05 * (u[[-1]] - u[0]))[0] for m in centres)
            result = transitions(steps, rise + rng.standard_normal(len(u)), draws=10)
            places = np.log(np.array([r.midpoint for r in result]) + s0)
            both.append(all(len(places) and np.abs(places - m[0]).min() < 0.05 * (u[-1] - u[0]) for m in centres))
    return Whole(float(np.mean(more)), float(np.mean(covered)), float(np.mean(both)))


def calibrate(points: int, curves: int = 200, level: float = 0.97) -> tuple[float, tuple[str, str]]:
    """The evidence that a share `level` of curves stays below, on the worst kind without a transition; and the kind."""
    kinds: dict[tuple[str, str], list[Array]] = {kind: [] for kind in NULLS}
    for spacing in SPACINGS:
        grid = Grid(evaluations(points, spacing))
        for kind, values in kinds.items():
            rng = _rng("calibrate", points, spacing, kind)
            values.append(grid.scan(without(kind, grid.steps, curves, rng)).evidence)
    limits = {kind: float(np.quantile(np.concatenate(v), level)) for kind, v in kinds.items()}
    worst = max(limits, key=lambda kind: limits[kind])
    return limits[worst], worst


def _span(points: tuple[int, ...]) -> str:
    return f"{points[0]} to {points[-1]}"


def tables(alarms: dict[tuple[str, str], float], shares: dict[Row, dict[float, float]], result: Whole) -> str:
    """The tables of docs/phases.md."""
    lines = ["| curve without a transition | noise | false alarms |", "|---|---|---|"]
    lines += [f"| {mean} | {noise} | {rate:.1%} |" for (mean, noise), rate in alarms.items()]
    lines += ["", "| points | 10% to 90% takes | baseline | rho | " + " | ".join(f"{s} σ" for s in SIZES) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(SIZES))
    for row, rates in shares.items():
        width = "8% to 20%" if row.wide else "2% to 8%"
        cells = " | ".join(f"{rates[size]:.0%}" for size in SIZES)
        lines.append(f"| {_span(row.points)} | {width} | {row.base} | {row.rho} | {cells} |")
    lines += [
        "",
        "| 30 points, narrow transitions of 20 σ | share |",
        "|---|---|",
        f"| a second transition reported where there is one | {result.more:.1%} |",
        f"| 95% interval of the midpoint holds it | {result.coverage:.1%} |",
        f"| both of two found | {result.both:.1%} |",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true", help="print the critical values instead")
    if parser.parse_args().calibrate:
        for points in CRITICAL_POINTS:
            value, (mean, noise) = calibrate(points)
            print(f"{points:4d} points: {value:5.2f}   worst: {mean}, {noise}", flush=True)
    else:
        print(tables(false_alarms(), found(), whole()))


if __name__ == "__main__":
    main()
