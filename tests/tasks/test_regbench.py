"""RegBench: the automata are minimal, the prompts are theirs, and legality is what they allow."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import circuitscope as cs
from circuitscope.cli.main import app
from circuitscope.tasks import NO_LABEL, Batch, Layout, Role
from circuitscope.tasks.automata import Automata, draw, minimal
from circuitscope.tasks.ngram import counts_in_context
from circuitscope.tasks.regbench import SEPARATOR

SMALL = {"strings": (3, 5), "lengths": (4, 9)}


def automaton(row):
    """From a state and a symbol to a state, as a mapping, of one sequence's `leads_to`."""
    return {(s, a): t for s, targets in enumerate(row.tolist()) for a, t in enumerate(targets) if t >= 0}


def continuations(edges, state, length):
    """All strings of so many symbols that an automaton allows from a state on."""
    if length == 0:
        return {()}
    steps = [(a, t) for (s, a), t in edges.items() if s == state]
    return {(a, *rest) for a, t in steps for rest in continuations(edges, t, length - 1)}


def test_every_state_is_reached_and_has_strings_of_its_own():
    """Checked by enumeration: no two states of an automaton allow the same strings of 5 symbols."""
    layout = cs.task("regbench", **SMALL).batch(0, size=40).layout
    for row in layout.leads_to:
        edges = automaton(row)
        reached, queue = {0}, [0]
        while queue:
            here = queue.pop()
            for (s, _), t in edges.items():
                if s == here and t not in reached:
                    reached.add(t)
                    queue.append(t)
        states = {s for s, _ in edges}
        assert reached == states == set(range(len(states)))
        languages = [frozenset(continuations(edges, s, 5)) for s in states]
        assert len(set(languages)) == len(languages)


def test_automata_have_the_numbers_that_the_task_says():
    layout = cs.task("regbench", **SMALL).batch(0, size=400).layout
    sizes, alphabets, degrees = Counter(), Counter(), Counter()
    for row in layout.leads_to:
        edges = automaton(row)
        assert all(s != t for (s, _), t in edges.items())
        sizes[len({s for s, _ in edges})] += 1
        alphabets[len({a for _, a in edges})] += 1
        degrees.update(Counter(s for s, _ in edges).values())
    assert set(sizes) == set(range(4, 13))
    assert max(alphabets) <= 18
    assert set(degrees) == {1, 2, 3}


def chain(symbols, targets):
    return Automata(np.array([symbols]), np.array([targets]), np.array([len(symbols)]))


def test_minimizing_drops_what_is_not_reached_and_merges_what_is_the_same():
    # 0 -1-> 1, 0 -2-> 2, 1 -3-> 0, 2 -3-> 0: 1 and 2 are the same; 3 is not reached
    found = minimal(chain([[1, 2], [3, 0], [3, 0], [1, 0]], [[1, 2], [0, 0], [0, 0], [0, 0]]))
    assert found.states.tolist() == [2]
    assert found.symbols[0].tolist() == [[1, 2], [3, 0], [0, 0], [0, 0]]
    assert found.targets[0].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_states_that_differ_only_after_several_symbols_stay_apart():
    # 0 -1-> 1 -1-> 2 -1-> 3 -2-> 0: from each state the symbol 2 comes after another number of steps
    line = chain([[1], [1], [1], [2]], [[1], [2], [3], [0]])
    assert minimal(line).states.tolist() == [4]
    assert minimal(chain([[1], [1], [1], [1]], [[1], [2], [3], [0]])).states.tolist() == [1]


@given(key=st.integers(0, 10**6), states=st.integers(2, 6), edges=st.integers(1, 3))
def test_a_minimal_automaton_stays_as_it_is(key, states, edges):
    one = draw(key, np.arange(3), 8, states=(2, states), alphabet=(4, 8), edges=(1, edges))
    again = minimal(one)
    for name in ("symbols", "targets", "states"):
        assert np.array_equal(getattr(one, name), getattr(again, name))


@given(step=st.integers(0, 50), length=st.integers(10, 60))
def test_prompts_are_whole_strings_of_the_automaton_from_its_start(step, length):
    task = cs.task("regbench", length=length, **SMALL)
    batch = task.batch(step, size=3)
    layout = batch.layout
    for row in range(3):
        edges, roles = automaton(layout.leads_to[row]), layout.roles[row].tolist()
        tokens, labels = batch.tokens[row].tolist(), batch.labels[row].tolist()
        used = len(roles) - roles.count(Role.FILLER)
        assert roles[used:] == [Role.FILLER] * (len(roles) - used)
        assert set(tokens[used:]) <= {SEPARATOR}
        state, run = 0, []
        for at in range(used):
            if tokens[at] == SEPARATOR:
                run.append(0)
                state = 0
                assert roles[at] == Role.SEPARATOR
            else:
                state = edges[state, tokens[at]]  # a KeyError: the automaton does not allow the symbol
                run[-1] += 1
                assert roles[at] == Role.SYMBOL
            assert layout.state[row, at] == state
            following = tokens[at + 1] if at + 1 < used else SEPARATOR
            assert labels[at] == (NO_LABEL if following == SEPARATOR else following)
        assert all(4 <= n <= 9 for n in run)
        assert 1 <= len(run) <= 5
        assert labels[used:] == [NO_LABEL] * (len(roles) - used)


def near(counts, expected):
    """Chi-square within five standard deviations of its mean."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    free = len(counts) - 1
    return ((counts - expected) ** 2 / expected).sum() < free + 5 * np.sqrt(2 * free)


def test_numbers_and_lengths_of_strings_and_choices_of_edges_are_uniform():
    batch = cs.task("regbench").batch(0, size=1500)
    separators = batch.layout.roles == Role.SEPARATOR
    strings = separators.sum(dim=1).numpy()
    assert near(np.bincount(strings, minlength=20)[10:], np.full(10, 150))
    starts = [row.nonzero().squeeze(1) for row in separators]
    lengths = np.concatenate([np.diff(at.numpy()) - 1 for at in starts])  # all but the last string of each prompt
    assert near(np.bincount(lengths, minlength=50)[1:], np.full(49, len(lengths) / 49))
    where, target = batch.labelled()
    allowed = batch.layout.allowed(where)
    three = allowed.sum(dim=1) == 3
    rank = (allowed.cumsum(dim=1).gather(1, target[:, None]).squeeze(1) - 1)[three]
    assert near(np.bincount(rank.numpy()), np.full(3, len(rank) / 3))


def test_the_automata_of_the_splits_differ():
    task = cs.task("regbench", **SMALL)
    seen = [
        {row.numpy().tobytes() for row in task.batch(0, split=split, size=100).layout.leads_to}
        for split in ("train", "validation", "test")
    ]
    assert len(set.union(*seen)) == 300


def test_legality_and_distance_are_those_of_a_model_that_knows_the_automaton():
    task = cs.task("regbench", **SMALL)
    batch = task.batch(0, size=20)
    where, target = batch.labelled()
    allowed = batch.layout.allowed(where)
    assert allowed.gather(1, target[:, None]).all()
    perfect = torch.where(allowed, 0.0, -1e9)
    found = task.outcomes(batch, perfect)
    assert found["legality"].mean() == 1
    assert found["total variation"].max() < 1e-6
    wrong = task.outcomes(batch, -perfect)
    assert wrong["legality"].mean() == 0
    assert wrong["total variation"].min() == pytest.approx(1)
    sure = task.outcomes(batch, 1e9 * torch.nn.functional.one_hot(target, task.vocab_size).float())
    torch.testing.assert_close(sure["total variation"], 1 - 1 / allowed.sum(dim=1).float())


def test_a_batch_without_automata_is_refused_in_one_line():
    task = cs.task("regbench", **SMALL)
    batch = task.batch(0, size=2)
    bare = Batch(batch.tokens, batch.labels, Layout(batch.layout.roles))
    with pytest.raises(cs.UserError, match=r"^legality needs the automata of the strings"):
        task.right(bare, torch.zeros(batch.label_count, task.vocab_size))


def test_n_gram_counts_are_those_of_a_plain_count():
    task = cs.task("regbench", **SMALL)
    batch = task.batch(0, size=10)
    expected = []
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        seen: dict[tuple[int, ...], Counter] = {}
        for at, label in enumerate(labels):
            if label == NO_LABEL:
                continue
            begin = max(i for i in range(at + 1) if tokens[i] == SEPARATOR)
            contexts = [tuple(tokens[max(begin, at + 1 - size) : at + 1]) for size in range(3)]
            best = next((seen[c] for c in reversed(contexts) if c in seen), Counter())
            expected.append([best[token] for token in range(task.vocab_size)])
            for context in set(contexts):
                seen.setdefault(context, Counter())[label] += 1
    assert counts_in_context(batch, 3, task.vocab_size, SEPARATOR).tolist() == expected


def test_longer_contexts_are_legal_more_often():
    task = cs.task("regbench")
    batch = task.batch(0, split="test", size=60)
    three, two, one = (baseline(batch).mean().item() for baseline in task.baselines.values())
    assert 0.9 < three < 0.97
    assert three > two + 0.05 > one + 0.3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"states": [1, 4]}, "expected 2 <= states <= 16, got 1 to 4"),
        ({"states": [4, 17]}, "expected 2 <= states <= 16, got 4 to 17"),
        ({"strings": [5, 3]}, "strings: expected 1 <= least <= most, got 5 and 3"),
        ({"alphabet": [4, 19]}, "expected alphabet <= vocab_size - 1 = 18, got 4 to 19"),
        ({"edges": [1, 5]}, "expected edges <= least alphabet = 4, got 1 to 5"),
        ({"edges": [4, 4]}, "expected least edges < least alphabet = 4, got 4 to 4"),
        ({"edges": [1, 1], "states": [8, 8]}, "expected most edges > 1 or least states <= 6"),
        ({"length": 40}, "expected lengths <= length - 1 = 39, got 1 to 49"),
        ({"states": 4}, r"task.states: expected two whole numbers, the least and the most, such as \[4, 12\], got 4"),
        ({"states": [True, 4]}, "task.states: expected two whole numbers"),
    ],
)
def test_an_impossible_size_is_refused_with_the_inequality_it_breaks(options, expected):
    with pytest.raises(cs.UserError, match=expected) as error:
        cs.task("regbench", **options)
    assert "\n" not in str(error.value)


def test_the_shown_example_comes_with_its_automaton():
    shown = CliRunner().invoke(app, ["tasks", "show", "regbench", "--examples", "1"], catch_exceptions=False).output
    lines = [line.split() for line in shown.splitlines() if line]
    tokens = next(line for line in lines if line[0] == "tokens")
    edges = {}
    for line in (line for line in lines if line[0] == "state"):
        words = " ".join(line).replace(":", "").replace(",", "").replace("the start ", "").split()
        for at in range(2, len(words), 4):  # "state 0 2 to state 3 …"
            edges[int(words[1]), int(words[at])] = int(words[at + 3])
    assert edges
    state = 0
    for token in map(int, tokens[1:]):
        state = 0 if token == SEPARATOR else edges[state, token]
