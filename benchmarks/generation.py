"""(l) A generated token of every preset after a long context, against the same after a short one."""

from collections.abc import Callable

import torch

from benchmarks.rows import Row, Section, alternate, costs, duration, spread
from circuitscope.models import HookedLM, model
from circuitscope.models.generation import ModelState
from circuitscope.models.presets import PRESETS

_SHORT, _LONG = 64, 4096
_FLAT = 1.2
_NOTE = (
    f"model.step of one token, batch 1, d 64, the preset's default layers, after {_LONG} positions; the other side is"
    f" the same after {_SHORT}. Where every layer has a finite state the ratio should be 1; with attention's cache or"
    " Hyena's history it grows with the length, and there is no target"
)


def measure(quick: bool) -> Section:
    rounds, calls = (1, 1) if quick else (15, 20)
    return Section([_row(preset, 2 * _SHORT if quick else _LONG, rounds, calls) for preset in PRESETS])


@torch.no_grad()
def _row(preset: str, long: int, rounds: int, calls: int) -> Row:
    built = model(preset, d_model=64, vocab_size=64, max_length=long + 1).eval()
    tokens = torch.randint(64, (1, long), generator=torch.Generator().manual_seed(0))
    sides = [_token(built, built.state_at(tokens, length)) for length in (long, _SHORT)]
    ours, other = alternate(sides, rounds, calls)
    name = f"generated token, {preset}, after {long} positions against {_SHORT}"
    if all(block.mixer.state_size is not None for block in built.layers):
        return costs(name, ours, other, _FLAT, _NOTE)
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    return Row(name, duration(ours), duration(other), spread(ratios, "{:.2f}"), "–", None, _NOTE)


def _token(built: HookedLM, state: ModelState) -> Callable[[], object]:
    """One token after a state."""
    token = torch.zeros(1, 1, dtype=torch.long)

    def step() -> object:
        with torch.no_grad():
            return built.step(token, state)

    return step
