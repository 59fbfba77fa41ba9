"""Every Python snippet of README and docs runs, in the order in which it stands there."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import circuitscope as cs

ROOT = Path(__file__).parents[1]
PAGES = sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "probes" / "README.md"])
_SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets(page: Path) -> list[tuple[int, str]]:
    """(line, code) of every Python snippet."""
    text = page.read_text()
    return [(text[: m.start()].count("\n") + 2, m[1]) for m in _SNIPPET.finditer(text)]


def test_there_are_snippets_to_run():
    assert {page.name for page in PAGES if snippets(page)} >= {"README.md", "analysis.md", "phases.md"}


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_snippets_of_a_page_run(page, default_run, tmp_path, monkeypatch):
    shutil.copytree(default_run.path, tmp_path / "runs" / "NAME")
    monkeypatch.chdir(tmp_path)
    run = cs.Run("runs/NAME")

    def trained(**options):
        """The default run, which the tests have trained already, where a snippet trains just that."""
        assert options == {"model": "attention", "task": "mqar", "save_every": 100}
        return run

    monkeypatch.setattr("circuitscope.api.train", trained)
    for line, code in snippets(page):
        names = {"__name__": "snippet", **known(run)}
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


def known(run) -> dict:
    """What the pages speak of without making it: a run, a model, batches, matrices, curves, activations."""
    batch = run.config.task.batch(0, split="test", size=16)
    repeats = cs.task("induction", block=15, repeats=4, vocab_size=8192).batch(0, size=16)
    model = run.load()
    held = run.metrics[run.metrics.split == "validation"]
    random = np.random.default_rng(0)
    names = {"run": run, "model": model, "batch": batch, "repeats": repeats, "cs": cs}
    matrices = {"pattern": cs.phi(model, repeats.tokens, layer=1), "phi": cs.phi(model, batch.tokens, layer=1)}
    curves = {
        "steps": held.step.to_numpy(float),
        "loss": held.loss.to_numpy(float),
        "loss_per_batch": np.array(held.loss_per_batch.tolist()),
        "accuracy": held.accuracy.to_numpy(float),
        "binding": held.accuracy.to_numpy(float),
    }
    examples = {
        "activations": random.normal(size=(400, 8)),
        "labels": random.integers(0, 3, 400),
        "tokens": random.integers(0, 20, 400),
        "E": random.normal(size=(20, 8)),
        "sets": np.tile(np.arange(20), (400, 1)),
        "sequence": np.repeat(np.arange(100), 4),
    }
    return names | matrices | curves | examples
