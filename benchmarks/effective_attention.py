"""(i) Φ of a Mamba layer against TransformerLens's effective attention: time and memory. Reduced Φ: memory.

TransformerLens gets a bridge around a transformers Mamba with random weights, and one `run_with_cache`; neither is
timed. Its `compute_effective_attention` reads two cache entries. The bridge fills `blocks.0.mixer.x_proj.hook_out`. The
other, `blocks.0.mixer.dt_proj.hook_out`, is filled in by hand: transformers multiplies by dt_proj's weight without
calling the module, so that its hook does not fire. It is the bridge's own dt_proj, called on the first dt_rank columns
of the cached x_proj output. Nothing else is filled in by hand.

Our model has LayerNorm where transformers has RMSNorm. The embeddings of both are the same and centred, so that the
two norms agree, and all of the mixer's weights are transformers' own.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import Row, Section, alternate, faster, limit
from circuitscope.analysis.reading.mixing_matrix import phi
from circuitscope.models.config import ModelConfig
from circuitscope.models.hooked_lm import HookedLM

_WIDTH, _VOCABULARY = 768, 64
_LAYER = f"E {2 * _WIDTH}, N 16, batch 1"
_WEIGHTS = {
    "in_proj.weight": "in_proj.weight",
    "conv1d.weight": "conv.weight",
    "conv1d.bias": "conv.bias",
    "x_proj.weight": "ssm.x_proj.weight",
    "dt_proj.weight": "ssm.dt_proj.weight",
    "dt_proj.bias": "ssm.dt_proj.bias",
    "A_log": "ssm.A_log",
    "D": "ssm.D",
    "out_proj.weight": "out.weight",
}
_TIME = (
    "ours is circuitscope.phi, from tokens on; the other side is TransformerLens's compute_effective_attention with"
    " include_dt_scaling, without D, from a filled cache (its dt_proj entry was filled by hand, because that hook no"
    " longer fires). No gradients. First it was checked that the results, on equal weights and with D added, agree to"
    " 1e-4 of the largest entry"
)
_M_MMAP_THRESHOLD = -3
_MEMORY = (
    "peak resident memory that one call adds, result included, in a child process that maps every block of 64 kB or"
    " more by itself, so that only memory in use counts"
)


@torch.no_grad()
def measure(quick: bool) -> Section:
    lengths, rounds, long = ((8, 16), (1, 1), 32) if quick else ((64, 128), (7, 3), 512)
    pair = _Pair()
    rows = []
    for length, count in zip(lengths, rounds, strict=True):
        sides = [pair.ours(length), pair.other(length)]
        _check_same(sides[0](), sides[1](), pair.model.layers[0].mixer.ssm.D)
        ours, other = alternate(sides, count)
        rows.append(faster(f"Φ of a Mamba layer, {_LAYER}, L {length}", ours, other, 40, _TIME))
    tasks = [(side, length) for length in lengths for side in ("ours", "other")]
    *peaks, reduced = extra_memory(_ready, [*tasks, ("reduced", long)])
    for length, mine, theirs in zip(lengths, peaks[::2], peaks[1::2], strict=True):
        rows.append(_memory_row(f"the same, memory, L {length}", mine, theirs))
    name = f'Φ reduced by "mean_abs", memory, {_LAYER}, L {long}'
    rows.append(limit(name, megabytes(reduced), "at most 100 MB", reduced <= 100e6, _MEMORY))
    return Section(rows)


def _memory_row(name: str, ours: int, other: int) -> Row:
    ratio = ours / other
    return Row(name, megabytes(ours), megabytes(other), f"{ratio:.3f}", "at most 0.1", ratio <= 0.1, _MEMORY)


def _check_same(ours: Tensor, other: Tensor, D: Tensor) -> None:
    """TransformerLens leaves D, the skip on the diagonal, to the caller."""
    other.diagonal(dim1=-2, dim2=-1).add_(D[:, None])
    error = ((ours - other).abs().max() / other.abs().max()).item()
    if ours.shape != other.shape or not error <= 1e-4:
        raise RuntimeError(f"the two Φ differ by {error:.1e} of the largest entry")


class _Pair:
    """A one-layer transformers Mamba in TransformerLens's bridge, and our model with its weights."""

    def __init__(self) -> None:
        from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
        from transformers import MambaConfig, MambaForCausalLM

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            config = MambaConfig(hidden_size=_WIDTH, state_size=16, num_hidden_layers=1, vocab_size=_VOCABULARY)
            theirs = MambaForCausalLM(config).eval()
            embedding = theirs.backbone.embeddings.weight
            embedding.sub_(embedding.mean(dim=-1, keepdim=True))
            self.model = HookedLM(
                ModelConfig(
                    mixers="mamba",
                    n_layers=1,
                    d_model=_WIDTH,
                    state_mixer="none",
                    vocab_size=_VOCABULARY,
                    norm_eps=config.layer_norm_epsilon,
                )
            ).eval()
            self.model.embed.weight.copy_(embedding)
            weights = theirs.backbone.layers[0].mixer.state_dict()
            self.model.layers[0].mixer.load_state_dict({_WEIGHTS[name]: weights[name] for name in weights})
        self.bridge: Any = build_bridge_from_module(theirs, "MambaForCausalLM", hf_config=config)

    def ours(self, length: int, **options: Any) -> Callable[[], Tensor]:
        tokens = _tokens(length)
        return lambda: phi(self.model, tokens, 0, **options)

    def other(self, length: int) -> Callable[[], Tensor]:
        _, cache = self.bridge.run_with_cache(_tokens(length))
        mixer = self.bridge.blocks[0].mixer
        key = "blocks.0.mixer.dt_proj.hook_out"
        if key not in cache:  # by hand, see above
            low = cache["blocks.0.mixer.x_proj.hook_out"][..., : mixer.dt_proj.in_features]
            cache.cache_dict[key] = mixer.dt_proj(low)
        return lambda: mixer.compute_effective_attention(cache, 0, include_dt_scaling=True)


def _tokens(length: int) -> Tensor:
    return torch.randint(_VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


@contextmanager
def _ready(side: str, length: int) -> Iterator[Callable[[], object]]:
    """The call to be watched, after one at length 8 that loads and compiles what it needs."""
    with torch.no_grad():
        pair = _Pair()

        def call(length: int) -> Callable[[], object]:
            if side == "other":
                return pair.other(length)
            return pair.ours(length, reduce="mean_abs") if side == "reduced" else pair.ours(length)

        call(8)()
        yield call(length)


def extra_memory(
    ready: Callable[..., AbstractContextManager[Callable[[], object]]], tasks: Sequence[tuple[Any, ...]]
) -> list[int]:
    """Peak bytes of resident memory that a call adds while it runs, one for each task, on Linux.

    `ready(*task)`, a function of a module's top level, gives the call, warmed up. All run one after the other in one
    fresh child process. There malloc maps every block of 64 kB or more by itself and gives it back at once, so that
    memory that a heap keeps and splits, which varies by a fifth from run to run, does not count.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return [pool.submit(_peak, ready, task).result() for task in tasks]


def _peak(ready: Callable[..., AbstractContextManager[Callable[[], object]]], task: tuple[Any, ...]) -> int:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    with ready(*task) as call:
        gc.collect()
        libc.malloc_trim(0)  # small blocks, freed but resident, which the call would fill unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
        before = _high_water()
        result = call()
        after = _high_water()
        del result
    return after - before


def _high_water() -> int:
    """VmHWM of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
