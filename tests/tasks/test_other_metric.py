"""A task may measure something else than accuracy: phases, figures and the report take its metric by its name."""

from typing import Literal

import pytest

import circuitscope as cs
from circuitscope.analysis.phases.timeline import curves_of, timeline
from circuitscope.config import RunConfig
from circuitscope.tasks import MQAR, TASKS
from circuitscope.training.trainer import train
from circuitscope.viz.dynamics import dynamics
from registered import added_to
from tiny_run import TINY


class Exact(MQAR):
    """MQAR under another name for its metric."""

    metric = "exact"
    name: Literal["exact_recall"] = "exact_recall"


@pytest.fixture
def run(tmp_path):
    with added_to(TASKS):
        TASKS.add("exact_recall", Exact, __name__)
        yield train(RunConfig.build("attention", "exact_recall", **TINY), root=tmp_path, name="exact")


def test_its_metric_is_a_curve_a_panel_and_a_part_of_the_report(run, tmp_path):
    own = train(RunConfig.build("attention", "mqar", **TINY), root=tmp_path, name="own")
    assert "exact" in run.metrics.columns
    assert list(curves_of(run)) == ["loss", "exact", "train loss"]
    assert "exact" in timeline(run).found
    assert dynamics([run]).axes[1].get_ylabel() == "exact"
    assert [axes.get_ylabel() for axes in dynamics([run, own]).axes] == ["loss", "exact", "accuracy"]
    assert "exact" in cs.report(run, sequences=4, examples=1).html
