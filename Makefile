# Everything runs in .venv, made on first use from the pinned constraints.txt. No compiler is needed.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install chromium demo test test-fast lint types bench soak fuzz clean

install: $(INSTALLED)

# The last two are references for tests/oracles: their plain Python functions run on a CPU.
# torch first and by itself: a plain range would pull gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps flash-linear-attention fla-core triton
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE \
	  $(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --no-deps mamba-ssm
	touch $(INSTALLED)

demo: install
	$(BIN)/circuitscope train --save-every 100
	$(BIN)/circuitscope analyze --induction
	$(BIN)/circuitscope plot dynamics
	$(BIN)/circuitscope report

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# The report is tested in a real browser.
chromium:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || [ -n "$$CHROMIUM" ] \
	  || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core) \
	  || echo "*** NO CHROMIUM: the report will NOT be tested in a browser ***"

test: lint types chromium
	$(BIN)/python -m pytest

# Without what takes its time: tests marked slow, and the enforcement of annotations at run time.
test-fast: lint types chromium
	$(BIN)/python -m pytest -n 2 -m "not slow" -o addopts="-ra --strict-markers --strict-config"

bench: install
	$(BIN)/python -m benchmarks

soak: install
	$(BIN)/python tests/faults/soak.py --kills 200

fuzz: install
	$(BIN)/python tests/fuzz/walk.py --inputs 10000 --processes 200

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
