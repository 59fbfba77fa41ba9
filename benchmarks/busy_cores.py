"""(j) A step on two threads: what the bounded spin of OpenMP's threads costs, and what it saves beside other work."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from benchmarks.rows import Row, Section, costs, duration, spread
from circuitscope import _SPIN_COUNT

_MODELS = ("attention", "mamba")
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
OURS = f"{_SPIN_COUNT}, ours"
_OWN = 300_000  # turns that a waiting thread of GNU OpenMP spins if nobody says anything
_COUNTS = (100, 1_000, 10_000)  # what else could be set
_NOTE = (
    "default model of that name on two threads, one process per side, which take turns; the other side is what GNU"
    " OpenMP does by itself, GOMP_SPINCOUNT=300000"
)
_BESIDE = (
    "the same processes; ratios are to a step with nothing beside, in the same round. The other side, OpenMP's own"
    " setting, is for comparison"
)
_CHILD = """
import sys
from benchmarks.busy_cores import serve
serve(sys.argv[1])
"""


@dataclass
class Times:
    """Seconds per step in each round: with nothing beside, and beside one busy process."""

    free: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


def measure(quick: bool) -> Section:
    rounds, calls = (1, 2) if quick else (15, 10)
    rows: list[Row] = []
    lines = [
        "| model | GOMP_SPINCOUNT | idle, against OpenMP's own | beside one busy process, against idle |",
        "|---|---|---|---|",
    ]
    for model in _MODELS:
        taken = _times(model, rounds, calls)
        rows += _rows(model, taken)
        lines += [
            f"| {model} | {name} | {_middle(t.free, taken[_OWN].free):.2f} | {_middle(t.beside, t.free):.2f} |"
            for name, t in taken.items()
        ]
    title = "A step on two threads by how long OpenMP's threads spin before they sleep (medians of ratios in a round):"
    return Section(rows, "\n".join([title, "", *lines]))


def serve(model: str) -> None:
    """A process that takes steps: reads how many from its input, and says how long one took."""
    import torch

    from benchmarks.workload import take_step, trainer_of
    from circuitscope.config import RunConfig

    config = RunConfig.build(model, "mqar", steps=10**6, device="cpu", threads=2)
    with trainer_of(config) as trainer:
        assert torch.get_num_threads() == 2
        for _ in range(3):
            take_step(trainer)
        print("ready", flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            for _ in range(int(line)):
                take_step(trainer)
            print((time.perf_counter() - began) / int(line), flush=True)


def _times(model: str, rounds: int, calls: int) -> dict[str | int, Times]:
    """Steps with our setting, with OpenMP's own and with the other counts, one process each, which take turns."""
    taken: dict[str | int, Times] = {name: Times() for name in (OURS, *_COUNTS, _OWN)}
    with ExitStack() as closing:
        servers = {
            name: closing.enter_context(_server(model, {} if name == OURS else {"GOMP_SPINCOUNT": str(name)}))
            for name in taken
        }
        for _ in range(rounds):
            for name, server in servers.items():
                taken[name].free.append(_step(server, calls))
            with _busy():
                for name, server in servers.items():
                    taken[name].beside.append(_step(server, calls))
    return taken


def _rows(model: str, taken: dict[str | int, Times]) -> Iterator[Row]:
    ours, own = taken[OURS], taken[_OWN]
    yield costs(f"{model}, step on 2 threads, bounded spin", ours.free, own.free, 1.05, _NOTE)
    ratios = [b / a for a, b in zip(ours.free, ours.beside, strict=True)]
    yield Row(
        f"{model}, the same step beside one busy process",
        duration(ours.beside),
        f"{duration(own.beside)}, {_middle(own.beside, own.free):.1f} of its own",
        spread(ratios, "{:.2f}"),
        "at most 2",
        statistics.median(ratios) <= 2,
        _BESIDE,
    )


def _middle(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


@contextmanager
def _server(model: str, settings: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    env = {name: value for name, value in os.environ.items() if name not in _SETTINGS} | settings
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"the process that takes steps of {model} did not start")
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it tidies up and ends


def _step(server: "subprocess.Popen[str]", calls: int) -> float:
    """Seconds per step, over so many."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{calls}\n")
    server.stdin.flush()
    return float(server.stdout.readline())


@contextmanager
def _busy() -> Iterator[None]:
    """One core is kept busy by another program meanwhile."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            time.sleep(0.3)  # until it has started
            yield
        finally:
            process.kill()
