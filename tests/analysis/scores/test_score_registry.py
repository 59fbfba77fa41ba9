"""A score that someone registers is a score like ours: it has rows, edges by name, and knockouts."""

import pytest

import circuitscope as cs
from circuitscope.analysis import edge_score, knock_out, named_edges, row_score
from circuitscope.analysis.scores.edges import Edges, binding
from circuitscope.analysis.scores.held_out import HeldOut, check_scores
from circuitscope.analysis.scores.registry import EVERYWHERE, SCORES, shown_in
from circuitscope.analysis.scores.rows import score_rows
from circuitscope.errors import UserError
from planted import planted_induction, planted_task

TASK = planted_task()
INDUCTION = cs.task("induction", block=5, repeats=2, vocab_size=64)


@pytest.fixture
def forgotten(monkeypatch):
    """What the test registers is gone after it."""
    list(SCORES)
    monkeypatch.setattr(SCORES, "_things", dict(SCORES._things))
    monkeypatch.setattr(SCORES, "_from", dict(SCORES._from))


@pytest.fixture
def keys(forgotten):
    @edge_score("own_key", "at a context value, on its key", needs="pairs", shown=("table", "report"))
    def own_key(layout: cs.Layout) -> Edges:
        return Edges.of("own_key", binding(layout).mask())

    return own_key


@pytest.fixture(scope="module")
def data():
    return HeldOut(TASK, longest=32, sequences=16)


def test_it_has_rows_of_every_layer_and_head(keys, data):
    rows = [row for row in score_rows(planted_induction(), data, ["own_key", "binding"]) if row["head"] is not None]
    values = {(row["score"], row["layer"], row["head"]): row["value"] for row in rows}
    places = {(layer, head) for layer in (0, 1) for head in (0, 1)}
    assert values.keys() == {(score, *place) for score in ("own_key", "binding") for place in places}
    for place in places:
        assert values["own_key", *place] == values["binding", *place]
    assert values["own_key", 0, 0] > 0.95


def test_it_is_among_all_scores_of_the_tasks_that_can_have_it(keys):
    assert "own_key" in check_scores(None, TASK)
    assert check_scores(["own_key"], TASK) == ("own_key",)
    assert "own_key" not in check_scores(None, INDUCTION)
    with pytest.raises(UserError, match="own_key needs a task with keys, values and queries, and induction has none"):
        check_scores(["own_key"], INDUCTION)


def test_its_edges_have_its_name_and_can_be_cut(keys):
    batch = TASK.batch(0, split="test", size=16)
    edges = named_edges("own_key", batch.layout)
    assert edges.mask().equal(named_edges("binding", batch.layout).mask())
    assert knock_out(planted_induction(), batch, "own_key", layer=0).lost > 0.9
    assert abs(knock_out(planted_induction(), batch, "own_key", layer=1).lost) < 0.05
    with pytest.raises(UserError, match="did you mean 'own_key'"):
        named_edges("own_keys", batch.layout)


def test_it_is_shown_where_it_says(keys):
    for display in EVERYWHERE:
        assert ("own_key" in [score.name for score in shown_in(display)]) == (display in ("table", "report"))
    assert SCORES["own_key"].meaning == "at a context value, on its key"


def test_a_score_on_repeats_is_measured_there(forgotten, data):
    @edge_score("same_token", "on earlier occurrences", on="repeats")
    def same_token(layout):
        return Edges.of("same_token", named_edges("duplicate", layout).mask())

    rows = list(score_rows(planted_induction(), data, ["same_token", "duplicate"]))
    for row in rows:
        (twin,) = [r for r in rows if r | {"score": ""} == row | {"score": ""} and r is not row]
        assert {row["score"], twin["score"]} == {"same_token", "duplicate"}


def test_a_function_of_the_model_gives_its_own_rows(forgotten, data):
    row = {"layer": 1, "head": 0, "factor": "out", "unit": "head", "score": "norm", "weighting": "norm"}
    row |= {"value": 2.5, "stderr": 0.0, "n": 1}

    @row_score("norms", {"norm": "size of the output weights"}, shown=("table",))
    def norms(model, held_out):
        assert held_out is data
        yield row

    assert list(score_rows(planted_induction(), data, ["norms"])) == [row]
    assert "norms" in check_scores(None, TASK)
    with pytest.raises(UserError, match="unknown set of edges 'norms'"):
        named_edges("norms", data.own.layout)


@pytest.mark.parametrize("name", ["recall", "copying", "model", "induction"])
def test_a_name_of_ours_is_refused(forgotten, name):
    ours = SCORES[name]
    for register in (edge_score(name, "mine"), row_score(name, {name: "mine"})):
        with pytest.raises(UserError, match=f"cannot register the score '{name}': that name is circuitscope's own"):
            register(lambda *_: None)
    assert SCORES[name] is ours


def test_a_score_whose_edges_are_nowhere_has_no_rows(forgotten, data):
    @edge_score("nowhere", "on nothing")
    def nowhere(layout: cs.Layout) -> Edges:
        return Edges.of("nowhere", binding(layout).mask() & False)

    assert {row["score"] for row in score_rows(planted_induction(), data, ["nowhere", "binding"])} == {"binding"}


@pytest.mark.parametrize("offset", ["9" * 20, "9" * 5000])
def test_edges_moved_further_than_any_sequence_is_long_are_refused(offset):
    layout = cs.task("mqar", length=16, pairs=2, vocab_size=64).batch(0, size=2).layout
    with pytest.raises(UserError, match="an offset must be below the length of the sequences, 16"):
        cs.analysis.named_edges(f"recall+{offset}", layout)
