"""RegBench: strings of a regular language that a model meets for the first time in its prompt.

0 s 0 s 0 s …     s: a string of the sequence's own automaton, 0: the separator
↓                 (labels: each symbol of a string, at the position before it)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks import automata
from circuitscope.tasks.automata import Automata, Flags, Range
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout
from circuitscope.tasks.ngram import counts_in_context
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, stream_key, uniform, words
from circuitscope.tasks.token_task import TokenTask

SEPARATOR = 0


@dataclass(frozen=True, repr=False)
class StringsLayout(Layout):
    """A layout that also holds the automaton of each sequence and the state that it is in behind each token.

    leads_to  where each symbol leads from each state; −1 where the symbol is not allowed
    state     the state behind each token; −1 behind the last string
    """

    leads_to: Int[Tensor, "batch state vocab"] | None = None
    state: Int[Tensor, "batch pos"] | None = None

    def allowed(self, where: Int[Tensor, " label"]) -> Bool[Tensor, "label vocab"]:
        """Which tokens may come next at flat positions (row · length + pos); on the device of the positions."""
        assert self.leads_to is not None
        assert self.state is not None
        leads_to, state = self.leads_to.to(where.device), self.state.reshape(-1).to(where.device)
        return leads_to[where // self.roles.shape[1], state[where]] >= 0


@register("regbench")
class RegBench(TokenTask):
    """Strings of a random automaton, one automaton per sequence: which symbols may come next has to be seen in them.

    An automaton has 4 to 12 states, an alphabet of 4 to 18 symbols and 1 to 3 edges per state, all equally likely,
    with distinct symbols and never back to the same state. It is minimal and every state can be reached; the numbers
    hold for the minimal automaton, and one that does not keep them is drawn again. A prompt has 10 to 19 strings of 1
    to 49 symbols, each a walk from the start; strings that do not fit into `length` as a whole are left out.

    Labels are the symbols of the strings. The separator is none, because the automaton does not say when a string
    ends. The metric, legality, is how often the likeliest next token is one that the automaton allows.
    """

    metric = "legality"
    roles = (Role.SEPARATOR, Role.SYMBOL, Role.FILLER)
    small: ClassVar = {
        "vocab_size": 7,
        "length": 24,
        "states": (4, 4),
        "alphabet": (4, 4),
        "strings": (4, 4),
        "lengths": (3, 7),
    }
    recipe: ClassVar = {
        "task.examples": None,
        "task.length": 256,
        "train.lr": 3e-3,
        "train.weight_decay": 0.1,
        "train.schedule": "cosine",
        "train.steps": 500,
        "train.batch_size": 16,
        "train.eval_batches": 2,
        "train.eval_batch_size": 32,
    }

    name: Literal["regbench"] = "regbench"
    vocab_size: Annotated[int, Unit("tokens")] = Field(
        default=19, ge=3, le=1025, description="size of the vocabulary: the separator, and the symbols"
    )
    states: Range = Field(default=(4, 12), description="least and most states of an automaton, from 2 to 16")
    alphabet: Range = Field(default=(4, 18), description="least and most symbols of an automaton")
    edges: Range = Field(default=(1, 3), description="least and most edges of a state")
    strings: Range = Field(default=(10, 19), description="least and most strings in a prompt")
    lengths: Range = Field(default=(1, 49), description="least and most symbols in a string")
    length: Annotated[int, Unit("tokens")] = Field(
        default=951,
        ge=3,
        le=2**20,
        description="most tokens in a sequence; of a prompt that is longer, the first strings",
    )

    @field_validator("states", "alphabet", "edges", "strings", "lengths", mode="before")
    @classmethod
    def _two_numbers(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2 or any(type(x) is not int for x in value):
            raise ValueError("expected two whole numbers, the least and the most, such as [4, 12]")
        return value

    @model_validator(mode="after")
    def _possible(self) -> "RegBench":
        for name in ("states", "alphabet", "edges", "strings", "lengths"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise UserError(f"{name}: expected 1 <= least <= most, got {least} and {most}")
        for holds, rule, got in (
            (self.states[0] >= 2 and self.states[1] <= 16, "2 <= states <= 16", self.states),
            (self.alphabet[1] < self.vocab_size, f"alphabet <= vocab_size - 1 = {self.vocab_size - 1}", self.alphabet),
            (self.edges[1] <= self.alphabet[0], f"edges <= least alphabet = {self.alphabet[0]}", self.edges),
            (self.edges[0] < self.alphabet[0], f"least edges < least alphabet = {self.alphabet[0]}", self.edges),
            (self.edges[1] > 1 or self.states[0] <= 6, "most edges > 1 or least states <= 6", self.edges),
            (self.lengths[1] < self.length, f"lengths <= length - 1 = {self.length - 1}", self.lengths),
            (self.strings[1] * self.lengths[1] < 2**20, "strings · lengths < 2^20", self.lengths),
        ):
            if not holds:
                raise UserError(f"regbench: expected {rule}, got {got[0]} to {got[1]}")
        return self

    @property
    def max_length(self) -> int:
        return min(self.length, self.strings[1] * (1 + self.lengths[1]))

    def shown(self, metric: float) -> str:
        return f"legality {metric:6.1%}"

    def right(self, batch: Batch, logits: Float[Tensor, "label vocab"]) -> Float[Tensor, " label"]:
        return self._legal(batch, logits.argmax(-1))

    def outcomes(self, batch: Batch, logits: Float[Tensor, "label vocab"]) -> dict[str, Float[Tensor, " label"]]:
        """Legality, and ½ Σ |p − q| between the model's next-token distribution p and the automaton's q."""
        allowed = _layout(batch).allowed(batch.labelled()[0].to(logits.device))
        q = allowed / allowed.sum(dim=1, keepdim=True)
        distance = (logits.softmax(dim=1) - q).abs().sum(dim=1) / 2
        return {**super().outcomes(batch, logits), "total variation": distance}

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {f"{n}-gram with back-off, in context": partial(self._ngram, n) for n in (3, 2, 1)}

    def _ngram(self, n: int, batch: Batch) -> Float[Tensor, " label"]:
        return self._legal(batch, counts_in_context(batch, n, self.vocab_size, SEPARATOR).argmax(dim=1))

    def _legal(self, batch: Batch, answer: Int[Tensor, " label"]) -> Float[Tensor, " label"]:
        """1 where the automaton allows the answer, else 0; where the answers are."""
        allowed = _layout(batch).allowed(batch.labelled()[0].to(answer.device))
        return allowed.gather(1, answer[:, None]).squeeze(1).float()

    def remarks(self, batch: Batch, row: int) -> list[str]:
        leads_to = _layout(batch).leads_to
        assert leads_to is not None
        lines = []
        for state, targets in enumerate(leads_to[row].tolist()):
            edges = [f"{symbol} to state {target}" for symbol, target in enumerate(targets) if target >= 0]
            if edges:
                lines.append(f"state {state}{', the start' if state == 0 else ''}: {', '.join(edges)}")
        return lines

    def generate(self, key: int, examples: I64) -> Batch:
        n, most = len(examples), self.max_length
        drawn = automata.draw(
            key, examples, self.vocab_size - 1, states=self.states, alphabet=self.alphabet, edges=self.edges
        )
        symbols, states, there = self._strings(key, examples, drawn)
        row, at = np.nonzero(there)[0], (there.reshape(n, -1).cumsum(axis=1) - 1)[there.reshape(n, -1)]
        tokens = np.full((n, most), SEPARATOR, dtype=np.int64)
        state = np.full((n, most), -1, dtype=np.int64)
        roles = np.full((n, most), Role.FILLER, dtype=np.int8)
        tokens[row, at], state[row, at] = symbols[there], states[there]
        roles[row, at] = np.where(symbols[there] == SEPARATOR, Role.SEPARATOR, Role.SYMBOL)
        labels = np.full_like(tokens, NO_LABEL)
        labels[:, :-1] = np.where(roles[:, 1:] == Role.SYMBOL, tokens[:, 1:], NO_LABEL)
        leads_to = np.full((n, self.states[1], self.vocab_size), -1, dtype=np.int64)
        one, source, edge = np.nonzero(drawn.symbols)
        leads_to[one, source, drawn.symbols[one, source, edge]] = drawn.targets[one, source, edge]
        layout = StringsLayout(
            torch.from_numpy(roles), leads_to=torch.from_numpy(leads_to), state=torch.from_numpy(state)
        )
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), layout)

    def _strings(self, key: int, examples: I64, drawn: Automata) -> tuple[I64, I64, Flags]:
        """Separator and symbols of each string, the state behind each, and which of them count.

        All are [example, string, place]; every walk starts in state 0 at the separator.
        """
        n, (_, m), (_, longest) = len(examples), self.strings, self.lengths
        sizes = uniform(words(stream_key(key, "strings"), examples, 1 + m))
        count = automata.within(sizes[:, 0], self.strings)
        length = automata.within(sizes[:, 1:], self.lengths)
        end = np.cumsum(1 + length, axis=1)
        whole = (np.arange(m) < count[:, None]) & (end <= self.max_length)
        there = whole[:, :, None] & (np.arange(1 + longest) <= length[:, :, None])
        step = uniform(words(stream_key(key, "walks"), examples, m * longest)).reshape(n * m, longest).T
        s, e = drawn.symbols.shape[1:]
        first = np.repeat(np.arange(n) * s, m)  # where the states of each walk's automaton begin
        degree, symbols, targets = drawn.degree.ravel(), drawn.symbols.ravel(), drawn.targets.ravel()
        said = np.zeros((1 + longest, n * m), dtype=np.int64)
        states = np.zeros_like(said)
        for place in range(longest):
            at = first + states[place]
            edge = at * e + (step[place] * degree[at]).astype(np.int64)
            said[place + 1], states[place + 1] = symbols[edge], targets[edge]
        return said.T.reshape(there.shape), states.T.reshape(there.shape), there


def _layout(batch: Batch) -> StringsLayout:
    if not isinstance(batch.layout, StringsLayout):
        raise UserError("legality needs the automata of the strings, which only batches of the task regbench carry")
    return batch.layout
