"""Copying: the answer is the string, or what follows its n-gram, and exact match needs all of it."""

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope.tasks import NO_LABEL, Role
from circuitscope.tasks.copy import BAR, END, LETTERS, PAD, START

forms = pytest.mark.parametrize("form", ["string", "prefix", "suffix"])


@forms
def test_the_labels_are_the_answer_and_the_end_mark(form):
    task = cs.task("copy", form=form, ngram=2, answer=3)
    batch = task.batch(0, size=60)
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        end = tokens.index(END)
        assert tokens[0] == START
        assert set(tokens[end + 1 :]) <= {PAD}
        parts, here = [], []
        for token in tokens[1:end]:
            if token == BAR:
                parts.append(here)
                here = []
            else:
                here.append(token)
        string = parts[1] if form == "prefix" else parts[0]
        assert 5 <= len(string) <= 19
        if form == "string":
            assert here == string
        else:
            gram = parts[0] if form == "prefix" else parts[1]
            places = [i for i in range(len(string) - 1) if string[i : i + 2] == gram]
            assert len(places) == 1  # so the answer is unique
            assert here == string[places[0] + 2 : places[0] + 5]
        begin = end - len(here) - 1
        assert labels == [NO_LABEL] * begin + [*here, END] + [NO_LABEL] * (len(tokens) - end)


@forms
def test_the_layout_says_which_letter_of_the_string_answers(form):
    batch = cs.task("copy", form=form, answer=2, shortest=6).batch(0, size=60)
    at = batch.layout
    answers = batch.tokens.gather(1, at.answer_pos())
    assert torch.equal(answers, batch.labels.gather(1, at.query_pos))
    assert (at.roles.gather(1, at.answer_pos()) == Role.VALUE).all()
    assert torch.equal(at.roles == Role.QUERY, batch.labels != NO_LABEL)


def test_lengths_and_letters_are_uniform():
    batch = cs.task("copy").batch(0, size=6000)
    lengths = (batch.layout.roles == Role.VALUE).sum(dim=1).numpy()
    counts = np.bincount(lengths)[5:]
    assert len(counts) == 15
    assert ((counts - 400) ** 2 / 400).sum() < 14 + 5 * np.sqrt(28)
    first = np.bincount(batch.tokens[:, 1].numpy() - LETTERS, minlength=26)
    assert ((first - 6000 / 26) ** 2 / (6000 / 26)).sum() < 25 + 5 * np.sqrt(50)


def test_exact_match_needs_every_character():
    task = cs.task("copy")
    batch = task.batch(0, size=10)
    _, target = batch.labelled()
    logits = torch.nn.functional.one_hot(target, task.vocab_size).float()
    assert task.outcomes(batch, logits)["exact match"].nanmean() == 1
    logits[0] = logits[0].roll(1)  # the first character of the first string
    found = task.outcomes(batch, logits)
    assert found["exact match"].nanmean() == pytest.approx(0.9)
    assert found["accuracy"].mean() == pytest.approx(1 - 1 / len(target))
    assert (~found["exact match"].isnan()).sum() == 10


@pytest.fixture(scope="module")
def half_trained():
    """A small model that copies some strings of three letters and fails on others, and strings to copy."""
    task = cs.task("copy", vocab_size=8, shortest=2, longest=4)
    model = cs.model("mamba", n_layers=1, d_model=16, vocab_size=8, max_length=task.max_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        optimizer.zero_grad()
        task.loss(model, task.batch(step, size=32))[0].backward()
        optimizer.step()
    return task, model.eval(), task.batch(0, split="test", size=60)


def test_generated_characters_are_those_that_generation_from_the_prompt_gives(half_trained):
    task, model, batch = half_trained
    found = task.measures(model, batch)
    assert list(found) == ["loss", "accuracy", "exact match", "generated accuracy", "generated exact match"]
    for i in range(len(batch)):
        asked = (batch.labels[i] != NO_LABEL).nonzero()[:, 0]
        prompt = batch.tokens[i : i + 1, : int(asked[0]) + 1]
        said = model.generate(prompt, len(asked))[0, prompt.shape[1] :]
        right = (said == batch.labels[i, asked]).double()
        assert found["generated accuracy"].total[i] == right.sum()
        assert found["generated accuracy"].count[i] == len(asked)
        assert found["generated exact match"].total[i] == right.prod()


def test_greedy_generation_is_right_throughout_exactly_where_teacher_forcing_is(half_trained):
    """A string that is right so far was read right so far; so only the accuracy per character differs."""
    task, model, batch = half_trained
    found = task.measures(model, batch)
    assert torch.equal(found["generated exact match"].total, found["exact match"].total)
    assert 0.02 < found["exact match"].mean() < 0.9
    assert found["generated accuracy"].mean() != found["accuracy"].mean()


def test_what_cannot_generate_is_measured_without_it_and_says_why():
    task = cs.task("copy", vocab_size=8, shortest=2, longest=4)
    batch = task.batch(0, size=5)
    ahead = cs.model("attention", conv_on="v", conv_mode="centred", d_model=16, vocab_size=8, max_length=16)
    assert list(task.measures(ahead, batch)) == ["loss", "accuracy", "exact match"]
    for name in ("generated accuracy", "generated exact match"):
        assert "needs a causal model" in task.unmeasured(ahead)[name]
        assert "needs a model with recurrent steps" in task.unmeasured(torch.nn.Linear(2, 2))[name]
    assert task.unmeasured(cs.model("lstm", vocab_size=8)) == {}


@forms
def test_any_letter_of_the_string_is_right_as_often_as_the_letter_stands_in_it(form):
    task = cs.task("copy", form=form, vocab_size=12)
    batch = task.batch(0, size=20)
    found = task.baselines["any letter of the string"](batch).tolist()
    expected = []
    for tokens, labels, roles in zip(batch.tokens, batch.labels, batch.layout.roles, strict=True):
        string = tokens[roles == Role.VALUE].tolist()
        expected += [string.count(label) / len(string) for label in labels[labels != NO_LABEL].tolist()]
    assert found == pytest.approx(expected)
    assert min(found) == 0  # the end mark
