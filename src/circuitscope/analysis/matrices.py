"""The mixing matrices of a model, layer by layer, in one pass and in bounded memory.

Works on this package's HookedLM and on any HookedRootModule that shows `…hook_pattern`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.analysis.sites import keeping
from circuitscope.errors import UserError
from circuitscope.hooks import HookedRootModule
from circuitscope.mixers.phi import Factor, product
from circuitscope.models import HookedLM

_CHUNK_BYTES = 8e6  # of matrices, and of logits, made at once


class Mixing(NamedTuple):
    """One mixing matrix, or a slice of its heads (channels).

    `factor` says which: "pattern" (attention), a factor of Φ such as "ssm" or "conv", "phi" where Φ is
    a product itself, or "composed" (all factors multiplied). `of` is how many heads there are in all.
    """

    layer: int
    factor: str
    heads: slice
    of: int
    matrix: Float[Tensor, "batch head dest src"]


def matrices(
    model: HookedRootModule, tokens: Int[Tensor, "batch pos"], factors: Sequence[str] | None = None
) -> Iterator[Mixing]:
    """Every mixing matrix of a model, in slices of heads of about 8 MB.

    Args:
        factors: names to keep; all that are matrices (not diagonal) unless told.
    """
    return iter(Reading(model, tokens, factors=factors))


class Reading:
    """One pass of a model over tokens: its mixing matrices as it is iterated, its logits when it has been.

    Args:
        at: flat positions row · length + pos to have `logits` at; none: a HookedLM makes no logits.
    """

    def __init__(
        self,
        model: HookedRootModule,
        tokens: Int[Tensor, "batch pos"],
        *,
        at: Int[Tensor, " label"] | None = None,
        factors: Sequence[str] | None = None,
    ):
        self.model, self.tokens, self.at, self.factors = model, tokens, at, factors
        self._final: Float[Tensor, "label d_model"] | None = None  # of a HookedLM: what its unembedding reads
        self._logits: Float[Tensor, "label vocab"] | None = None  # of another model

    def __iter__(self) -> Iterator[Mixing]:
        with torch.no_grad():
            yield from self._hooked_lm(self.model) if isinstance(self.model, HookedLM) else self._patterns()

    @property
    def logits(self) -> Float[Tensor, "label vocab"] | None:
        """Logits at the positions asked for, once iterated."""
        slices = list(self.logit_slices())
        return torch.cat(slices) if slices else None

    @torch.no_grad()
    def logit_slices(self) -> Iterator[Float[Tensor, "label vocab"]]:
        """`logits` in slices of the labels of about 8 MB, in order, each the caller's own; none where none were asked.

        They are the same numbers: on a CPU arrays that small stay in the cache.
        """
        if self._logits is not None:
            yield self._logits.clone()
        if self._final is not None and isinstance(self.model, HookedLM):
            labels = max(1, int(_CHUNK_BYTES // (4 * self.model.config.vocab_size)))
            for part in self._final.split(labels):
                yield F.linear(part, self.model.W_U.T)

    def _hooked_lm(self, model: HookedLM) -> Iterator[Mixing]:
        batch, pos = self.tokens.shape
        resid, last = model.embedded(self.tokens), model.config.n_layers - 1
        chunk = max(1, int(_CHUNK_BYTES // (4 * batch * pos**2)))
        for layer, block in enumerate(model.layers):
            runs, at = layer < last or self.at is not None, self.at if layer == last else None
            if runs and self._only_pattern(block.mixer) and block.mixer.n_heads <= chunk:
                seen: dict[str, Tensor] = {}
                name = f"blocks.{layer}.mixer.hook_pattern"
                with model.hooks(fwd_hooks=[*keeping([name], seen)]):
                    resid = block(resid, at)
                yield Mixing(layer, "pattern", slice(0, block.mixer.n_heads), block.mixer.n_heads, seen[name])
                continue
            if not block.mixer.no_phi:
                every = block.mixer.factors(block.ln1(block.hook_resid_pre(resid)))
                for name, part in products(block.mixer, every).items():
                    if self.factors is not None and name not in self.factors:
                        continue
                    count = max(f.size for f in part)
                    for start in range(0, count, chunk):
                        heads = slice(start, min(start + chunk, count))
                        yield Mixing(layer, name, heads, count, product(part, heads).expand(batch, -1, pos, pos))
            if runs:
                resid = block(resid, at)
        if self.at is not None:
            self._final = model.ln_final(resid)

    def _only_pattern(self, mixer: Any) -> bool:
        """Whether all that is asked of a mixer is its pattern, which running it with a hook gives as well."""
        return tuple(mixer.factor_names) == ("pattern",) and (self.factors is None or "pattern" in self.factors)

    def _patterns(self) -> Iterator[Mixing]:
        names = [name for name in self.model.hook_dict if name.endswith("hook_pattern")]
        if not names:
            raise UserError(
                f"{type(self.model).__name__} shows no mixing matrix: it has no hook named …hook_pattern"
                " (circuitscope's own models show hook_phi)"
            )
        logits, cache = self.model.run_with_cache(self.tokens, names_filter=lambda name: name in names)
        if self.at is not None:
            self._logits = logits.flatten(0, 1)[self.at]
        for i, name in enumerate(names):
            number = re.search(r"\d+", name)
            pattern = cache[name]
            heads = slice(0, pattern.shape[1])
            yield Mixing(int(number[0]) if number else i, "pattern", heads, heads.stop, pattern)


def products(mixer: Any, factors: Sequence[Factor]) -> dict[str, list[Factor]]:
    """The matrices worth reading of a mixer: each factor that is not diagonal, Φ, and all of them composed."""
    out = {f.name: [f] for f in factors if not f.diagonal}
    if len(mixer.core) > 1:
        out["phi"] = [f for f in factors if f.name in mixer.core]
    if not mixer.no_composed and len(factors) > len(mixer.core):
        out["composed"] = list(factors)
    return out
