# Everything runs in .venv, made on first use from the pinned constraints.txt. No compiler is needed.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TESTABLE := .venv/.testable
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt

.PHONY: install demo chromium test test-fast lint types reference reached bench soak fuzz test-gpu clean

install: $(INSTALLED)

# What a user needs. torch first and by itself: a plain range would pull gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

# What the tests and benchmarks need besides. The last two commands install references for tests/oracles, whose plain
# Python functions run on a CPU.
$(TESTABLE): $(INSTALLED)
	$(PIP) -e '.[test]'
	$(PIP) --no-deps flash-linear-attention fla-core triton
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(PIP) --no-build-isolation --no-deps mamba-ssm
	touch $@

demo: $(INSTALLED)
	$(BIN)/circuitscope train --save-every 100
	$(BIN)/circuitscope analyze --induction
	$(BIN)/circuitscope plot dynamics
	$(BIN)/circuitscope report

lint: $(TESTABLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TESTABLE)
	$(BIN)/mypy

# docs/config.md is made from the code; a test says so when it is stale.
reference: $(INSTALLED)
	$(BIN)/python -m circuitscope.config.fields > docs/config.md.new
	mv docs/config.md.new docs/config.md

# What `circuitscope models` says that each preset reaches is made from studies/recipes; a test says so when it is stale.
reached: $(INSTALLED)
	$(BIN)/python studies/recipes/reached.py

# The report is tested in a real browser.
chromium:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || [ -n "$$CHROMIUM" ] \
	  || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core) \
	  || echo "*** NO CHROMIUM: the report will NOT be tested in a browser ***"

# On two workers; tests/conftest.py says which tests stay together on one.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

test: lint types chromium
	$(PYTEST)

# Without what takes its time: tests marked slow, and the enforcement of annotations at run time.
test-fast: lint types chromium
	$(PYTEST) -m "not slow" -o addopts="-ra --strict-markers --strict-config"

# The tests that need a CUDA device, on one worker: they share the GPU. `circuitscope doctor --check` is the quick check.
test-gpu: $(TESTABLE)
	$(BIN)/python -m pytest -m gpu

bench: $(TESTABLE)
	$(BIN)/python -m benchmarks

soak: $(TESTABLE)
	$(BIN)/python tests/faults/soak.py --kills 200

fuzz: $(TESTABLE)
	$(BIN)/python tests/fuzz/walk.py --inputs 10000 --processes 200

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
