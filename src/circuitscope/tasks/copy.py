"""Copying: a string is said again, whole, or from behind an n-gram of it.

string    $ s | s .
prefix    $ g | s | a .     a: the letters of s that follow the n-gram g
suffix    $ s | g | a .
                  ↓ ↓
                  a .       (labels: the answer and the end mark, each at the position before it)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout
from circuitscope.tasks.generated import generated_answers, why_not_generated
from circuitscope.tasks.measure import Measure
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, below, stream_key, words
from circuitscope.tasks.token_task import TokenTask

START, BAR, END, PAD = 0, 1, 2, 3
_MARKS = "$|._"
LETTERS = 4  # the first letter
_GENERATED = ("generated accuracy", "generated exact match")


@register("copy")
class Copy(TokenTask):
    """A string of random letters to say again, or what follows an n-gram of it: `$ s | s .`, `$ g | s | a .`.

    Letters are i.i.d., the length of the string is uniform from `shortest` to `longest`. With `form` string the whole
    string is the answer. With prefix and suffix an n-gram g stands before or behind the string, and the answer is the
    `answer` letters that follow g in it; g occurs once in the string. Labels are the answer and the end mark; tokens
    behind the end mark are padding. Accuracy is per character, each predicted from the right ones before it; exact
    match (all characters of a string right) is measured by `circuitscope evaluate`, and so are both of the answers that
    the model generates, where it reads what it said itself.
    """

    roles = (Role.START, Role.VALUE, Role.QUERY, Role.FILLER)
    features = frozenset({"answers"})
    small: ClassVar = {"shortest": 5, "longest": 8}
    about_roles: ClassVar = {
        Role.VALUE: "a letter of the string",
        Role.KEY: "a letter of the n-gram",
        Role.QUERY: "the next letter of the answer, or the end mark, is asked for",
        Role.FILLER: "a mark: | between the parts, . at the end, _ for padding",
    }
    recipe: ClassVar = {
        "task.examples": None,
        "train.lr": 2e-3,
        "train.weight_decay": 0.1,
        "train.schedule": "cosine",
        "train.steps": 2000,
    }

    name: Literal["copy"] = "copy"
    vocab_size: Annotated[int, Unit("tokens")] = Field(
        default=30, ge=6, lt=2**31, description="size of the vocabulary: four marks, and the letters"
    )
    form: Literal["string", "prefix", "suffix"] = Field(
        default="string", description="copy the string, or what follows an n-gram that stands before or behind it"
    )
    shortest: Annotated[int, Unit("letters")] = Field(default=5, ge=1, le=2**20, description="shortest string")
    longest: Annotated[int, Unit("letters")] = Field(default=19, ge=1, le=2**20, description="longest string")
    ngram: Annotated[int, Unit("letters")] = Field(default=2, ge=1, le=64, description="letters n of g")
    answer: Annotated[int, Unit("letters")] = Field(
        default=1, ge=1, le=2**20, description="letters of the answer behind g, for prefix and suffix"
    )

    @model_validator(mode="after")
    def _possible(self) -> "Copy":
        if self.shortest > self.longest:
            raise UserError(f"shortest must be at most longest = {self.longest}, got {self.shortest}")
        if self.form == "string":
            return self
        if self.ngram + self.answer > self.shortest:
            raise UserError(
                f"ngram + answer must be at most shortest = {self.shortest}, got {self.ngram} + {self.answer}"
            )
        kinds = (self.vocab_size - LETTERS) ** self.ngram
        if kinds < 2 * self.longest:
            raise UserError(
                f"n-grams must be rare: expected (vocab_size - 4)^ngram >= 2 · longest = {2 * self.longest},"
                f" got {kinds}"
            )
        return self

    @property
    def max_length(self) -> int:
        asked = self.longest if self.form == "string" else self.ngram + 1 + self.answer
        return 3 + self.longest + asked

    def sizes(self) -> dict[str, int]:
        return {"longest": self.longest}

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {"any letter of the string": _any_letter}

    def outcomes(self, batch: Batch, logits: Float[Tensor, "label vocab"]) -> dict[str, Float[Tensor, " label"]]:
        """Accuracy per character, the end mark included; and exact match, which stands at a sequence's last label."""
        found = super().outcomes(batch, logits)
        return {**found, "exact match": _all_right(batch, found[self.metric])}

    def measures(self, model: Any, batch: Batch) -> dict[str, Measure]:
        """The measures of every task on tokens, and accuracy and exact match of what the model generates."""
        found = super().measures(model, batch)
        if not why_not_generated(model):
            right = (generated_answers(model, batch) == batch.labelled()[1]).float()
            values = (right, _all_right(batch, right))
            found |= {name: Measure.at_labels(batch, one) for name, one in zip(_GENERATED, values, strict=True)}
        return found

    def spelled(self, token: int) -> str:
        """A mark, or a letter; letters beyond z are numbers."""
        return f"{_MARKS}{ascii_lowercase}"[token] if token < LETTERS + len(ascii_lowercase) else str(token)

    def unmeasured(self, model: Any) -> dict[str, str]:
        why = why_not_generated(model)
        return dict.fromkeys(_GENERATED, why) if why else {}

    def generate(self, key: int, examples: I64) -> Batch:
        n, (string, length, start) = len(examples), self._strings(key, examples)
        whole = _Part(string, length, Role.VALUE)
        if self.form == "string":
            between = [whole]
        else:
            gram, bar = _Part.cut(string, start, self.ngram, Role.KEY), _Part.mark(BAR, n)
            between = [gram, bar, whole] if self.form == "prefix" else [whole, bar, gram]
            start = start + self.ngram
        said = length if self.form == "string" else np.full(n, self.answer)
        answer = _Part(_Part.cut(string, start, self._longest_answer, Role.QUERY).tokens, said, Role.QUERY)
        parts = [_Part.mark(START, n, Role.START), *between, _Part.mark(BAR, n), answer, _Part.mark(END, n)]
        tokens, roles, begins = _side_by_side(parts, self.max_length)
        s_at, a_at = begins[parts.index(whole)], begins[-2]
        column = np.arange(self.max_length)
        asked = (column >= a_at[:, None] - 1) & (column < (a_at + said)[:, None])
        labels = np.where(asked, np.roll(tokens, -1, axis=1), NO_LABEL)
        roles[asked] = Role.QUERY
        # A layout is a rectangle, so in short strings and answers the last letter stands several times.
        letter = np.minimum(np.arange(self.longest), length[:, None] - 1)
        place = np.minimum(np.arange(self._longest_answer), said[:, None] - 1)
        layout = Layout(
            roles=torch.from_numpy(roles),
            value_pos=torch.from_numpy(s_at[:, None] + letter),
            query_pos=torch.from_numpy(a_at[:, None] - 1 + place),
            query_pair=torch.from_numpy(start[:, None] + place),
        )
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), layout)

    @property
    def _longest_answer(self) -> int:
        return self.longest if self.form == "string" else self.answer

    def _strings(self, key: int, examples: I64) -> tuple[I64, I64, I64]:
        """Letters [example, letter], the length of each string, and where its n-gram begins (0 without one).

        A string whose n-gram occurs in it twice is drawn again.
        """
        letters = self.vocab_size - LETTERS
        string = np.empty((len(examples), self.longest), dtype=np.int64)
        length, start = np.empty(len(examples), dtype=np.int64), np.zeros(len(examples), dtype=np.int64)
        left, attempt = np.arange(len(examples)), 0
        while len(left):
            drawn = words(stream_key(key, "string", attempt), examples[left], self.longest + 2)
            string[left] = LETTERS + below(drawn[:, 2:], letters)
            length[left] = self.shortest + below(drawn[:, 0], self.longest - self.shortest + 1)
            if self.form == "string":
                break
            places = length[left] - self.ngram - self.answer + 1
            start[left] = (below(drawn[:, 1], 2**31) * places) >> 31
            left, attempt = left[self._occurrences(string[left], length[left], start[left]) > 1], attempt + 1
        return string, length, start

    def _occurrences(self, string: I64, length: I64, start: I64) -> I64:
        """How often the n-gram that begins at `start` occurs in each string."""
        every = np.lib.stride_tricks.sliding_window_view(string, self.ngram, axis=1)  # [example, place, letter]
        gram = np.take_along_axis(every, start[:, None, None], axis=1)
        inside = np.arange(every.shape[1]) <= length[:, None] - self.ngram
        counts: I64 = ((every == gram).all(axis=2) & inside).sum(axis=1)
        return counts


def _any_letter(batch: Batch) -> Float[Tensor, " label"]:
    """The share of the string's letters that equal each label; 0 where the end mark is asked for."""
    where, target = batch.labelled()
    row, letter = where // batch.length, batch.layout.roles == Role.VALUE
    return ((batch.tokens[row] == target[:, None]) & letter[row]).sum(dim=1) / letter.sum(dim=1)[row]


def _all_right(batch: Batch, right: Float[Tensor, " label"]) -> Float[Tensor, " label"]:
    """At the last label of each sequence whether all of its labels are right, 1 or 0; nan at the other labels."""
    sequence = batch.labelled()[0] // batch.length
    last = torch.cat([sequence[1:] != sequence[:-1], torch.ones(1, dtype=torch.bool)]).to(right.device)
    sequence = sequence.to(right.device)
    wrong = right.new_zeros(len(batch)).index_add(0, sequence, 1 - right)
    return (wrong == 0).float()[sequence].where(last, float("nan"))


@dataclass(frozen=True, eq=False)
class _Part:
    """Tokens [example, pos] of which the first `length` count in each example, and their role."""

    tokens: I64
    length: I64
    role: Role

    @staticmethod
    def mark(token: int, n: int, role: Role = Role.FILLER) -> "_Part":
        """One and the same token in each of n examples."""
        return _Part(np.full((n, 1), token), np.ones(n, dtype=np.int64), role)

    @staticmethod
    def cut(string: I64, start: I64, size: int, role: Role) -> "_Part":
        """So many letters of each string from `start` on; letters behind the end of the array count as the last one."""
        at = np.minimum(start[:, None] + np.arange(size), string.shape[1] - 1)
        return _Part(np.take_along_axis(string, at, axis=1), np.full(len(string), size), role)


def _side_by_side(parts: list[_Part], length: int) -> tuple[I64, NDArray[np.int8], list[I64]]:
    """Tokens and roles [example, pos] of the parts one after the other, then padding; and where each part begins."""
    n = len(parts[0].tokens)
    tokens = np.full((n, length + 1), PAD, dtype=np.int64)  # what does not count is written behind the end
    roles = np.full(tokens.shape, Role.FILLER, dtype=np.int8)
    begin, begins = np.zeros(n, dtype=np.int64), []
    for part in parts:
        column = np.arange(part.tokens.shape[1])
        at = np.where(column < part.length[:, None], begin[:, None] + column, length)
        np.put_along_axis(tokens, at, part.tokens, axis=1)
        np.put_along_axis(roles, at, np.int8(part.role), axis=1)
        begins.append(begin)
        begin = begin + part.length
    return tokens[:, :length], roles[:, :length], begins
