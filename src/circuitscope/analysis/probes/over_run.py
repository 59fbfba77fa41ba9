"""A probe on one model, and on every checkpoint of a run: one row per hook and role."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from circuitscope.analysis.causal.interventions import Effect
from circuitscope.analysis.checkpoints.runner import kept_tables, over_checkpoints
from circuitscope.analysis.checkpoints.steps import ChosenSteps
from circuitscope.analysis.probes.activations import Features, collect, matching_hooks
from circuitscope.analysis.probes.definition import Definition
from circuitscope.analysis.probes.estimators import Floats
from circuitscope.analysis.probes.fitting import Fit, TooFewExamples, fit
from circuitscope.analysis.probes.removal import accuracy_without, mean_at, random_directions
from circuitscope.analysis.probes.states import check_has_state, readable_state
from circuitscope.analysis.probes.targets import ProbeExamples, examples_of
from circuitscope.analysis.reading.opened import opened
from circuitscope.arguments import explained
from circuitscope.errors import UserError, shown
from circuitscope.lens import HookedModel, layer_of
from circuitscope.models.build import build_model
from circuitscope.progress import Progress
from circuitscope.runs.run import Run
from circuitscope.tasks import Batch, check_batch

SEQUENCES = 1536  # two thirds to train on, one third to test on
COLUMNS = {
    "run": "string",
    "step": "int64",
    "layer": "Int64",
    "hook": "string",
    "role": "string",
    "at": "string",
    "probe": "string",
    "target": "string",
    "model": "string",
    "metric": "string",
    "accuracy": "float64",
    "low": "float64",
    "high": "float64",
    "control": "float64",
    "selectivity": "float64",
    "majority": "float64",
    "chance": "float64",
    "n_train": "int64",
    "n_test": "int64",
    "directions": "Int64",
    "left": "float64",
    "model_accuracy": "float64",
    "lost": "float64",
    "lost_stderr": "float64",
    "lost_control": "float64",
    "lost_random": "float64",
}
_VERSION = 1  # version of what the tables hold


@explained
def probe(
    run: Run | str | Path,
    definition: Definition | str | Path,
    *,
    steps: ChosenSteps = None,
    hooks: Sequence[str] | None = None,
    sequences: int = SEQUENCES,
    causal: bool = False,
    directions: int | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """A probe on a run's checkpoints: a tidy table, also kept in RUN/analysis, in one file per probe and settings.

    Args:
        definition: a name from `shipped()`, a YAML file, or a Definition.
        steps: "all" (the default), "0:2000:100", or numbers.
        hooks: names or patterns in place of the definition's.
        sequences: held-out sequences, two thirds to train the probe on and one third to test it on.
        causal: also project the probe's directions out of the activations of the test sequences, at all
            positions of the role, and report how much accuracy the model loses on its task.
        directions: how many directions to project out; by default as many as hold 99% of the covariance with the label.

    Returns:
        One row per step, hook and role: `accuracy` with its 95% interval, `control`, `selectivity`,
        `majority`, `chance`. With `causal` also `left`, the accuracy of a new probe after the removal;
        `model_accuracy`, that of the model on its task, and how much of it is `lost`; and how much is lost when as
        many directions are removed that belong to the control task (`lost_control`) or are random (`lost_random`).
    """
    run = Run.of(run)
    definition = _with_hooks(Definition.load(definition), hooks)
    _check_sequences(sequences)
    config = run.config
    seed = config.train.batch_seed
    batch = config.task.batch(0, split="test", size=sequences, seed=seed)
    data = ProbeData(definition, batch)
    _hooks(build_model(config.model), data)  # a wrong name is refused before any work
    removal = Removal(directions) if causal else None
    settings = [_VERSION, definition.model_dump(exclude={"about"}), causal, directions if causal else None]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    frame, _ = over_checkpoints(
        run,
        f"probe-{definition.name}-{digest}",
        COLUMNS,
        lambda model: probe_rows(model, data, removal),
        steps,
        sequences,
        progress,
    )
    return frame


@explained
def kept_probes(run: Run | str | Path) -> dict[str, pd.DataFrame]:
    """The tables that `probe` kept of a run, by file: one for each probe and settings. Nothing is computed."""
    return kept_tables(Run.of(run), "probe-", COLUMNS)


@explained
def probe_model(
    model: HookedModel,
    batch: Batch,
    definition: Definition | str | Path,
    *,
    hooks: Sequence[str] | None = None,
    causal: bool = False,
    directions: int | None = None,
) -> pd.DataFrame:
    """A probe on one model: rows as `probe` gives them, without run and step. Two thirds of the batch train it."""
    check_batch(batch)
    _check_sequences(len(batch))
    data = ProbeData(_with_hooks(Definition.load(definition), hooks), batch)
    columns = {name: kind for name, kind in COLUMNS.items() if name not in ("run", "step")}
    rows = list(probe_rows(model, data, Removal(directions) if causal else None))
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


@dataclass(frozen=True)
class Removal:
    """Asks what the model loses without `count` of the probe's directions; by default, those of `Fit.directions`."""

    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise UserError(f"directions must be at least 1, got {shown(self.count)}")


class ProbeData:
    """The sequences on which a probe works, its examples by role, and which sequences are for testing.

    Test sequences that equal a training sequence are left out.
    """

    def __init__(self, definition: Definition, batch: Batch):
        self.definition, self.batch = definition, batch
        self.n_train = 2 * len(batch) // 3
        every = np.unique(batch.inputs.flatten(1).cpu().numpy(), axis=0, return_inverse=True)[1].reshape(-1)
        self.kept = ~np.isin(every, every[: self.n_train])
        self.kept[: self.n_train] = True
        self.places = {r: e.where(self.kept[e.sequence]) for r, e in examples_of(definition, batch).items()}
        self.places = {r: e for r, e in self.places.items() if not self._hopeless(e)}
        if not self.places:
            raise UserError(f"{definition.target} is the same at every position of every role: nothing to decode")
        self.examples = {r: e.at_most(definition.per_sequence) for r, e in self.places.items()}

    def _hopeless(self, e: ProbeExamples) -> bool:
        """Whether to leave out a role: with `roles: each` one whose label never changes."""
        return self.definition.roles == "each" and bool((e.label == e.label[0]).all())

    def fit(self, role: str, X: Features, embedding: Features | None, control: bool = True) -> Fit:
        """The probe on the activations of a role's examples."""
        e, definition = self.examples[role], self.definition
        try:
            return fit(
                X,
                e.label,
                model=definition.model,
                groups=e.sequence,
                candidates=e.candidates,
                embedding=embedding,
                identities=e.identity,
                control=control and definition.control != "none",
                test=e.sequence >= self.n_train,
            )
        except TooFewExamples as error:
            need = math.ceil(len(self.batch) * error.need / error.have)
            raise UserError(f"{definition.name} at role {role}: {error}; use about {need} sequences") from None
        except UserError as error:
            raise UserError(f"{definition.name} at role {role}: {error}") from None

    def tested(self, role: str) -> tuple[Batch, torch.Tensor]:
        """The test sequences, and a mask of all their positions that the probe reads."""
        e, n = self.places[role], self.n_train
        where = torch.zeros(self.batch.layout.roles.shape, dtype=torch.bool)
        where[torch.from_numpy(e.sequence), torch.from_numpy(e.pos)] = True
        kept = torch.from_numpy(np.flatnonzero(self.kept[n:])) + n
        return self.batch.part(kept), where[kept]


def probe_rows(model: HookedModel, data: ProbeData, removal: Removal | None = None) -> Iterator[dict[str, Any]]:
    """One row per hook and role, without run and step; with `removal` also what the removal costs."""
    definition = data.definition
    by_embedding = definition.model in ("embedding", "candidates")
    embedding = opened(model).embedding.detach().float().cpu().numpy() if by_embedding else None
    found = collect(model, data.batch.inputs, _hooks(model, data), data.examples, read_out=definition.read_out)
    for (hook, role), X in found.items():
        e = data.examples[role]
        row: dict[str, Any] = {
            "layer": layer_of(hook),
            "hook": hook,
            "role": role,
            "at": definition.at,
            "probe": definition.name,
            "target": definition.target,
            "model": definition.model,
            "n_train": int((e.sequence < data.n_train).sum()),
            "n_test": int((e.sequence >= data.n_train).sum()),
        }
        if not np.isfinite(X).all():  # a model that diverged
            yield row | {"metric": "accuracy"}
            continue
        fitted = data.fit(role, X, embedding)
        numbers = ("metric", "accuracy", "low", "high", "control", "selectivity", "majority", "chance")
        row |= {name: getattr(fitted, name) for name in numbers}
        if removal is not None:
            U = fitted.directions(None if removal.count is None else min(removal.count, *fitted.covariance.shape))
            rest = (X - (X - X.mean(axis=0)) @ U.T @ U).astype(np.float32)
            row |= {"left": data.fit(role, rest, embedding, control=False).accuracy}
            row |= _cost(model, data, hook, role, fitted, U)
        yield row


def _cost(model: HookedModel, data: ProbeData, hook: str, role: str, fitted: Fit, U: Floats) -> dict[str, Any]:
    """The accuracy the model loses without the probe's directions, those of the control, or random ones."""
    batch, where = data.tested(role)
    read_out = data.definition.read_out
    mean = mean_at(model, batch, hook, where)
    before = accuracy_without(model, batch, hook, where, None)

    def without(U: Any) -> Effect:
        return Effect.of(before, accuracy_without(model, batch, hook, where, U, mean=mean, read_out=read_out))

    effect, control = without(U), fitted.control_directions(len(U))
    return {
        "directions": len(U),
        "model_accuracy": effect.before,
        "lost": effect.lost,
        "lost_stderr": effect.stderr,
        "lost_control": float("nan") if control is None else without(control).lost,
        "lost_random": without(random_directions(*U.shape)).lost,
    }


def _hooks(model: HookedModel, data: ProbeData) -> list[str]:
    """The hooks that a probe reads in a model; an error says what it cannot read."""
    definition, tokens = data.definition, data.batch.inputs
    if definition.read_out:
        check_has_state(model, tokens)
    names = matching_hooks(model, definition.hooks)
    for name in names if definition.read_out else ():
        readable_state(model, tokens, name)
    return names


def _with_hooks(definition: Definition, hooks: Sequence[str] | None) -> Definition:
    if hooks is None:
        return definition
    return definition.model_copy(update={"hooks": tuple([hooks] if isinstance(hooks, str) else hooks)})


def _check_sequences(sequences: int) -> None:
    if sequences < 6:
        raise UserError(f"a probe needs at least 6 sequences, two thirds to train on; got {shown(sequences)}")
