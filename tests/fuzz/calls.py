"""Calls from Python: every public function with odd arguments. A refusal is a UserError, never another library's error.

The functions come from the package's own lists of public names. Parameters get right values by their name, and one or
two of them an odd one: mostly a mistake that is easily made (another number, a misspelled name, a tensor of another
shape, one where a list is expected), sometimes a value that no one would pass. A finding says whether an argument had
another type than it should have. Left out: what registers something (it would stay registered) and plain records,
which hold what they are given.
"""

import inspect
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import outcome
import pool
from ground import SEQUENCES

from step import Input

_REGISTER = {"analysis", "run_analysis", "edge_score", "row_score", "target"}
_RECORDS = {
    *("Batch", "Layout", "Role", "Circuit", "Effect", "Mixing", "Edges", "RunConfig", "UserError", "RunFailed"),
    *("HookedLM", "HookedSequenceModel", "Fit", "CandidateSet", "EmbeddingRidge", "Definition", "TARGETS", "SEQUENCES"),
}
_SMALL = {"length": 16, "pairs": 2, "vocab_size": 64, "d_model": 8, "n_layers": 1, "batch_size": 4, "device": "cpu"}
_MODELS = ("attention", "mamba", "lstm", "deltanet", "based")


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """The functions by the name under which a user calls them; those of objects take the object first."""
    import circuitscope as cs
    from circuitscope.analysis import probes
    from circuitscope.config import RunConfig
    from circuitscope.viz.dynamics import dynamics
    from circuitscope.viz.phi_figure import phi_figure

    left_out = {*_REGISTER, *_RECORDS, "probes", "analysis", "mixers", "models", "tasks"}
    found: dict[str, Any] = {f"cs.{name}": getattr(cs, name) for name in cs.__all__ if name not in left_out}
    found |= {f"cs.analysis.{n}": getattr(cs.analysis, n) for n in cs.analysis.__all__ if n not in left_out}
    public = [n for n in vars(probes) if not n.startswith("_") and n not in left_out and callable(getattr(probes, n))]
    found |= {f"cs.analysis.probes.{name}": getattr(probes, name) for name in public}
    found |= {"Definition.load": probes.Definition.load, "phi_figure": phi_figure, "dynamics": dynamics}
    found |= {f"RunConfig.{name}": getattr(RunConfig, name) for name in ("parse", "load", "build")}
    found |= {
        "run.load": lambda run, step=None: run.load(step),
        "run.config": lambda path: (cs.Run(path).config, cs.Run(path).metrics),
        "task.batch": lambda task, step, split="train", size=2, seed=None: task.batch(
            step, split=split, size=size, seed=seed
        ),
        "model(…)": lambda model, tokens, at=None: model(tokens, at),
        "model.generate": lambda model, tokens, n=2, temperature=0.0, seed=0, stop=None: model.generate(
            tokens, n, temperature=temperature, seed=seed, stop=stop
        ),
        "model.state_at": lambda model, tokens, pos: model(tokens, initial_state=model.state_at(tokens, pos)),
        "model.step": lambda model, tokens, state: model.step(tokens, state),
        "model.reading": lambda model, tokens, layer: model.reading(tokens, layer),
        "model.run_with_cache": lambda model, tokens, names_filter=None: model.run_with_cache(
            tokens, names_filter=names_filter
        ),
        "report.save": lambda run, path: cs.report([run], sequences=SEQUENCES).save(path),
    }
    return found


@cache
def _model(name: str) -> Any:
    import circuitscope as cs

    return cs.model(name, d_model=8, n_layers=1, vocab_size=64, max_length=16)


@cache
def _batch(name: str) -> Any:
    import circuitscope as cs

    options = {"block": 8, "repeats": 2} if name == "induction" else {"length": 16, "pairs": 2}
    return cs.task(name, vocab_size=64, **options).batch(0, size=4)


def _right(draw: random.Random, name: str, function: str) -> Any:
    """A right value for a parameter, by its name."""
    import torch

    import circuitscope as cs
    from circuitscope.analysis.probes import Definition

    run = f"runs/{draw.choice(('attention', 'mamba', 'lstm', 'vectors'))}"
    batch = _batch(draw.choice(("mqar", "mqar", "ar", "induction")))
    if function in ("cs.train", "RunConfig.build") and name in ("model", "task"):
        return draw.choice(_MODELS) if name == "model" else draw.choice(("mqar", "ar"))
    if name == "name":
        return {
            "cs.task": "mqar",
            "Definition.load": "own-token",
            "cs.analysis.analysis_table": "scores",
            "cs.model": "mamba",
            "cs.train": "new",
        }.get(function, "recall")
    values: dict[str, Callable[[], Any]] = {
        "run": lambda: cs.Run(run),
        "runs": lambda: [cs.Run(run), cs.Run("runs/mamba")],
        "path": lambda: run,
        "root": lambda: "runs",
        "config": lambda: "runs/attention/config.yaml",
        "data": lambda: {"model": "attention"},
        "model": lambda: _model(draw.choice(_MODELS)),
        "tokens": lambda: batch.tokens,
        "batch": lambda: batch,
        "layout": lambda: batch.layout,
        "task": lambda: cs.task("mqar", length=16, pairs=2, vocab_size=64),
        "layer": lambda: draw.choice((0, -1)),
        "layers": lambda: [0],
        "factors": lambda: draw.choice(("phi", "composed", ["phi"])),
        "reduce": lambda: draw.choice((None, "mean", "mean_abs")),
        "names": lambda: ["scores"],
        "scores": lambda: ["recall", "binding"],
        "steps": lambda: draw.choice(("all", [0, 20], 20, "0:20:10")),
        "step": lambda: 20 if function == "run.load" else 3,
        "sequences": lambda: SEQUENCES,
        "edges": lambda: (
            cs.analysis.named_edges("recall", _batch("mqar").layout) if function == "cs.analysis.cut" else "recall"
        ),
        "n": lambda: 2,
        "pos": lambda: 3,
        "temperature": lambda: draw.choice((0.0, 1.0)),
        "stop": lambda: draw.choice((None, 5)),
        "state": lambda: _model(draw.choice(_MODELS)).start(4),
        "matrix": lambda: torch.rand(4, 1, 16, 16),
        "pattern": lambda: torch.rand(4, 1, 16, 16),
        "definition": lambda: Definition.load("own-token"),
        "hooks": lambda: [] if function == "cs.analysis.accuracy" else ["blocks.0.hook_resid_post"],
        "per_sequence": lambda: torch.rand(4),
        "hook": lambda: "blocks.0.hook_resid_post",
        "heads": lambda: [0],
        "head": lambda: 0,
        "how": lambda: "zero",
        "by": lambda: "role",
        "split": lambda: "train",
        "size": lambda: 2,
        "chunk": lambda: 1,
        "example": lambda: 0,
        "examples": lambda: 2,
        "channels": lambda: 2,
        "spec": lambda: "own-token",
        "overrides": lambda: {"train.lr": 0.1},
        "names_filter": lambda: draw.choice(("hook_embed", None, ["hook_embed"])),
    }
    if name in values:
        return values[name]()
    known = inspect.signature(functions()[function]).parameters.get(name)
    return None if known is None or known.default is known.empty else known.default


def make(draw: random.Random) -> Input:
    """A call in which one or two arguments are odd."""
    name = draw.choice(list(functions()))
    function = functions()[name]
    parameters = list(inspect.signature(function).parameters.values())
    given: list[tuple[str, Any]] = []
    plain = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    own = plain[1:] if name.split(".")[0] in ("run", "task", "model", "model(…)", "report") else plain
    odd = set(draw.sample([p.name for p in own], min(len(own), draw.choice((1, 1, 1, 2)))))
    for p in plain:
        if p.name in odd:
            given.append((p.name, (draw.choice(("odd", "odd", "odd", "foreign")), draw.random())))
        elif p.default is p.empty or p.name == "sequences" or draw.random() < 0.2:
            given.append((p.name, ("right", draw.random())))
    if draw.random() < 0.02:
        given.append(("surplus", ("foreign", draw.random())))
    positional = [p.name for p in plain if p.kind == p.POSITIONAL_ONLY]
    takes_more = any(p.kind == p.VAR_KEYWORD for p in parameters)

    def arguments(chosen: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(_SMALL) if takes_more and name != "cs.task" else {}
        if name == "cs.train":
            made |= {"steps": 4, "eval_batch_size": 8}
        elif name == "cs.model":
            made = {key: made[key] for key in ("d_model", "n_layers", "vocab_size")}
        for parameter, (how, one) in chosen:
            again = random.Random(one)
            right = _right(again, parameter, name)
            made[parameter] = right if how == "right" else _odd(again, right) if how == "odd" else pool.value(again)
        if "config" in made and name == "cs.train":
            made = {key: value for key, value in made.items() if key in ("config", "name", "root", "progress")}
        return made

    def do(chosen: Sequence[tuple[str, Any]]) -> None:
        made = arguments(chosen)
        first = [made.pop(p) for p in positional if p in made]
        found = function(*first, **made)
        if inspect.isgenerator(found) or hasattr(found, "__next__"):
            list(islice(found, 5))

    def shown(chosen: Sequence[tuple[str, Any]]) -> str:
        made = ", ".join(f"{key}={_short(value)}" for key, value in arguments(chosen).items())
        return f"{name}({made})"

    def act(chosen: Sequence[tuple[str, Any]], folder: Path) -> outcome.Outcome:
        made = arguments(chosen)
        rights = {parameter: _right(random.Random(one), parameter, name) for parameter, (_, one) in chosen}
        other = any(_kind(made[p]) != _kind(right) for p, right in rights.items() if p in made)
        return outcome.call(lambda: do(chosen), "call with another type" if other else "call")

    return Input("calls", given, act=act, shown=shown)


def _kind(value: Any) -> Any:
    """The type of a value, in a list also that of what it holds."""
    return (
        (type(value), *sorted({str(_kind(one)) for one in value})) if isinstance(value, list | tuple) else type(value)
    )


def _odd(draw: random.Random, right: Any) -> Any:
    """A value that a user could give by mistake where this one is right."""
    import numpy as np
    import torch

    if isinstance(right, int | float):
        return draw.choice((pool.number(draw), pool.number(draw), pool.number(draw), str(right), None, [right], "all"))
    if isinstance(right, str | Path):
        text = pool.text(draw)
        return draw.choice((pool.nearly(draw, str(right)), text, text, Path(text), None, [str(right)], [text], 3))
    if isinstance(right, list):
        within = [_odd(draw, right[0])] if right else [None]
        return draw.choice(
            (within, within + right, [], (right or [None])[0], right * 2, tuple(right), None, pool.text(draw))
        )
    if isinstance(right, dict):
        return pool.plain(draw)
    if isinstance(right, torch.Tensor):
        shapes = (right[0], right[None], right[:0], right[..., :0], right.repeat_interleave(3, -1), right[..., None])
        values = (right + 10**6, -right - 1, right.float(), right.double(), right.int(), right.bool(), right * math.nan)
        return draw.choice((*shapes, *values, right.tolist(), right.numpy(), right[0].tolist(), np.asarray(right[0])))
    if right is None:
        return pool.plain(draw)
    near = [f"runs/{draw.choice(('attention', 'none'))}", "attention", [right], None]
    return draw.choice((*near, getattr(right, "tokens", None), getattr(right, "path", None), type(right)))


def _short(value: Any) -> str:
    kind = type(value).__name__
    if kind == "Tensor":
        return f"tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    try:
        text = repr(value)
    except Exception:
        text = f"a {kind}"
    return text if len(text) < 80 else f"{text[:70]}… ({kind})"
