"""The grids at the papers' scale are for a GPU; here their models train a few steps, narrow and on few examples."""

from pathlib import Path

import pytest

from circuitscope.config import RunConfig
from circuitscope.sweeps.grid import read_grid
from circuitscope.training.trainer import train

ROOT = Path(__file__).parents[2] / "studies"
GRIDS = sorted(path.parent for path in ROOT.glob("*/paper/**/grid.yaml"))
SMALL = {
    "steps": 2,
    "batch_size": 4,
    "eval_every": 2,
    "eval_batches": 1,
    "eval_batch_size": 4,
    "save_every": 2,
    "log_every": 1,
    "device": "cpu",
}


def test_there_are_grids_at_the_papers_scale():
    assert {grid.relative_to(ROOT).parts[0] for grid in GRIDS} >= {"positions", "copying", "lr_windows"}


@pytest.mark.slow
@pytest.mark.parametrize("folder", GRIDS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_every_model_of_a_grid_trains(folder, tmp_path):
    different = {}
    for trial in read_grid(folder).trials:
        model = trial.config.model.model_dump()
        shape = str([model["mixers"][0], model["n_layers"] > 1, model["positions"], trial.config.task.name])
        different.setdefault(shape, trial)
    assert different
    for number, trial in enumerate(different.values()):
        data = trial.config.model_dump()
        mixers = data["model"]["mixers"][:2]
        data["model"] |= {"d_model": 32, "mixers": mixers, "n_layers": len(mixers)}
        data["train"] |= SMALL
        data["task"]["examples"] = 64
        run = train(RunConfig.model_validate(data), root=tmp_path, name=str(number))
        assert run.status["state"] == "finished"
        assert run.steps[-1] == 2
