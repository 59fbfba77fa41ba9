"""Damaged runs and studies: files are changed, and then the run is listed, read, drawn and resumed, the study judged.

Changes go from flipped bits to files that are well formed and wrong: other types, other runs' files, tensors with a
right digest and wrong contents. Nothing in a file may run, and what reads a run must leave its records as they are.
"""

import hashlib
import json
import os
import random
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import outcome
import pool
import yaml
from ground import NAMES, SEQUENCES, STUDY

from step import Input

_PAYLOADS = (
    b"!!python/object/apply:os.mkdir [ran]\n",
    b"cos\nmkdir\n(S'ran'\ntR.",  # a pickle
    b"schema: 1\nmodel: !!python/object/new:os.mkdir [ran]\n",
)
_READS = (
    "analyze RUN --sequences {n}",
    "analyze RUN --all --sequences {n}",
    "analyze RUN --decay --sequences {n}",
    "phi RUN",
    "phi RUN --steps all --data",
    "plot dynamics RUN --sequences {n}",
    "plot dynamics RUN runs/mamba --no-scores",
    "plot scores RUN --sequences {n}",
    "plot decay RUN --sequences {n}",
    "plot probes RUN --probe own-token",
    "probe RUN --probe own-token --sequences 30",
    "report RUN --sequences {n}",
    "analyze --sequences {n}",
    "train RUN/config.yaml --dry-run",
)
_WRITES = (
    "train --resume RUN",
    "zoom RUN --from 10 --to 20 --every 5 --sequences {n}",
    "train RUN/config.yaml --name again",
)
_OF_STUDIES = (
    "study list",
    "study verdict",
    "study verdict tiny",
    "study plot tiny",
    "plot sweep RUN",
    "plot why RUN",
    "plot curves RUN",
    "sweep RUN --dry-run",
    "runs --sweep tiny",
)


def make(draw: random.Random) -> Input:
    """A change of one or two files of a run or of a study, and a command on it."""
    where = STUDY if draw.random() < 0.12 else f"runs/{draw.choice(NAMES)}"
    changes = [(draw.random(), draw.random()) for _ in range(draw.choice((1, 1, 1, 2)))]
    writes = draw.random() < (0.6 if where == "runs/stopped" else 0.15)
    pattern = draw.choice(_OF_STUDIES if where == STUDY else _WRITES if writes else _READS)
    in_python = where != STUDY and draw.random() < 0.15
    line = pattern.format(n=SEQUENCES).replace("RUN", where).split()

    def prepare(chosen: Sequence[tuple[float, float]], folder: Path) -> list[str]:
        for which, seed in chosen:
            _change(folder / where, folder, which, random.Random(seed))
        return line

    def act(chosen: Sequence[tuple[float, float]], folder: Path) -> outcome.Outcome:
        prepare(chosen, folder)
        path = folder / where
        before = _records(path)
        found = outcome.call(lambda: _look(path)) if in_python else outcome.command(line)
        if (folder / "ran").exists():
            return outcome.Finding("files: code in a file was run", shlex.join(line))
        if isinstance(found, str) and (in_python or pattern not in _WRITES) and _records(path) != before:
            return outcome.Finding(f"files: {line[0]} changed the records of the run", shlex.join(line))
        return found

    def shown(chosen: Sequence[tuple[float, float]]) -> str:
        done = ", ".join(_described(where, which, random.Random(seed)) for which, seed in chosen)
        what = "Run(…) and its properties" if in_python else shlex.join(["circuitscope", *line])
        return f"{done or 'nothing changed'}; then {what}"

    return Input("files", changes, act=act, shown=shown, words=None if in_python else prepare)


def _look(path: Path) -> None:
    """What a person does with a run in Python."""
    import circuitscope as cs

    cs.newest_run(path.parent)
    run = cs.Run(path)
    run.name, run.steps, run.status, run.environment, run.created, run.metrics, run.config, run.digest  # noqa: B018
    for step in run.steps:
        run.load(step)
    cs.analyze(run, sequences=SEQUENCES)


def _records(run: Path) -> dict[str, bytes]:
    """The bytes of what a run or a study recorded, which reading must not change."""
    files = [run / "config.yaml", run / "metrics.jsonl", *run.glob("checkpoints/*"), *run.glob("resume/*")]
    files += [run / name for name in ("study.yaml", "grid.yaml", "results.csv", "curves.csv")]
    return {str(path): path.read_bytes() for path in files if path.is_file() and not path.is_symlink()}


def _targets(run: Path) -> list[Path]:
    """The files of a run, each kind about equally often."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.name.startswith("."))
    kinds: dict[str, list[Path]] = {}
    for path in files:
        kinds.setdefault(path.parent.name if path.parent != run else path.name, []).append(path)
    return [found[i % len(found)] for found in kinds.values() for i in range(4)]


def _change(where: Path, ground: Path, which: float, draw: random.Random) -> str:
    """Changes a file of a run or of a study; gives a description of it."""
    targets = _targets(where)
    if not targets:
        return "nothing is left"
    path = targets[int(which * len(targets))]
    own: dict[str, list[Callable[..., None]]] = {
        ".json": [_json],
        ".yaml": [_yaml],
        ".jsonl": [_lines],
        ".safetensors": [_header, _tensors, _tensors],
        ".parquet": [_parquet, _parquet],
        ".csv": [_csv, _csv],
    }
    general = [_flip, _truncate, _replace, _missing, _special, _of_another_run, _noise]
    change = draw.choice(own.get(path.suffix, []) * 3 + general)
    try:
        change(path, draw)
    except Exception as error:  # the file was changed before and cannot be read
        return f"{change.__name__} of {path.name} was impossible ({type(error).__name__})"
    return f"{change.__name__[1:]} {path.relative_to(ground)}"


def _described(where: str, which: float, draw: random.Random) -> str:
    """What a change does, found by doing it to a copy."""
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "ground"
        try:
            shutil.copytree(Path(), copy, symlinks=True)
            return _change(copy / where, copy, which, draw)
        except OSError as error:
            return f"a change that cannot be shown here ({error.strerror})"


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 3, 20))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.choice((0, 1, 7, 8, len(data) // 2, len(data) - 1, draw.randrange(len(data))))])


def _replace(path: Path, draw: random.Random) -> None:
    """Other contents altogether."""
    size = draw.choice((10, 2000, 100_000))
    path.write_bytes(
        draw.choice(
            (
                *(
                    b"",
                    b"\n",
                    b"\x00" * 64,
                    b"{}",
                    b"[]",
                    b"null",
                    b"3",
                    b'"x"',
                    b"\xff\xfe",
                    b"[" * size,
                    b'{"a":' * size,
                ),
                *(
                    b"- " * size,
                    b"{a: " * size,
                    b"\xef\xbb\xbf{}",
                    b"9" * size,
                    b'{"step": NaN}',
                    b"a: &a [*a]",
                    *_PAYLOADS,
                ),
                *(
                    b"PAR1" + b"\x00" * 20 + b"PAR1",
                    (2**63).to_bytes(8, "little") + b"{}",
                    (2).to_bytes(8, "little") + b"{}",
                ),
            )
        )
    )


def _noise(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice((1, 8, 100, 5000))))


def _missing(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.3 and path.parent.name in ("checkpoints", "resume", "analysis"):
        shutil.rmtree(path.parent)
    else:
        path.unlink()


def _special(path: Path, draw: random.Random) -> None:
    """Not a file at all, or one of an odd name beside it."""
    what = draw.choice(("folder", "fifo", "loop", "dangling", "null", "odd name", "huge step", "file for folder"))
    if what in ("odd name", "huge step"):
        name = b"step-\xff\xfe.safetensors" if what == "odd name" else b"step-" + b"9" * 30 + b".safetensors"
        with open(os.path.join(os.fsencode(path.parent), name), "wb") as file:
            file.write(path.read_bytes())
        return
    if what == "file for folder" and path.parent.name in ("checkpoints", "resume", "analysis"):
        shutil.rmtree(path.parent)
        path.parent.write_text("a file")
        return
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to("/dev/null" if what == "null" else "nowhere")


def _of_another_run(path: Path, draw: random.Random) -> None:
    """The same file of another run or study, or another file of the same kind."""
    top = next(folder for folder in path.parents if folder.name in ("runs", "studies")).parent
    others = [p for p in sorted(top.rglob(f"*{path.suffix}")) if p != path and p.is_file()]
    shutil.copyfile(draw.choice(others), path)


def _somewhere(data: Any, draw: random.Random) -> Any:
    """Plain data with one value replaced, removed or renamed."""
    if isinstance(data, dict) and data and draw.random() < 0.85:
        key = draw.choice(list(data))
        how = draw.random()
        if how < 0.1:
            return {k: v for k, v in data.items() if k != key}
        if how < 0.15:
            return {pool.text(draw) if k == key else k: v for k, v in data.items()}
        return {k: _somewhere(v, draw) if k == key else v for k, v in data.items()}
    if isinstance(data, list) and data and draw.random() < 0.7:
        at = draw.randrange(len(data))
        return [_somewhere(v, draw) if i == at else v for i, v in enumerate(data)]
    return pool.plain(draw)


def _json(path: Path, draw: random.Random) -> None:
    path.write_text(json.dumps(_somewhere(json.loads(path.read_text()), draw)))


def _yaml(path: Path, draw: random.Random) -> None:
    path.write_text(yaml.safe_dump(_somewhere(yaml.safe_load(path.read_text()), draw)), errors="surrogatepass")


def _lines(path: Path, draw: random.Random) -> None:
    """Some lines changed, repeated, out of order or removed."""
    lines = path.read_text().splitlines()
    for _ in range(draw.choice((1, 2, 5))):
        at = draw.randrange(len(lines))
        how = draw.random()
        if how < 0.6:
            lines[at] = json.dumps(_somewhere(json.loads(lines[at]), draw))
        elif how < 0.75:
            lines.insert(at, draw.choice(lines))
        elif how < 0.85:
            lines.insert(
                at, draw.choice(('{"resumed_from": 4}', '{"resumed_from": "x"}', '{"resumed_from": null}', "{}"))
            )
        else:
            del lines[at]
    path.write_text("\n".join(lines) + "\n")


def _csv(path: Path, draw: random.Random) -> None:
    """A table of text with a cell changed, a column or a line removed, or a line repeated."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    at, column, how = draw.randrange(len(rows)), draw.randrange(len(rows[0])), draw.random()
    if how < 0.5:
        rows[at][column % len(rows[at])] = pool.text(draw).replace("\ud800", "").replace("\x00", "")
    elif how < 0.65:
        rows = [row[:column] + row[column + 1 :] for row in rows]
    elif how < 0.8:
        del rows[at]
    else:
        rows.insert(at, rows[at])
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")


def _with_digest(data: bytearray) -> bytes:
    """The file with the digest that its contents should have, so that they are believed."""
    size = int.from_bytes(data[:8], "little")
    start = data[: 8 + size].index(b'"digest":"') + len(b'"digest":"')
    data[start : start + 64] = b"0" * 64
    data[start : start + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def _header(path: Path, draw: random.Random) -> None:
    """The header of a file of tensors, changed, mostly with a right digest."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = _somewhere(json.loads(data[8 : 8 + size]), draw)
    text = json.dumps(header, separators=(",", ":")).encode()
    changed = bytearray(len(text).to_bytes(8, "little") + text + data[8 + size :])
    path.write_bytes(_with_digest(changed) if draw.random() < 0.8 and b'"digest":"' in text else bytes(changed))


def _tensors(path: Path, draw: random.Random) -> None:
    """Tensors of other values, shapes, types and names, in a file that is otherwise right."""
    import torch

    from circuitscope.runs.store import read_tensors, write_tensors

    tensors, metadata = read_tensors(path)
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    how = draw.randrange(8)
    if how == 0:
        tensors[name] = torch.full_like(tensor, draw.choice((float("nan"), float("inf"), 1e38, 0.0)))
    elif how == 1:
        tensors[name] = tensor.to(draw.choice((torch.float64, torch.bfloat16, torch.int64, torch.bool)))
    elif how == 2:
        tensors[name] = tensor.flatten()[: draw.randrange(tensor.numel() + 1)]
    elif how == 3:
        del tensors[name]
    elif how == 4:
        tensors["other.\x1b[31m"] = tensor
    elif how == 5:
        tensors = {} if draw.random() < 0.5 else {n: torch.zeros(0) for n in tensors}
    elif how == 6:
        metadata["step"] = pool.text(draw).replace("\ud800", "")
    else:
        tensors = {n: t * float("nan") for n, t in tensors.items()}
    write_tensors(path, {n: t.contiguous().clone() for n, t in tensors.items()}, metadata)


def _parquet(path: Path, draw: random.Random) -> None:
    """A table with a column changed, removed or added, rows removed, or other metadata; still a table."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    kept = dict(table.schema.metadata or {})
    frame = table.to_pandas()
    column = draw.choice(list(frame.columns))
    how = draw.randrange(8)
    if how == 0:
        frame = frame.drop(columns=column)
    elif how == 1:
        frame[column] = draw.choice((None, "x", float("nan"), 10**15, -1, True, "\x1b[31m"))
    elif how == 2:
        frame = frame.iloc[:0]
    elif how == 3:
        frame = pd.concat([frame, frame.sample(frac=0.5, random_state=1)])
    elif how == 4:
        frame["other"] = 1
    elif how == 5:
        frame = frame.sample(frac=0.5, random_state=draw.randrange(100))
    elif how == 6:
        frame[column] = [[1]] * len(frame)
    else:
        for key in list(kept):
            if b"circuitscope" in key and draw.random() < 0.9:
                kept[key] = json.dumps(_somewhere(json.loads(kept[key]), draw)).encode()
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(kept), path)
