"""Configs: random values for random fields, through --set, a YAML file and Python.

A config that is accepted must come back from its own YAML with the same digest.
"""

import random
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import outcome
import pool
import yaml

from step import Input

_SMALL: dict[str, Any] = {
    "task.length": 16,
    "task.pairs": 2,
    "task.vocab_size": 64,
    "model.d_model": 8,
    "model.n_layers": 1,
    "train.steps": 4,
    "train.batch_size": 4,
    "train.eval_batch_size": 8,
    "train.device": "cpu",
}
_RIGHT: dict[str, Sequence[Any]] = {
    "name": ["mqar", "ar", "induction", "attention", "mamba"],
    "mixers": ["mamba", ["attention", "mamba"], [{"name": "attention", "n_heads": 2}], "s4,h3", "gated_deltanet"],
    "preset": ["attention", "mamba", "based", "hyena", "mambaformer"],
    "model": ["attention", "mamba", {"preset": "rwkv"}, {}],
    "task": ["mqar", "induction", {"name": "ar"}, {}],
    "train": [{}, {"lr": 0.01}],
}
_TEXTS = (  # YAML files as a whole
    *("", "[]", "3", "null", "- a\n- b", "model", "model: [", "\t", "model: {preset: attention, preset: mamba}", "? ["),
    *(
        "a: &a [*a]",
        "a: &a {b: *a}",
        "!!python/object/apply:os.mkfifo [ran]",
        "!!python/name:os.system",
        "--- 1\n--- 2",
    ),
    *(
        "model: !!binary aGVsbG8=",
        "model: 2001-01-01",
        "train: {lr: 2001-99-99}",
        "schema: 99",
        "schema: true",
        "%YAML 9",
    ),
    *(
        "x: " + "[" * 3000,
        "x: " + "{a: " * 3000,
        "a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]",
        "train: {steps: 1e9}",
        "\ufeff{}",
    ),
    *("train: {1: 2}", "1: 2", "null: 1", "? {a: 1}\n: 2", "train: {[1]: 2}", "model: {mixers: {name: attention}}"),
)


@cache
def paths() -> list[str]:
    """The dotted path of every field of a config."""
    from circuitscope import mixers, tasks
    from circuitscope.config import TrainConfig
    from circuitscope.models import ModelConfig

    found = ["model", "task", "train", "model.preset", "schema"]
    found += [f"model.{name}" for name in ModelConfig.model_fields] + [f"train.{n}" for n in TrainConfig.model_fields]
    found += sorted({f"task.{name}" for task in tasks.TASKS.values() for name in task.model_fields})
    own = sorted({name for mixer in mixers.names() for name in mixers.config_class(mixer).model_fields})
    return found + [f"model.mixers.{at}.{name}" for at in ("0", "*") for name in own]


@cache
def _usual() -> dict[str, list[Any]]:
    """Values that a field could well have, by its name: its default and numbers near it, or its choices."""
    from circuitscope import mixers, tasks
    from circuitscope.config import TrainConfig
    from circuitscope.models import ModelConfig

    found: dict[str, list[Any]] = {}
    for part in [ModelConfig, TrainConfig, *tasks.TASKS.values(), *map(mixers.config_class, mixers.names())]:
        for name, field in part.model_fields.items():
            known = found.setdefault(name, [])
            for kind in (field.annotation, *get_args(field.annotation)):
                known += get_args(kind) if get_origin(kind) is Literal else []
            if isinstance(field.default, bool):
                known += [True, False]
            elif isinstance(field.default, int | float):
                known += [field.default, 1, 2, 4, field.default / 2 if isinstance(field.default, float) else 3]
    return found


def _path(draw: random.Random) -> str:
    path = draw.choice(paths())
    if draw.random() < 0.05:
        return pool.nearly(draw, path)
    return pool.argument(draw) if draw.random() < 0.03 else path


def _value(draw: random.Random, path: str) -> Any:
    right = _RIGHT.get(path.rpartition(".")[2])
    how = draw.random()
    if right and how < 0.6:
        return draw.choice(right)
    if how < 0.6:
        return draw.choice(_usual().get(path.rpartition(".")[2]) or (1, 2, 3, 4, 8, 0.5, 0.01, True, False, None))
    return pool.plain(draw)


def make(draw: random.Random) -> Input:
    """Some fields, in one of the ways in which a user can set them."""
    way = draw.choice((_through_set, _through_file, _through_python, _through_python))
    parts = [(path, _value(draw, path)) for path in (_path(draw) for _ in range(draw.choice((1, 1, 2, 3, 6))))]
    return way(draw, parts)


def _as_word(path: str, value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    return f"{path}={text}".replace("\x00", "0").replace("\ud800", "\udc80")


def _through_set(draw: random.Random, parts: list[tuple[str, Any]]) -> Input:
    trains = draw.random() < 0.3
    raw = draw.random() < 0.2
    odd = [pool.argument(draw) for _ in parts]

    def words(chosen: Sequence[tuple[str, Any]], folder: Path) -> list[str]:
        pairs = [f"{path}={value}" for path, value in _SMALL.items()]
        pairs += [f"{path}={odd[i]}" if raw else _as_word(path, value) for i, (path, value) in enumerate(chosen)]
        return ["train", *([] if trains else ["--dry-run"]), *(word for pair in pairs for word in ("--set", pair))]

    return Input(
        "fields",
        parts,
        act=lambda chosen, folder: outcome.command(words(chosen, folder)),
        shown=lambda chosen: shlex.join(["circuitscope", *words(chosen, Path())]),
        words=words,
    )


def _nested(parts: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The parts in a config's layout; a part that has no place is put at the top."""
    data: dict[str, Any] = {}
    for path, value in [*_SMALL.items(), *parts]:
        node, *rest = data, *path.split(".")
        for key in rest[:-1]:
            child = node.setdefault(key, {}) if isinstance(node, dict) else None
            if not isinstance(child, dict):
                break
            node = child
        else:
            node[rest[-1]] = value
            continue
        data[path] = value
    return data


def _through_file(draw: random.Random, parts: list[tuple[str, Any]]) -> Input:
    trains = draw.random() < 0.3
    whole = draw.choice(_TEXTS) if draw.random() < 0.3 else None
    flipped = draw.random() < 0.2
    seed = draw.random()

    def content(chosen: Sequence[tuple[str, Any]]) -> bytes:
        text = yaml.safe_dump(_nested(chosen)) if whole is None else whole
        data = bytearray(text.encode(errors="surrogatepass"))
        if flipped and data:
            again = random.Random(seed)
            for _ in range(again.randint(1, 3)):
                data[again.randrange(len(data))] = again.randrange(256)
        return bytes(data)

    def words(chosen: Sequence[tuple[str, Any]], folder: Path) -> list[str]:
        (folder / "own.yaml").write_bytes(content(chosen))
        return ["train", "own.yaml", *([] if trains else ["--dry-run"])]

    def act(chosen: Sequence[tuple[str, Any]], folder: Path) -> outcome.Outcome:
        found = outcome.command(words(chosen, folder))
        return outcome.Finding("files: code was run", "own.yaml") if (folder / "ran").exists() else found

    return Input(
        "fields",
        parts if whole is None else [],
        act=act,
        shown=lambda chosen: f"circuitscope train own.yaml, where own.yaml is {content(chosen)!r:.2000}",
        words=words,
    )


def _through_python(draw: random.Random, parts: list[tuple[str, Any]]) -> Input:
    how = draw.choice(("parse", "build", "model", "task"))

    def options(chosen: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        return {path.rpartition(".")[2]: value for path, value in [*_SMALL.items(), *chosen]}

    def act(chosen: Sequence[tuple[str, Any]], folder: Path) -> outcome.Outcome:
        return outcome.call(lambda: _make_config(how, chosen, options(chosen)))

    return Input("fields", parts, act=act, shown=lambda chosen: f"RunConfig by {how} with {chosen!r:.2000}")


def _make_config(how: str, chosen: Sequence[tuple[str, Any]], flat: dict[str, Any]) -> None:
    import circuitscope as cs
    from circuitscope.config import RunConfig

    own = {path.rpartition(".")[2]: value for path, value in chosen}
    name = own.pop("name", "attention" if how == "model" else "mqar")
    if how == "model":
        cs.model(name, **{"d_model": 8, "vocab_size": 64, "n_layers": 1} | own)
        return
    if how == "task":
        made = cs.task(name, **{"length": 16, "pairs": 2, "vocab_size": 64} | own)
        if made.max_length < 10**4:
            made.batch(0, size=2)
        return
    config = RunConfig.build(**flat) if how == "build" else RunConfig.parse(_nested(chosen))
    again = RunConfig.parse(yaml.safe_load(config.dump()))
    assert again.digest == config.digest, "a config read from its own YAML has another digest"
