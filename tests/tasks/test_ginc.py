"""GINC: documents follow the hidden Markov models, and the posterior is the same computed in several ways."""

import itertools

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope.tasks import NO_LABEL, Role, hmm
from circuitscope.tasks.ginc import DELIMITER


@pytest.fixture
def tiny():
    """Two models of 2 values and 3 slots."""
    return hmm.models(5, 2, 2, 3, 5, stay=0.6, temperature=0.5, start=1.0)


def plain(models, model):
    """Start, moves and memory over all states of one model, as one would write them without the product of chains."""
    moves = np.kron(models.values.moves[0], models.slots.moves[model])
    return models.start[model].ravel(), moves, models.memory.ravel()


def enumerated(models, tokens, prior):
    """P(model, next state | tokens) by summing over every path of hidden states."""
    found = np.zeros((len(prior), models.memory.size))
    for model, weight in enumerate(prior):
        start, moves, memory = plain(models, model)
        for path in itertools.product(range(len(start)), repeat=len(tokens)):
            if all(memory[s] == t for s, t in zip(path, tokens, strict=True)):
                steps = [moves[a, b] for a, b in itertools.pairwise(path)]
                found[model] += weight * start[path[0]] * np.prod(steps) * moves[path[-1]]
    return found / found.sum()


def some_tokens(models, length, seed):
    """Tokens of a path that the first model can take."""
    draw, (start, moves, memory) = np.random.default_rng(seed), plain(models, 0)
    states = [draw.choice(len(start), p=start)]
    for _ in range(length - 1):
        states.append(draw.choice(len(start), p=moves[states[-1]]))
    return memory[states]


@pytest.mark.parametrize("seed", range(6))
def test_the_forward_algorithm_gives_what_enumeration_gives(tiny, seed):
    tokens, prior = some_tokens(tiny, 5, seed), np.array([0.3, 0.7])
    belief = (prior[:, None, None] * tiny.start)[None]
    for at, after in enumerate(tiny.forward(tokens[None], belief), 1):
        np.testing.assert_allclose(after.reshape(2, -1), enumerated(tiny, tokens[:at], prior), atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_forward_algorithm_gives_what_matrix_products_and_forward_backward_give(tiny, seed):
    """Products of moves · diag(emission), and the posterior of each earlier state weighted by what follows it."""
    tokens = some_tokens(tiny, 12, seed)
    start, moves, memory = plain(tiny, 0)
    product = start
    for token in tokens:
        product = product @ np.diag(memory == token) @ moves
    only_first = np.zeros((1, 2, *tiny.memory.shape))
    only_first[0, 0] = tiny.start[0]
    *_, after = tiny.forward(tokens[None], only_first)
    np.testing.assert_allclose(after[0, 0].ravel(), product / product.sum(), atol=1e-12)
    assert after[0, 1].sum() == 0

    forward, backward = [start * (memory == tokens[0])], [np.ones(len(start))]
    for token in tokens[1:]:
        forward.append((forward[-1] @ moves) * (memory == token))
    for token in tokens[:0:-1]:
        backward.append(moves @ ((memory == token) * backward[-1]))
    both = [a * b for a, b in zip(forward, reversed(backward), strict=True)]
    np.testing.assert_allclose([x.sum() for x in both], both[0].sum())  # the likelihood, at every position
    np.testing.assert_allclose(after[0, 0].ravel(), (both[-1] / both[-1].sum()) @ moves, atol=1e-12)


def test_the_shown_distribution_adds_up_the_states_of_each_token(tiny):
    belief = np.random.default_rng(0).dirichlet(np.ones(12), size=3).reshape(3, 2, 2, 3)
    expected = [[row.sum(axis=0)[tiny.memory == token].sum() for token in range(5)] for row in belief]
    np.testing.assert_allclose(tiny.shown(belief), expected)


def test_moves_are_stochastic_both_ways_and_values_mostly_stay():
    models = cs.task("ginc").models
    for moves in (models.values.moves, models.slots.moves):
        np.testing.assert_allclose(moves.sum(axis=1), 1)
        np.testing.assert_allclose(moves.sum(axis=2), 1)
    assert (np.diagonal(models.values.moves[0]) >= 0.9).all()
    np.testing.assert_allclose(models.start.sum(axis=(1, 2)), 1)
    assert (models.start * 100 > 0.9).all()
    assert (models.memory[:, 0] == DELIMITER).all()
    assert (models.memory[:, 1:] != DELIMITER).all()
    assert models.slots.moves.shape == (5, 10, 10)
    assert not np.allclose(models.slots.moves[0], models.slots.moves[1])


def test_models_are_a_function_of_their_own_seed():
    one, same, other = cs.task("ginc"), cs.task("ginc", examples=7), cs.task("ginc", hmm_seed=1)
    assert np.array_equal(one.models.memory, same.models.memory)
    assert not np.array_equal(one.models.memory, other.models.memory)
    assert not np.array_equal(one.models.slots.moves, other.models.slots.moves)


def near(counts, expected):
    """Chi-square within five standard deviations of its mean, over what is expected at least five times."""
    counts, expected = counts[expected >= 5], expected[expected >= 5]
    free = len(counts) - 1
    return ((counts - expected) ** 2 / expected).sum() < free + 5 * np.sqrt(2 * free)


def test_documents_move_as_their_models_say():
    task = cs.task("ginc", length=200)
    layout = task.batch(0, size=600).layout
    value, slot, model = layout.value.numpy(), layout.slot.numpy(), layout.model.numpy()
    assert near(np.bincount(model), np.full(5, 120.0))
    for one in range(5):
        mine = model == one
        first = np.zeros((10, 10))
        np.add.at(first, (value[mine, 0], slot[mine, 0]), 1)
        moved = np.zeros((10, 10))
        np.add.at(moved, (slot[mine, :-1].ravel(), slot[mine, 1:].ravel()), 1)
        expected = moved.sum(axis=1, keepdims=True) * task.models.slots.moves[one]
        assert near(moved.ravel(), expected.ravel())
        assert (moved[expected == 0] == 0).all()
    both = np.zeros((10, 10))
    np.add.at(both, (value[:, :-1].ravel(), value[:, 1:].ravel()), 1)
    assert near(both.ravel(), (both.sum(axis=1, keepdims=True) * task.models.values.moves[0]).ravel())


def test_tokens_are_those_of_the_hidden_states_and_labels_the_next_tokens():
    task = cs.task("ginc", length=60)
    batch = task.batch(0, size=30)
    shown = task.models.memory[batch.layout.value.numpy(), batch.layout.slot.numpy()]
    assert np.array_equal(shown, batch.tokens.numpy())
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert (batch.labels != NO_LABEL).all()
    assert torch.equal(batch.layout.roles == Role.SEPARATOR, batch.tokens == DELIMITER)


@pytest.mark.parametrize(("shots", "size"), [(0, 3), (1, 10), (5, 3), (8, 5)])
def test_prompts_are_examples_of_one_model_and_one_first_slot(shots, size):
    task = cs.task("ginc", form="prompt", shots=shots, example_length=size)
    batch = task.batch(0, size=50)
    assert batch.tokens.shape == (50, task.max_length) == (50, shots * (size + 1) + size - 1)
    assert batch.label_count == 50
    assert (batch.labels[:, -1] != NO_LABEL).all()
    slot, value = batch.layout.slot.numpy(), batch.layout.value.numpy()
    assert np.array_equal(task.models.memory[value, slot], batch.tokens.numpy())
    begins = slot[:, :: size + 1]
    assert (begins == begins[:, :1]).all()
    assert (begins > 0).all()
    if shots:
        assert (batch.tokens[:, size :: size + 1] == DELIMITER).all()
        assert (value[:, :: size + 1] != value[:, :1]).any() or shots < 2
    assert len(set(begins[:, 0].tolist())) > 5


def test_the_label_is_the_likeliest_next_token_by_enumeration():
    """Given the prompt's own model, its first slot and the last example, with all values equally likely at first."""
    task = cs.task("ginc", form="prompt", shots=2, example_length=4, values=3, slots=4, hmms=2, vocab_size=8)
    batch = task.batch(0, size=60)
    margin = 0
    for row in range(60):
        model, tokens = int(batch.layout.model[row]), batch.tokens[row].numpy()
        _, moves, memory = plain(task.models, model)
        likely = np.zeros(task.vocab_size)
        first = int(batch.layout.slot[row, 0])
        for start in range(3):
            for path in itertools.product(range(12), repeat=3):
                states = (start * 4 + first, *path)
                if all(memory[s] == t for s, t in zip(states[:-1], tokens[-3:], strict=True)):
                    likely[memory[states[-1]]] += np.prod([moves[a, b] for a, b in itertools.pairwise(states)])
        best, second = np.sort(likely)[:-3:-1]
        if best > second * (1 + 1e-9):
            assert batch.labels[row, -1] == likely.argmax()
            margin += 1
    assert margin > 50


def test_the_posterior_beats_bigrams_and_is_right_as_often_as_it_expects_to_be():
    task = cs.task("ginc", length=200)
    batch = task.batch(0, split="test", size=60)
    posterior, bigrams, trigrams = (baseline(batch).mean().item() for baseline in task.baselines.values())
    assert posterior > trigrams + 0.1
    assert posterior > bigrams + 0.2
    belief = np.repeat(task.models.start[None] / 5, 60, axis=0)
    expected = [task.models.shown(b).max(axis=1) for b in task.models.forward(batch.tokens.numpy(), belief)]
    assert np.mean(expected) == pytest.approx(posterior, abs=0.02)


def test_evaluation_measures_documents_and_prompts_by_the_number_of_examples():
    task = cs.task("ginc", length=60)
    model = cs.model("attention", d_model=8, **task.needs())
    found = task.measures(model, task.batch(0, split="test", size=5))
    assert list(found) == [
        "loss",
        "accuracy",
        "accuracy after 0 examples",
        "accuracy after 1 example",
        "accuracy after 2 examples",
        "accuracy after 4 examples",
    ]
    assert found["accuracy"].count.sum() == 300
    assert found["accuracy after 4 examples"].count.sum() == 5
    again = task.measures(model, task.batch(0, split="test", size=5))
    assert all(torch.equal(found[name].total, again[name].total) for name in found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"form": "prompt", "length": 100},
            "example_length - 1 <= length = 100, got 713 with shots 64",
        ),
        ({"example_length": 20, "length": 10}, "expected example_length - 1 <= length = 10, got example_length 20"),
        ({"slots": 1}, "task.slots: expected at least 2"),
    ],
)
def test_an_impossible_size_is_refused_with_the_inequality_it_breaks(options, expected):
    with pytest.raises(cs.UserError, match=expected) as error:
        cs.task("ginc", **options)
    assert "\n" not in str(error.value)
