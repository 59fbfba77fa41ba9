"""How large a sudden fall of the loss must be to be found in the curves of this study that have none.

    python studies/one_layer_dynamics/power.py

To every loss of Hyena, H3 and RWKV in which no bump is found, a fall of a known size is added at places drawn at
random: a sigmoid in the log of the step. power.csv says how often the detector then finds a bump. The loss keeps
its own noise.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from circuitscope.studies.bump import bump
from circuitscope.sweeps.sweep import Sweep

HERE = Path(__file__).parent
SIZES = (0.05, 0.1, 0.2, 0.5, 1.0)  # in nats
PLACES = 4  # for each curve and size
MODELS = ("hyena", "h3", "rwkv")


def with_fall(points, size, rng):
    """The same curve with a fall of the loss: 10 to 90% of it within 2 to 8% of the run on a log scale."""
    steps = np.array([point["step"] for point in points], dtype=float)
    u = np.log(steps + steps[1])
    width = (u[-1] - u[0]) * rng.uniform(0.02, 0.08)
    midpoint = rng.uniform(np.log(400), u[-5])  # after the first fall, in which models learn which tokens are values
    fall = size / (1 + np.exp(-2 * np.log(9) * (u - midpoint) / width))
    return [{**point, "loss": point["loss"] - one} for point, one in zip(points, fall, strict=True)]


def main():
    sweep, rng, rows = Sweep.open(HERE), np.random.default_rng(0), []
    for model in MODELS:
        trials = [trial for trial in sweep.grid.trials if trial.values["model.preset"] == model]
        curves = [(trial, sweep.results.curves[trial.digest]) for trial in trials]
        smooth = [(trial, points) for trial, points in curves if bump("bump", trial, points) == 0]
        for size in SIZES:
            found = [
                bump("bump", one, with_fall(points, size, rng)) == 1 for one, points in smooth for _ in range(PLACES)
            ]
            rows.append({"model": model, "fall": size, "curves": len(smooth), "tried": len(found), "found": sum(found)})
            print(rows[-1], flush=True)
    pd.DataFrame(rows).to_csv(HERE / "power.csv", index=False)


if __name__ == "__main__":
    main()
