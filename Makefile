# Everything runs in .venv, made on first use from the pinned constraints.txt. No compiler is needed.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo test test-fast lint types bench soak clean

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
	$(BIN)/circuitscope plot dynamics

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest

test-fast: lint types
	$(BIN)/python -m pytest -n 2 -m "not slow"

bench: install
	$(BIN)/python -m benchmarks

soak: install
	$(BIN)/python tests/faults/soak.py --kills 200

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
