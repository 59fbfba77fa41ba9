"""A score from outside appears in every display that it names, and in no other."""

import pytest
from made_up_runs import made_up_run, score_table

from circuitscope.analysis.phases.timeline import curves_of
from circuitscope.analysis.scores.edges import previous_token
from circuitscope.analysis.scores.registry import SCORES, edge_score, row_score
from circuitscope.viz.dynamics import dynamics
from circuitscope.viz.scores import scores
from circuitscope.viz.words.scores import score_lines
from registered import added_to

STEPS = [0, 1000, 2000]
TABLE = {("toy", 0, 0, "delta"): [0.1, 0.2, 0.3], ("recall", 0, 0, "delta"): [0.1, 0.2, 0.4]}


def displays(run):
    """What each display shows of a table with the scores toy and recall."""
    table = score_table(TABLE, STEPS)
    return {
        "table": [(line[0], line[-1]) for line in score_lines(table, repeats=False)],
        "timeline": [name for name in curves_of(run, table) if name.endswith("L0H0")],
        "dynamics": [line.get_label() for line in dynamics([run], scores=[table]).axes[-1].lines],
        "figure": [axes.get_title() for axes in scores({"run": table}).axes],
    }


@pytest.fixture
def run(tmp_path):
    return made_up_run(tmp_path)


def test_a_score_of_edges_is_in_every_display_that_it_names_after_our_own(run):
    with added_to(SCORES):
        edge_score("toy", "on toys", shown=("table", "timeline", "dynamics", "figure"))(previous_token)
        assert displays(run) == {
            "table": [("recall", "at a query, on the bound value"), ("toy", "on toys")],
            "timeline": ["recall L0H0", "toy L0H0"],
            "dynamics": ["recall, L0H0 (highest)", "toy, L0H0 (highest)"],
            "figure": ["recall: at a query, on the bound value", "toy: on toys"],
        }


def test_a_score_of_rows_is_shown_by_the_names_of_its_rows_and_may_leave_0_to_1(run):
    with added_to(SCORES):

        @row_score("toys", {"toy": "how many toys"}, shown=("figure", "dynamics"))
        def toys(model, data):
            yield from ()

        found = displays(run)
        assert found["figure"][1:] == ["toy: how many toys"]
        assert found["dynamics"][1:] == ["toy, L0H0 (highest)"]
        assert (len(found["table"]), len(found["timeline"])) == (1, 1)
        many = score_table({("toy", 0, 0, "delta"): [-3, 5, 40]}, STEPS)
        for axes in (scores({"run": many}).axes[0], dynamics([run], scores=[many]).axes[-1]):
            low, high = axes.get_ylim()
            assert low <= -3
            assert high >= 40


def test_one_that_is_not_registered_is_shown_nowhere(run):
    assert all(len(shown) == 1 for shown in displays(run).values())
