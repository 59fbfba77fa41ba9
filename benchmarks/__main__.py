"""`python -m benchmarks`: runs the benchmarks, prints the table, and after a full run writes results.md."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
_RESULTS = Path(__file__).with_name("results.md")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", help=f"some of {','.join(_BENCHMARKS)}; prints them, writes no file")
    parser.add_argument("--quick", action="store_true", help="check that all runs; its numbers mean nothing, no file")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",") if options.only else list(_BENCHMARKS)
    if wrong := [name for name in chosen if name not in _BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(wrong)}; there are: {', '.join(_BENCHMARKS)}")
    facts = machine()
    sections = []
    for name in chosen:
        print(f"{name} …", file=sys.stderr, flush=True)
        sections.append(_BENCHMARKS[name](options.quick))
    text = report(facts, sections)
    print(text)
    if not options.quick and not options.only:
        _RESULTS.write_text(text + "\n", encoding="utf-8")


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


def report(facts: str, sections: Sequence[Section]) -> str:
    """The whole of results.md."""
    parts = ["# Benchmarks", f"Made by `make bench`. {facts}."]
    if rows := [row for section in sections for row in section.rows]:
        parts += [_table(rows), _legend(rows)]
    parts += [section.text for section in sections if section.text]
    return "\n\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    met = {True: "yes", False: "no", None: "–"}
    lines = [[row.name, row.ours, row.other, row.ratio, row.target, met[row.met]] for row in rows]
    return markdown(["row", "ours", "other side", "ratio", "target", "met"], lines)


def _legend(rows: Sequence[Row]) -> str:
    """How to read the table, then each note once with the rows it is for."""
    lines = ["The two sides take turns in one run. Ratios are medians over rounds, with quartiles; times are medians."]
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(row.note, []).append(row.name)
    lines += [f"- {'; '.join(names)}: {note.rstrip('.')}." for note, names in notes.items()]
    return "\n\n".join([lines[0], "\n".join(lines[1:])]) if notes else lines[0]


if __name__ == "__main__":
    main()
