"""A hostile walk over flags, config fields, files and Python calls: `python tests/fuzz/walk.py --inputs 10000`.

An input is a function of the seed and its number. All inputs run inside one process, with a limit on time and memory;
if an input ends that process, it counts as a finding and the walk goes on in a new one. With --processes N, N of the
inputs that are command lines also run as processes of their own. Findings are grouped by the place of their traceback,
and for each group the smallest form of its first input is printed with the command that repeats it. Exits with 1 if
there is a finding that is not in known.py. `ground.py` says what is capped.
"""

import argparse
import json
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import calls
import fields
import files
import flags
import ground
import outcome
from known import KNOWN
from outcome import Finding, Outcome

from step import Input

KINDS = {"flags": flags.make, "fields": fields.make, "files": files.make, "calls": calls.make}
MEMORY = 6 << 30  # bytes of address space of the walking process
_HERE = Path(__file__).parent


def make(seed: int, number: int) -> Input:
    """Input `number` of a seed."""
    draw = random.Random(f"{seed}/{number}")
    return KINDS[list(KINDS)[number % len(KINDS)]](draw)


def act(step: Input, parts: Sequence[Any], folder: Path) -> Outcome:
    """Does an input, or some of its parts, in a fresh copy of the ground."""
    with ground.Cell(folder / "ground", folder / "cell") as cell:
        return step.act(parts, cell)


def shrunk(step: Input, found: Finding, folder: Path) -> Sequence[Any]:
    """The parts without those that make no difference to the finding."""
    parts, end = list(step.parts), time.monotonic() + outcome.SECONDS
    for at in reversed(range(len(parts))):
        if time.monotonic() > end:
            break
        fewer = parts[:at] + parts[at + 1 :]
        try:
            again = act(step, fewer, folder)
        except Exception:  # the input cannot do without this part
            continue
        if isinstance(again, Finding) and again.group == found.group:
            parts = fewer
    return parts


def shown(step: Input, parts: Sequence[Any], folder: Path) -> str:
    with ground.Cell(folder / "ground", folder / "cell"):
        try:
            return step.shown(parts)
        except Exception as error:
            return f"an input that cannot be shown ({type(error).__name__})"


# The walking process


def walk(seed: int, numbers: Sequence[int], folder: Path, tell: Any) -> None:
    """Does the inputs one after the other; tells the number before each, and its outcome after it."""
    prepare(folder)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    seen: set[str] = set()
    for number in numbers:
        tell({"begins": number})
        began = time.monotonic()
        step = make(seed, number)
        found = act(step, step.parts, folder)
        told: dict[str, Any] = {"number": number, "kind": step.kind, "seconds": time.monotonic() - began}
        if isinstance(found, Finding):
            told |= {"group": found.group, "detail": found.detail}
            if found.group not in seen and not is_known(found.group):
                seen.add(found.group)
                told["example"] = shown(step, shrunk(step, found, folder), folder)
        else:
            told["word"] = found
        tell(told)


def prepare(folder: Path) -> None:
    """Builds the ground unless it is there, imports what commands import late, and puts the caps on."""
    import warnings

    warnings.simplefilter("default")
    os.environ |= {"COLUMNS": "200", "CIRCUITSCOPE_RUNS": "runs", "MPLBACKEND": "agg"}
    ground.cap()
    if not (folder / "ground").exists():
        ground.build(folder / "building")
        (folder / "building").rename(folder / "ground")


def is_known(group: str) -> bool:
    return any(re.search(pattern, group) for pattern in KNOWN)


# The supervisor


@dataclass
class Tally:
    """What the walk met."""

    done: int = 0
    processes: int = 0
    walkers: int = 0
    words: Counter[str] = field(default_factory=Counter)
    groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    slowest: tuple[float, int] = (0.0, -1)
    now: int | None = None

    def add(self, told: dict[str, Any]) -> None:
        self.done += 1
        self.slowest = max(self.slowest, (told.get("seconds", 0.0), told["number"]))
        if "group" in told:
            if told["group"] not in self.groups:
                print(f"found at input {told['number']}: {told['group']}", flush=True)
            self.groups.setdefault(told["group"], []).append(told)
        else:
            self.words[f"{told['kind']} {told['word']}"] += 1

    @property
    def new(self) -> dict[str, list[dict[str, Any]]]:
        return {group: found for group, found in self.groups.items() if not is_known(group)}

    def __str__(self) -> str:
        known = {group: found for group, found in self.groups.items() if is_known(group)}
        words = ", ".join(f"{word} {n}" for word, n in sorted(self.words.items()))
        return (
            f"{self.done} inputs in {self.walkers} process{'es' * (self.walkers != 1)}, {self.processes} as processes"
            f" of their own; {words}; findings {sum(map(len, self.new.values()))} in {len(self.new)} groups,"
            f" known {sum(map(len, known.values()))} in {len(known)}; slowest {self.slowest[0]:.1f} s"
            f" (input {self.slowest[1]})"
        )


def supervise(seed: int, numbers: Sequence[int], folder: Path, tally: Tally) -> Iterator[None]:
    """Has the inputs walked, in a new process after each input that ended the one before."""
    left = list(numbers)
    while left:
        tally.walkers += 1
        command = [sys.executable, __file__, "--walker", "--seed", str(seed), "--keep", str(folder)]
        errors = (folder / "walker.err").open("wb")
        walker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert walker.stdin is not None
        assert walker.stdout is not None
        walker.stdin.write(json.dumps(left).encode())
        walker.stdin.close()
        begun = None
        try:
            for line in _lines(walker):
                told = json.loads(line)
                tally.now = begun = told.get("begins")
                if begun is None:
                    left.remove(told["number"])
                    tally.add(told)
                    yield
        except BaseException:
            walker.kill()
            raise
        code = walker.wait()
        errors.close()
        if left:
            last = (folder / "walker.err").read_text(errors="replace")[-3000:]
            if begun is None or "Traceback (most recent call last)" in last:
                raise SystemExit(f"fuzz: the walk itself is broken at input {begun}, with {code}: {last}")
            left.remove(begun)
            kind = list(KINDS)[begun % len(KINDS)]
            group = f"the process ended ({code})" if walker.returncode != -9 else "no end, not even by the time limit"
            where = re.findall(r'File ".*?/circuitscope/([^"]*)", line \d+ in (\w+)', last)
            group += f" in {':'.join(where[0])}" if where else ""
            tally.add({"number": begun, "kind": kind, "group": f"{kind}: {group}", "detail": last})
            yield


def _lines(walker: "subprocess.Popen[bytes]") -> Iterator[bytes]:
    """Lines of the walking process; kills it when it says nothing for long."""
    assert walker.stdout is not None
    rest, patience = b"", 240.0
    while True:
        ready, _, _ = select.select([walker.stdout], [], [], patience)
        if not ready:
            walker.kill()
            return
        data = os.read(walker.stdout.fileno(), 1 << 20)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def as_processes(seed: int, numbers: Sequence[int], count: int, folder: Path, tally: Tally) -> Iterator[None]:
    """Does `count` of the inputs that are command lines as processes of their own."""
    env = {**os.environ, "COLUMNS": "200", "CIRCUITSCOPE_RUNS": "runs", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(_HERE / "capped.py")]
    for number in numbers:
        if tally.processes >= count:
            return
        step = make(seed, number)
        if step.words is None:
            continue
        tally.processes += 1
        began = time.monotonic()
        with ground.Cell(folder / "ground", folder / "cell") as cell:
            found = outcome.process(program, step.words(step.parts, cell), cell, env)
        told: dict[str, Any] = {"number": number, "kind": "process", "seconds": time.monotonic() - began}
        if isinstance(found, Finding):
            told |= {"group": found.group, "detail": found.detail, "example": shown(step, step.parts, folder)}
        else:
            told["word"] = found
        tally.add(told)
        tally.done -= 1
        yield


def report(tally: Tally, seed: int) -> None:
    """Prints each group of findings that is not known, with its smallest input and how to repeat it."""
    for group, found in sorted(tally.new.items(), key=lambda item: -len(item[1])):
        first = next((one for one in found if "example" in one), found[0])
        alone = " --processes 1" if first["kind"] == "process" else ""
        print(f"\n{len(found)} x {group}")
        print(f"  for example: {first.get('example', '(the process ended)')}")
        print(f"  repeat with: python tests/fuzz/walk.py --seed {seed} --only {first['number']}{alone}")
        print("  " + "\n  ".join(first["detail"].strip().splitlines()[-6:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--processes", type=int, default=0, help="how many inputs also run as processes of their own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat one input, with its whole traceback")
    parser.add_argument("--kind", choices=KINDS, help="walk only over inputs of this kind")
    parser.add_argument("--keep", type=Path, help="folder to walk in, and to leave behind (default: a temporary one)")
    parser.add_argument("--walker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.walker:
        return _walker(options.seed, options.keep)
    numbers = range(options.first, options.first + options.inputs)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    chosen = [n for n in numbers if options.kind in (None, list(KINDS)[n % len(KINDS)])]
    tally, began = Tally(), time.monotonic()
    told = began
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        spread = chosen[:: max(1, len(chosen) // max(1, options.processes) // 2)] + chosen
        steps = [supervise(options.seed, chosen, folder, tally)]
        steps.append(as_processes(options.seed, list(dict.fromkeys(spread)), options.processes, folder, tally))
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            for each in steps:
                for _ in each:
                    if time.monotonic() - told > 20:
                        told = time.monotonic()
                        print(f"{told - began:5.0f} s  {tally}", flush=True)
        except KeyboardInterrupt:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print(f"fuzz: stopped before its end, at input {tally.now}")
    report(tally, options.seed)
    if options.only is not None:
        for found in tally.groups.values():
            print(found[0]["detail"])
    print(f"fuzz {'FAILED' if tally.new else 'passed'}: {tally}, in {time.monotonic() - began:.0f} s")
    return 1 if tally.new else 0


def _walker(seed: int, folder: Path) -> int:
    """The walking process: reads the numbers of its inputs, and writes lines of JSON."""
    import faulthandler

    faulthandler.enable()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=out, flush=True)
        if "begins" in what:  # where it hangs, if not even the alarm can stop it
            faulthandler.dump_traceback_later(6 * outcome.SECONDS, exit=True)

    walk(seed, json.loads(sys.stdin.read()), folder, tell)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
