"""`python -m benchmarks`: runs the benchmarks, prints their tables and keeps them in results.md.

Each benchmark has a part of results.md, with the date and the machine, which is written as soon as it is done. With
`--only` the other parts stay as they are; results.json holds what they were made from.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    analysis,
    batches,
    batches_by_task,
    busy_cores,
    default_run,
    effective_attention,
    generation,
    hooks,
    layer_step,
    prefetch,
    probes,
    profile_step,
    saving,
    scan,
    startup,
    step,
    sweeps,
    vector_step,
)
from benchmarks.rows import Row, Section, markdown

_BENCHMARKS: dict[str, Callable[[bool], Section]] = {
    "startup": startup.measure,
    "batches": batches.measure,
    "tasks": batches_by_task.measure,
    "hooks": hooks.measure,
    "step": step.measure,
    "vectors": vector_step.measure,
    "scan": scan.measure,
    "effective": effective_attention.measure,
    "layers": layer_step.measure,
    "profile": profile_step.measure,
    "prefetch": prefetch.measure,
    "generation": generation.measure,
    "saving": saving.measure,
    "default": default_run.measure,
    "analysis": analysis.measure,
    "probes": probes.measure,
    "busy": busy_cores.measure,
    "sweeps": sweeps.measure,
}
_RESULTS = Path(__file__).with_name("results.json")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", help=f"some of {','.join(_BENCHMARKS)}; the others keep what they measured before")
    parser.add_argument("--quick", action="store_true", help="check that all runs; its numbers mean nothing, no file")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",") if options.only else list(_BENCHMARKS)
    if wrong := [name for name in chosen if name not in _BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(wrong)}; there are: {', '.join(_BENCHMARKS)}")
    for name in chosen:
        print(f"{name} …", file=sys.stderr, flush=True)
        part = {"measured": machine(), **asdict(_BENCHMARKS[name](options.quick))}
        print(_part(name, part) + "\n", flush=True)
        if not options.quick:
            keep(name, part)


def keep(name: str, part: dict[str, Any], file: Path = _RESULTS) -> None:
    """Puts what a benchmark measured into results.json, and writes results.md anew."""
    parts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    parts = {one: part if one == name else parts.get(one) for one in _BENCHMARKS}
    parts = {one: found for one, found in parts.items() if found}
    for path, text in (
        (file, json.dumps(parts, indent=1, ensure_ascii=False)),
        (file.with_suffix(".md"), report(parts)),
    ):
        new = path.with_name(path.name + ".new")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(path)


def machine() -> str:
    """What the numbers depend on, taken before the first of them."""
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "CPUs": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "architecture": platform.machine(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
        "load before the start": f"{os.getloadavg()[0]:.2f}",
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def report(parts: dict[str, Any]) -> str:
    """The whole of results.md."""
    head = (
        "# Benchmarks\n\nMade by `make bench`, or one part by `python -m benchmarks --only NAME`. The two sides of a"
        " row take turns in one run. Ratios are medians over rounds, with quartiles; times are medians."
    )
    return "\n\n".join([head, *(_part(name, part) for name, part in parts.items())])


def _part(name: str, part: dict[str, Any]) -> str:
    rows = [Row(**row) for row in part["rows"]]
    table = [_table(rows), _legend(rows)] if rows else []
    texts = [f"## {name}", f"Measured: {part['measured']}.", *table, part["text"]]
    return "\n\n".join(text for text in texts if text)


def _table(rows: Sequence[Row]) -> str:
    met = {True: "yes", False: "no", None: "–"}
    lines = [[row.name, row.ours, row.other, row.ratio, row.target, met[row.met]] for row in rows]
    return markdown(["row", "ours", "other side", "ratio", "target", "met"], lines)


def _legend(rows: Sequence[Row]) -> str:
    """Each note once, with the rows it is for."""
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(row.note, []).append(row.name)
    return "\n".join(f"- {'; '.join(names)}: {note.rstrip('.')}." for note, names in notes.items())


if __name__ == "__main__":
    main()
