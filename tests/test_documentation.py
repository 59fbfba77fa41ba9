"""Every Python snippet of README and docs runs, in the order in which it stands there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "probes" / "README.md"]
_SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

# What the pages speak of without making it: a run, a model, batches, matrices, curves, activations. Where a snippet
# trains the default run, it gets the one that the tests have trained already.
_KNOWN = """
import numpy as np
import circuitscope as cs, circuitscope.api

run = cs.Run("runs/NAME")


def trained(**options):
    assert options == {"model": "attention", "task": "mqar", "save_every": 100}, options
    return run


circuitscope.api.train = trained
model = run.load()
batch = run.config.task.batch(0, split="test", size=16)
repeats = cs.task("induction", block=15, repeats=4, vocab_size=8192).batch(0, size=16)
pattern, phi = cs.phi(model, repeats.tokens, layer=1), cs.phi(model, batch.tokens, layer=1)
held = run.metrics[run.metrics.split == "validation"]
steps, loss, accuracy = (held[name].to_numpy(float) for name in ("step", "loss", "accuracy"))
loss_per_batch, binding = np.array(held.loss_per_batch.tolist()), accuracy
random = np.random.default_rng(0)
activations, labels, tokens = random.normal(size=(400, 8)), random.integers(0, 3, 400), random.integers(0, 20, 400)
E, sets, sequence = random.normal(size=(20, 8)), np.tile(np.arange(20), (400, 1)), np.repeat(np.arange(100), 4)
"""


def snippets(page: Path) -> list[str]:
    """The Python snippets of a page."""
    return _SNIPPET.findall(page.read_text())


def test_there_are_snippets_to_run():
    assert {page.name for page in PAGES if snippets(page)} >= {
        "README.md",
        "analysis.md",
        "phases.md",
        "extending.md",
        "generation.md",
        "your-own-data.md",
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_snippets_of_a_page_run(page, default_run, tmp_path):
    shutil.copytree(default_run.path, tmp_path / "runs" / "NAME")
    (tmp_path / "page.py").write_text("\n".join([_KNOWN, *snippets(page)]))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
