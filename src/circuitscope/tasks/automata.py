"""Random probabilistic automata, one per example: how they are drawn, and how they are made minimal.

State 0 is the start, every state may be the last, and all edges of a state are equally likely. So two states are the
same if the same strings can follow both.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from circuitscope.tasks.streams import I64, below, order, stream_key, uniform, words

F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]
Range = tuple[int, int]  # least and most


@dataclass(frozen=True)
class Automata:
    """Automata of several examples. Unused states and edges stand behind the used ones.

    symbols  [example, state, edge], the tokens on the edges of a state, in rising order; 0 where there is no edge
    targets  [example, state, edge], the states that they lead to; 0 where there is no edge
    states   [example], the number of states
    """

    symbols: I64
    targets: I64
    states: I64

    @property
    def degree(self) -> I64:
        """The number of edges of each state [example, state]."""
        degree: I64 = (self.symbols > 0).sum(axis=2)
        return degree

    def part(self, rows: I64) -> "Automata":
        """The automata of some examples."""
        return Automata(*(getattr(self, field.name)[rows] for field in fields(self)))


def draw(key: int, examples: I64, tokens: int, *, states: Range, alphabet: Range, edges: Range) -> Automata:
    """Minimal automata with symbols from [1, tokens], without edges from a state to itself.

    The numbers of states, of symbols and of the edges of each state are uniform in their ranges, the symbols of an
    automaton and of a state are drawn without replacement, and targets are uniform among the other states. What
    comes out is made minimal. If fewer states are left than the range allows, or if an edge leads from a state to
    itself, the automaton is drawn again.
    """
    shape = (len(examples), states[1], edges[1])
    found = Automata(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(len(examples), np.int64))
    left, attempt = np.arange(len(examples)), 0
    while len(left):
        drawn = minimal(_any(stream_key(key, "automaton", attempt), examples[left], tokens, states, alphabet, edges))
        own = (drawn.targets == np.arange(states[1])[:, None]) & (drawn.symbols > 0)
        good = (drawn.states >= states[0]) & ~own.any(axis=(1, 2))
        for field in fields(found):
            getattr(found, field.name)[left[good]] = getattr(drawn, field.name)[good]
        left, attempt = left[~good], attempt + 1
    return found


def _any(key: int, examples: I64, tokens: int, states: Range, alphabet: Range, edges: Range) -> Automata:
    n, s, a, e = len(examples), states[1], alphabet[1], edges[1]
    sizes = uniform(words(stream_key(key, "sizes"), examples, 2 + s))
    count = within(sizes[:, 0], states)
    letters = 1 + order(words(stream_key(key, "alphabet"), examples, tokens))[:, :a]
    lottery = uniform(words(stream_key(key, "symbols"), examples, s * a)).reshape(n, s, a)
    lottery[np.broadcast_to(np.arange(a) >= within(sizes[:, 1], alphabet)[:, None, None], lottery.shape)] = 2.0
    chosen = np.argsort(lottery, axis=2)[:, :, :e]
    symbols = np.take_along_axis(letters[:, None], chosen, axis=2)
    targets = below(words(stream_key(key, "targets"), examples, s * e), 2**31).reshape(n, s, e)
    targets = (targets * (count - 1)[:, None, None]) >> 31
    targets += targets >= np.arange(s)[:, None]
    used = (np.arange(e) < within(sizes[:, 2:], edges)[:, :, None]) & (np.arange(s)[:, None] < count[:, None, None])
    rising = np.argsort(np.where(used, symbols, tokens + 1), axis=2)
    return Automata(
        np.take_along_axis(np.where(used, symbols, 0), rising, axis=2),
        np.take_along_axis(np.where(used, targets, 0), rising, axis=2),
        count,
    )


def within(u: F64, both: Range) -> I64:
    """Numbers in (0, 1) as integers from the least to the most."""
    found: I64 = both[0] + (u * (both[1] - both[0] + 1)).astype(np.int64)
    return found


def minimal(automata: Automata) -> Automata:
    """The smallest automata of the same languages: states that cannot be reached go, and equal ones become one."""
    symbols, targets = automata.symbols, automata.targets
    n, s, _ = symbols.shape
    reached, here = reachable(automata), np.arange(n)[:, None]
    same = ~distinguished(automata)
    twin = np.argmax(same & reached[:, None, :], axis=2)  # the first state that can be reached and is the same
    kept = reached & (twin == np.arange(s))
    number = np.cumsum(kept, axis=1) - 1
    front = np.argsort(~kept, axis=1, kind="stable")
    there = np.take_along_axis(kept, front, axis=1)[:, :, None]
    led = number[here[:, :, None], twin[here[:, :, None], targets]]
    used = there & (symbols[here, front] > 0)
    return Automata(np.where(used, symbols[here, front], 0), np.where(used, led[here, front], 0), kept.sum(axis=1))


def reachable(automata: Automata) -> Flags:
    """Which states can be reached from the start [example, state]."""
    symbols, targets = automata.symbols, automata.targets
    s = symbols.shape[1]
    leads = ((targets[..., None] == np.arange(s)) & (symbols > 0)[..., None]).any(axis=2)  # [example, from, to]
    reached: Flags = np.zeros(symbols.shape[:2], dtype=bool)
    reached[:, 0] = True
    while True:
        more = reached | (leads & reached[:, :, None]).any(axis=1)
        if (more == reached).all():
            return reached
        reached = more


def distinguished(automata: Automata) -> Flags:
    """Which pairs of states differ in the strings that can follow them [example, state, state].

    Two states differ if their symbols do, or if the same symbol leads to states that differ. This refines the
    partition by symbols until it stays.
    """
    symbols, targets = automata.symbols, automata.targets
    row = np.arange(len(symbols))[:, None, None, None]
    differ: Flags = (symbols[:, :, None] != symbols[:, None, :]).any(axis=3)
    while True:
        more = differ | differ[row, targets[:, :, None], targets[:, None, :]].any(axis=3)
        if (more == differ).all():
            return differ
        differ = more
