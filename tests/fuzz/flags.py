"""Command lines: every command of the program with random options, from right values to absurd ones.

Commands and options come from the program's own tree, so a new command or option is walked without being named here.
"""

import random
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import outcome
import pool
from ground import EXAMPLES, NAMES, SEQUENCES, STUDY

from circuitscope import tasks
from step import Input

_SMALL = [
    "--length",
    "16",
    "--pairs",
    "2",
    "--vocab-size",
    "64",
    "--d-model",
    "8",
    "--layers",
    "1",
    "--steps",
    "4",
    "--batch-size",
    "4",
    "--device",
    "cpu",
    "--set",
    "train.eval_batch_size=8",
    "--set",
    "train.eval_batches=2",
]
_RUNS = [f"runs/{name}" for name in NAMES]
_RIGHT: dict[str, Sequence[str]] = {  # right values by the name of the parameter; others are drawn by their type
    "config": ["runs/attention/config.yaml", "runs/lstm/config.yaml"],
    "run": _RUNS,
    "runs": _RUNS,
    "model": ["attention", "mamba", "lstm", "based", "hyena", "rwkv", "mamba2", "deltanet"],
    "mixers": ["attention", "mamba,attention", "s4", "gated_conv,based"],
    "layers": ["1", "0", "2", "0,0"],
    "heads": ["1", "2", "0", "all", "mean_abs", "0,1"],
    "positions": ["none", "learned", "sinusoidal", "rope", "alibi"],
    "task": ["mqar", "ar", "induction", *tasks.names()],
    "name": ["new", "tiny", "scores", "decay", "bound-value", "attention", "mamba", *tasks.names()],
    "grid": [STUDY, f"{STUDY}/grid.yaml"],
    "studies": ["studies"],
    "sweep": ["tiny"],
    "file": [EXAMPLES],
    "folder": ["runs"],
    "examples": ["none", "100", "1"],
    "device": ["auto", "cpu"],
    "save_schedule": ["every", "log"],
    "wandb": ["project"],
    "assign": ["train.lr=0.1", "model.tied=false", "task.filler=zero", "filler=random", "model.mixers.0.n_heads=2"],
    "resume": ["runs/stopped", "runs/attention"],
    "steps": ["all", "0", "20", "0,20", "0:20:10", "0:20", "10"],
    "step": ["0", "10", "20"],
    "first": ["0", "5"],
    "last": ["10", "20"],
    "every": ["1", "2", "5"],
    "analysis": ["scores", "decay", "circuit", "causal", "phases"],
    "factors": ["all", "phi", "composed", "conv,ssm", "gate"],
    "factor": ["phi", "phi_without_D"],
    "by": ["recall", "binding", "previous_token", "recall+1", "query<-filler"],
    "scale": ["signed", "share", "log", "laptop", "paper"],
    "mark": ["recall", "recall,binding"],
    "out": ["x.png", "new/x.svg", "x.pdf", "x.html", "runs", "x", "x.parquet"],
    "probes": ["own-token", "bound-value", "position", "previous-token"],
    "hooks": ["blocks.*.hook_resid_post", "hook_embed", "*"],
    "names": ["recall", "binding,recall"],
    "sequences": [str(SEQUENCES), "2", "3"],
    "top": ["1", "2"],
    "channels": ["1", "3"],
    "count": ["1", "2"],
    "d_model": ["8", "16"],
    "length": ["16", "8"],
    "threads": ["1"],
    "directions": ["1"],
}

_LONG = {("doctor", "check")}  # works for a minute; tests/cli/test_doctor_command.py has it


@cache
def commands() -> dict[tuple[str, ...], list[Any]]:
    """The parameters of every command, by the words that call it."""
    import typer.main

    from circuitscope.cli.main import app

    def below(node: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
        yield words, [parameter for parameter in node.params if (*words, parameter.name) not in _LONG]
        for name, child in getattr(node, "commands", {}).items():
            yield from below(child, (*words, name))

    return dict(below(typer.main.get_command(app), ()))


def _value(draw: random.Random, parameter: Any) -> str:
    right = _RIGHT.get(parameter.name)
    how = draw.random()
    if right and how < 0.65:
        return draw.choice(right)
    if right and how < 0.75:
        return pool.nearly(draw, draw.choice(right))
    if parameter.type_descriptor.annotation in (int, float) and how < 0.85:
        return str(draw.choice((0, 1, 2, 3, 4, 0.5))) if how < 0.5 else str(pool.number(draw))
    return pool.argument(draw)


def _option(draw: random.Random, parameter: Any) -> list[str]:
    if parameter.param_type_name == "argument":
        return [_value(draw, parameter)]
    named = draw.choice([*parameter.opts, *parameter.secondary_opts])
    if draw.random() < 0.02:
        named = pool.nearly(draw, named)
    if parameter.is_flag or draw.random() < 0.01:
        return [named]
    value = _value(draw, parameter)
    return [f"{named}={value}"] if draw.random() < 0.2 else [named, value]


def make(draw: random.Random) -> Input:
    """A command with some of its options."""
    words = draw.choice(list(commands()))
    parameters = commands()[words]
    parts: list[list[str]] = []
    few = draw.choice((0.1, 0.25, 0.6))
    for parameter in parameters:
        wanted = 0.7 if parameter.param_type_name == "argument" and words != ("train",) else few
        while draw.random() < wanted:
            parts.append(_option(draw, parameter))
            wanted = 0.3 if parameter.multiple or parameter.nargs != 1 else 0.03
    resumes = any(part[0].startswith("--resume") for part in parts)
    small: list[str] = []
    if words == ("train",) and not (resumes and draw.random() < 0.8):
        small = _SMALL
    if any(parameter.name == "sequences" for parameter in parameters):
        small = ["--sequences", "30" if words == ("probe",) else str(SEQUENCES)]
    if draw.random() < 0.02:
        parts.insert(draw.randint(0, len(parts)), [draw.choice(("--help", "--version", "--", "-x", "--debugs"))])
    first = [[*words, *small]]

    def line(chosen: Sequence[list[str]], folder: Path) -> list[str]:
        return [word for part in [*first, *chosen] for word in part]

    return Input(
        "flags",
        parts,
        act=lambda chosen, folder: outcome.command(line(chosen, folder)),
        shown=lambda chosen: shlex.join(["circuitscope", *line(chosen, Path())]),
        words=line,
    )
