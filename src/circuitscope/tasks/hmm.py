"""Hidden Markov models whose state is a value and a slot, each with a chain of its own; a token is read from a table.

P(value', slot' | value, slot) = values.moves[value, value'] · slots.moves[model, slot, slot']
token = memory[value, slot]

The models of a mixture differ in `start` and in the moves of slots. A step over all states costs two small matrix
products instead of one with (values · slots)² entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from circuitscope.tasks.streams import I64, below, order, stream_key, uniform, words

F64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Mixture:
    """Chains as mixtures of permutations: with probability weights[j] a step applies permutations[j].

    permutations  [chain, permutation, state], where each state goes
    weights       [chain, permutation]
    """

    permutations: I64
    weights: F64

    @cached_property
    def moves(self) -> F64:
        """Transition matrices [chain, from, to]."""
        states = self.permutations.shape[2]
        moves: F64 = np.einsum("cp,cpft->cft", self.weights, np.eye(states)[self.permutations])
        return moves

    def walk(self, chain: I64, start: I64, u: F64) -> I64:
        """States [pos, example] of walks of the given chains; `u` [example, step] in (0, 1) chooses the steps."""
        count, states = self.permutations.shape[1:]
        which = (u[:, :, None] > np.cumsum(self.weights, axis=1)[chain][:, None, : count - 1]).sum(axis=2)
        offset = np.ascontiguousarray(((chain[:, None] * count + which) * states).T)
        table = self.permutations.ravel()
        found = np.empty((u.shape[1] + 1, len(start)), dtype=np.int64)
        found[0] = start
        for step in range(u.shape[1]):
            np.take(table, offset[step] + found[step], out=found[step + 1])
        return found


def mixture(key: int, chains: int, states: int, temperature: float, stay: float = 0.0) -> Mixture:
    """Mixtures of as many random permutations as there are states, with weights softmax((u − ½) / temperature).

    With `stay` s a chain keeps its state with probability s and takes one of the permutations otherwise.
    """
    which = np.arange(chains)
    weights = _softmax(uniform(words(stream_key(key, "weights"), which, states)) / temperature)
    drawn = order(words(stream_key(key, "permutations"), np.arange(chains * states), states))
    permutations = drawn.reshape(chains, states, states)
    if not stay:
        return Mixture(permutations, weights)
    same = np.broadcast_to(np.arange(states), (chains, 1, states))
    return Mixture(
        np.concatenate([same, permutations], axis=1),
        np.concatenate([np.full((chains, 1), stay), (1 - stay) * weights], axis=1),
    )


@dataclass(frozen=True, eq=False)
class Models:
    """Several hidden Markov models over the same values, slots and memory.

    start   [model, value, slot], the distribution of the first state
    values  the chain of values, one for all models
    slots   the chains of slots, one per model
    memory  [value, slot], the token that each state shows
    vocab   the number of tokens
    """

    start: F64
    values: Mixture
    slots: Mixture
    memory: I64
    vocab: int

    def sample(self, key: int, examples: I64, model: I64, length: int, value: I64, slot: I64) -> tuple[I64, I64]:
        """Values and slots [example, pos] of walks of the given models from the given states."""
        u = uniform(words(stream_key(key, "walk"), examples, 2 * (length - 1)))
        values = self.values.walk(np.zeros_like(model), value, u[:, : length - 1])
        slots = self.slots.walk(model, slot, u[:, length - 1 :])
        return values.T, slots.T

    def first(self, key: int, examples: I64, model: I64) -> tuple[I64, I64]:
        """A value and a slot per example, drawn from the start of its model."""
        flat = self.start.reshape(len(self.start), -1).cumsum(axis=1)[model]
        state = (uniform(words(stream_key(key, "first"), examples, 1)) > flat[:, :-1]).sum(axis=1)
        value, slot = np.divmod(state, self.memory.shape[1])
        return value, slot

    def forward(self, tokens: I64, belief: F64, restart: float = 0.0) -> Iterator[F64]:
        """After each token of the sequences [example, pos], how likely each next state is: the forward algorithm.

        `belief` and what comes out are [example, model, value, slot] and sum to 1 over all models and states:
        P(model, value, slot of the next token | tokens up to here), from P(model, first value, first slot).
        With `restart` r a share r of the belief in each model goes to all of its states alike at each step, which
        lets a sequence take steps that its chains cannot take.
        """
        states = self.memory.size
        for token in tokens.T:
            seen = belief * (self.memory == token[:, None, None])[:, None]
            seen /= seen.sum(axis=(1, 2, 3), keepdims=True)
            belief = self.values.moves[0].T @ seen @ self.slots.moves
            if restart:
                belief = (1 - restart) * belief + restart * belief.sum(axis=(2, 3), keepdims=True) / states
            yield belief

    def shown(self, belief: F64) -> F64:
        """The distribution of the token that is shown [example, token], of a belief [example, model, value, slot]."""
        by_state = belief.sum(axis=1).reshape(len(belief), -1)
        tokens: F64 = by_state @ np.eye(self.vocab)[self.memory.ravel()]
        return tokens


def models(
    seed: int, count: int, values: int, slots: int, vocab: int, *, stay: float, temperature: float, start: float
) -> Models:
    """Random models, a function of the arguments alone.

    The tokens of the memory are uniform from [1, vocab), apart from slot 0, which shows token 0. The start
    is softmax((u − ½) / start) over all states.
    """
    key = stream_key("hmm", seed)
    memory = 1 + below(words(stream_key(key, "memory"), np.arange(values), slots), vocab - 1)
    memory[:, 0] = 0
    first = uniform(words(stream_key(key, "start"), np.arange(count), values * slots))
    return Models(
        _softmax(first / start).reshape(count, values, slots),
        mixture(stream_key(key, "values"), 1, values, temperature, stay),
        mixture(stream_key(key, "slots"), count, slots, temperature),
        memory,
        vocab,
    )


def _softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: F64 = e / e.sum(axis=-1, keepdims=True)
    return shares
