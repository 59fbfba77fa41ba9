"""circuitscope shows how a sequence model learns to recall, and what its mixing matrix looks like meanwhile.

The public names below load on first use, so importing the package takes almost no time.

One setting is made here, because it must be made before torch is loaded: how long a thread of GNU OpenMP, which torch
and Numba compute with, spins at a barrier before it sleeps. See `_bound_the_spin`.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from circuitscope import analysis as analysis
    from circuitscope import mixers as mixers
    from circuitscope import models as models
    from circuitscope import tasks as tasks
    from circuitscope.analysis.checkpoints.runner import analyze as analyze
    from circuitscope.analysis.evaluation import evaluate as evaluate
    from circuitscope.analysis.probes.over_run import probe as probe
    from circuitscope.analysis.reading.mixing_matrix import phi as phi
    from circuitscope.analysis.reading.mixing_matrix import phi_chunks as phi_chunks
    from circuitscope.api import resume as resume
    from circuitscope.api import train as train
    from circuitscope.config import RunConfig as RunConfig
    from circuitscope.devices import reading_on as reading_on
    from circuitscope.errors import RunFailed as RunFailed
    from circuitscope.errors import UserError as UserError
    from circuitscope.models import model as model
    from circuitscope.models.hooked_lm import HookedLM as HookedLM
    from circuitscope.models.hooked_sequence import HookedSequenceModel as HookedSequenceModel
    from circuitscope.runs.run import Run as Run
    from circuitscope.runs.run import newest_run as newest_run
    from circuitscope.tasks import Batch as Batch
    from circuitscope.tasks import Layout as Layout
    from circuitscope.tasks import Role as Role
    from circuitscope.tasks import task as task
    from circuitscope.viz.report import report as report

_MODULES = ("analysis", "mixers", "models", "tasks")
_PUBLIC = {
    "Batch": "tasks",
    "HookedLM": "models.hooked_lm",
    "HookedSequenceModel": "models.hooked_sequence",
    "Layout": "tasks",
    "Role": "tasks",
    "Run": "runs.run",
    "RunConfig": "config",
    "RunFailed": "errors",
    "UserError": "errors",
    "analyze": "analysis.checkpoints.runner",
    "evaluate": "analysis.evaluation",
    "model": "models",
    "newest_run": "runs.run",
    "probe": "analysis.probes.over_run",
    "phi": "analysis.reading.mixing_matrix",
    "phi_chunks": "analysis.reading.mixing_matrix",
    "reading_on": "devices",
    "report": "viz.report",
    "resume": "api",
    "task": "tasks",
    "train": "api",
}

_SPIN_COUNT = "2500"  # about a tenth of a millisecond; docs/training.md has what other numbers cost and save

__all__ = [*_MODULES, *_PUBLIC]  # noqa: PLE0604


def _bound_the_spin() -> None:
    """Threads that wait for each other spin for a fraction of a millisecond, then sleep and give up their core.

    By itself GNU OpenMP lets them spin for milliseconds at each of hundreds of barriers in a training step. Beside a
    busy process on the same machine, the thread that is waited for has no core meanwhile. Nothing is changed if the
    user has chosen (OMP_WAIT_POLICY, GOMP_SPINCOUNT), or if torch is loaded already: then it is too late. Processes
    that are started from here inherit the setting. Results do not depend on it.
    """
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


_bound_the_spin()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"circuitscope.{name}")
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"circuitscope.{_PUBLIC[name]}"), name)
    # With the name and the module, Python itself adds "Did you mean …?" to the traceback.
    raise AttributeError(f"module 'circuitscope' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
