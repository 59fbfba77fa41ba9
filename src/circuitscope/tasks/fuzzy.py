"""Fuzzy recall: keys and values are motifs of one to several tokens."""

from bisect import bisect_right
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import register
from circuitscope.tasks.recall import Context, Recall
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, distinct, order, stream_key, words


@register("fuzzy_recall")
class FuzzyRecall(Recall):
    """Keys and values of 1 to m tokens: a query is all tokens of a key, and asks for its value token by token.

    A query is followed by its value without the last token. Its last key token has the first token of the value as
    label, and each token of the value the next one. Key tokens come from [1, V/2), value tokens from [V/2, V), so the
    ends of motifs show. Keys of one length differ as wholes and can share tokens; value tokens are all distinct. The
    lengths in a context are 1, 2, … m, 1, 2, … in random order, so all contexts of a task are equally long. Filler is
    token 0.

    In the layout each token of a value makes a pair with the token before it, which counts as its key.
    """

    roles = (Role.KEY, Role.VALUE, Role.QUERY, Role.FILLER)
    features = frozenset({"pairs"})
    small: ClassVar = {"length": 24, "pairs": 2, "vocab_size": 20, "motif": 2}
    about_roles: ClassVar = {
        Role.KEY: "a token of a key",
        Role.VALUE: "a token of the value of the key before it",
        Role.QUERY: "a key again, then its value but for the last token: the next token of the value is asked for",
    }
    recipe: ClassVar = {
        "task.examples": None,
        "train.batch_size": 64,
        "train.lr": 2e-3,
        "train.weight_decay": 0.1,
        "train.schedule": "cosine",
        "train.steps": 2500,
    }

    name: Literal["fuzzy_recall"] = "fuzzy_recall"
    vocab_size: Annotated[int, Unit("tokens")] = Field(
        default=64, ge=4, le=2048, description="size of the vocabulary, half for keys and half for values"
    )
    pairs: Annotated[int, Unit("pairs")] = Field(
        default=3, ge=1, lt=2**31, description="keys k; at most vocab_size / 2 - 1"
    )
    motif: Annotated[int, Unit("tokens")] = Field(
        default=3, ge=1, le=3, description="tokens m of the longest keys and values"
    )

    @model_validator(mode="after")
    def _all_asked(self) -> "FuzzyRecall":
        if self.queries not in (None, self.pairs):
            raise UserError(f"fuzzy_recall asks for every key: expected queries = pairs = {self.pairs}")
        return self

    def context_length(self, pairs: int) -> int:
        return 2 * _total(pairs, self.motif)

    @property
    def slot(self) -> int:
        return 2 * self.motif

    def most_pairs(self) -> tuple[int, str]:
        half = self.vocab_size // 2
        most = bisect_right(range(1, half), self.vocab_size - half, key=lambda pairs: _total(pairs, self.motif))
        return most, "the keys whose values have vocab_size / 2 tokens in all"

    @property
    def chance(self) -> float:
        """The accuracy of answering with any token of any value."""
        return 1 / _total(self.pairs, self.motif)

    @property
    def possible_values(self) -> int:
        return self.vocab_size - self.vocab_size // 2

    def context(self, key: int, examples: I64) -> Context:
        n, k, m, half = len(examples), self.pairs, self.motif, self.vocab_size // 2
        lengths = [self._lengths(key, kind, examples) for kind in ("keys", "values")]
        there = np.concatenate([np.arange(m) < length[:, :, None] for length in lengths], axis=2)
        is_value = there & (np.arange(2 * m) >= m)  # [example, pair, part], as `there`: m parts of a key, m of a value
        count = _total(k, m)
        values = half + distinct(words(stream_key(key, "values"), examples, 2 * count), self.vocab_size - half)
        pieces = np.zeros(there.shape, dtype=np.int64)
        pieces[:, :, :m] = 1 + self._keys(key, examples, lengths[0])
        pieces[is_value] = values.ravel()
        roles = np.broadcast_to(np.where(is_value, Role.VALUE, Role.KEY).astype(np.int8), there.shape)
        value_pos = np.nonzero(is_value[there].reshape(n, -1))[1].reshape(n, -1)
        number = is_value.reshape(n, -1).cumsum(axis=1).reshape(there.shape) - 1  # of each value token
        # Side by side, the parts of a pair are its query, and each asks for the next one if that is of the value.
        place = np.where(there, there.cumsum(axis=2) - 1, 2 * m)
        asked, following = np.zeros((n, k, 2 * m + 1), dtype=np.int64), np.full((n, k, 2 * m + 1), -1)
        np.put_along_axis(asked, place, pieces, axis=2)
        np.put_along_axis(following, place, np.where(is_value, number, -1), axis=2)
        following[:, :, 2 * m] = -1
        used = np.arange(2 * m - 1) < (lengths[0] + lengths[1])[:, :, None] - 1
        return Context(
            tokens=pieces[there].reshape(n, -1),
            roles=roles[there].reshape(n, -1),
            key_pos=value_pos - 1,
            value_pos=value_pos,
            values=values,
            asked=np.where(used, asked[:, :, : 2 * m - 1], 0),
            asked_roles=np.where(used, Role.QUERY, Role.FILLER).astype(np.int8),
            asked_pair=following[:, :, 1 : 2 * m],
        )

    def _lengths(self, key: int, kind: str, examples: I64) -> I64:
        """The lengths of the keys or of the values [example, pair]: 1, 2, … m, 1, 2, … in random order."""
        lengths: I64 = 1 + order(words(stream_key(key, kind, "lengths"), examples, self.pairs)) % self.motif
        return lengths

    def _keys(self, key: int, examples: I64, lengths: I64) -> I64:
        """Tokens of the keys [example, pair, part], counted from 0; those of one length differ as wholes."""
        drawn = np.zeros((*lengths.shape, self.motif), dtype=np.int64)
        letters = self.vocab_size // 2 - 1
        for size in range(1, self.motif + 1):
            code = distinct(words(stream_key(key, "keys", size), examples, 2 * self.pairs), letters**size)
            parts = code[:, :, None] // letters ** np.arange(self.motif) % letters
            drawn = np.where((lengths == size)[:, :, None], parts, drawn)
        return drawn


def _total(pairs: int, motif: int) -> int:
    """The tokens in keys of lengths 1, 2, … m, 1, 2, …, of which there are so many."""
    rounds, rest = divmod(pairs, motif)
    return rounds * motif * (motif + 1) // 2 + rest * (rest + 1) // 2
