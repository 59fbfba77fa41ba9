"""(j) A step on two threads: what the bounded spin of OpenMP's threads costs, and what it saves beside other work."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.rows import Row, Section, costs, duration, spread

_MODELS = ("attention", "mamba")
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
_ENDLESS = {"GOMP_SPINCOUNT": "300000"}  # what GNU OpenMP does if nobody says anything
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


def measure(quick: bool) -> Section:
    rounds, calls = (1, 2) if quick else (15, 10)
    return Section([row for model in _MODELS for row in _rows(model, rounds, calls)])


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


def _rows(model: str, rounds: int, calls: int) -> Iterator[Row]:
    with ExitStack() as closing:
        ours = closing.enter_context(_server(model, {}))
        other = closing.enter_context(_server(model, _ENDLESS))
        free: list[list[float]] = [[], []]
        beside: list[list[float]] = [[], []]
        for _ in range(rounds):
            for taken, server in zip(free, (ours, other), strict=True):
                taken.append(_step(server, calls))
            with _busy():
                for taken, server in zip(beside, (ours, other), strict=True):
                    taken.append(_step(server, max(1, calls // 5)))
    yield costs(f"{model}, step on 2 threads, bounded spin", free[0], free[1], 1.05, _NOTE)
    ratios = [[b / a for a, b in zip(*sides, strict=True)] for sides in zip(free, beside, strict=True)]
    yield Row(
        f"{model}, the same step beside one busy process",
        duration(beside[0]),
        f"{duration(beside[1])}, {statistics.median(ratios[1]):.1f} of its own",
        spread(ratios[0], "{:.2f}"),
        "at most 2",
        statistics.median(ratios[0]) <= 2,
        _BESIDE,
    )


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
            process.kill()


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
