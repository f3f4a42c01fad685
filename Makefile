# Every target does everything itself: it makes .venv and installs there what it needs.
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin

# Torch keeps one thread in each of the two test workers: more threads than cores cost 4-8 times.
# A worker gets whole files: what the tests of a file share, as a training, is made once.
# Bytecode is kept, whatever the shell says: many tests start a Python of their own.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help quickstart serve-demo test test-slow test-gpu faults lint format docs benchmark clean

help:  ## show this list
	@echo "make TARGET    (PYTHON=$(PYTHON), packages in .venv)"
	@sed -n 's/^\([a-z-]*\):.*## /  \1  /p' Makefile | awk '{printf "  %-12s", $$1; $$1 = ""; print}'

quickstart: .venv/installed-train  ## raw text -> vocabulary -> BERT -> classifier, with a report
	$(BIN)/bertsmith quickstart

serve-demo: .venv/installed-train .venv/installed-serve quickstart/report.html  ## quickstart's model at http://127.0.0.1:8000
	$(BIN)/bertsmith serve quickstart/pretrain

quickstart/report.html: | .venv/installed-train  # written last
	$(BIN)/bertsmith quickstart

test: .venv/installed-dev  ## the test suite, in two processes
	$(PYTEST) -n 2 --dist loadfile

test-slow: .venv/installed-dev  ## the longer checks, half an hour
	$(PYTEST) -n 2 -m "slow and not gpu"

test-gpu: .venv/installed-dev  ## the checks that need a CUDA device
	$(PYTEST) -m gpu

faults: .venv/installed-dev  ## runs killed, files damaged, disks full: what is lost, in minutes
	$(PYTEST) -q -m faults tests/faults

lint: .venv/installed-dev  ## style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: .venv/installed-dev  ## put the source into its format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/installed-docs  ## the pages as a site in build/docs, with the reference of flags and names
	$(BIN)/python -c "from bertsmith.cli.main import reference; print(reference(), end='')" \
		> docs/reference/cli.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

benchmark: .venv/installed-dev  ## pre-training speed beside transformers, on this machine
	$(BIN)/python benchmarks/pretrain.py

clean:  ## remove caches and build products (not .venv, not your runs)
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "bertsmith needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# The stamp is made last, so that an interrupted installation is taken up again.
.venv/installed-%: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[$*]'
	@touch $@
