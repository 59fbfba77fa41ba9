"""How well w can be read at each point of an in-context linear regression, beside what least squares knows of it there.

After i points in d > i dimensions, no one can know more of w than its part in their span: least squares' own estimate
has an R² of about i / d, and 1 from d points on.
"""

import numpy as np
import pandas as pd

from circuitscope.analysis.probes.activations import collect
from circuitscope.analysis.probes.estimators import Floats
from circuitscope.analysis.probes.fitting import fit
from circuitscope.analysis.probes.targets import ProbeExamples
from circuitscope.arguments import explained
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel
from circuitscope.tasks import Batch, Role, check_batch
from circuitscope.tasks.baselines import least_squares_weights


@explained
def weights_by_point(model: HookedModel, batch: Batch, hook: str, *, role: str = "output") -> pd.DataFrame:
    """What a ridge probe reads of w from an activation at each point, one probe for each position of a role.

    Args:
        batch: sequences of a linear regression; two thirds train the probes.
        hook: the activation: "blocks.1.hook_resid_post", or a recurrent state, "blocks.0.mixer.hook_state".
        role: where it is read: at the x of a point ("input") or at its y ("output").

    Returns:
        One row per point: `points`, how many whole points have been seen there; `weights`, the R² of the probe for w;
        `least_squares`, the R² of least squares' own estimate of w from those points; `estimate`, the R² of a probe
        for that estimate in place of w (nan where there is none yet).
    """
    check_batch(batch)
    if batch.weights is None:
        raise UserError("weights_by_point needs sequences of a linear regression, which carry their weight vector")
    here, n = Role.named(role), len(batch)
    x, y = batch.inputs[:, ::2].double().cpu().numpy(), batch.inputs[:, 1::2, 0].double().cpu().numpy()
    clean = (batch.layout.roles[:, ::2] == Role.INPUT).numpy()
    x, y, w = x * clean[:, :, None], y * clean, batch.weights.double().cpu().numpy()
    sequence = np.arange(n)
    positions = np.flatnonzero((batch.layout.roles == here).numpy().all(axis=0))
    if not len(positions):
        raise UserError(f"no position has the role '{role}' in every sequence")
    places = {str(pos): np.full(n, pos) for pos in positions.tolist()}
    examples = {name: ProbeExamples(sequence, at, at, w, sequence) for name, at in places.items()}
    activations = collect(model, batch.inputs, [hook], examples)
    rows = []
    for pos in positions.tolist():
        found = activations[hook, str(pos)]
        seen = (pos + 1) // 2
        known = least_squares_weights(x[:, :seen], y[:, :seen]) if seen else np.zeros_like(w)
        rows.append(
            {
                "points": seen,
                "weights": _read(found, w),
                "least_squares": 1 - float(np.square(known - w).sum() / np.square(w - w.mean(axis=0)).sum()),
                "estimate": _read(found, known) if seen else float("nan"),
            }
        )
    return pd.DataFrame(rows)


def _read(found: Floats, labels: Floats) -> float:
    n = len(labels)
    return fit(
        found, labels, model="ridge", groups=np.arange(n), control=False, test=np.arange(n) >= 2 * n // 3
    ).accuracy
