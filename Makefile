# Two commands on a fresh machine: `make run` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test research-test lint docs clean

run: $(VENV)/.installed
	# One thread: on a busy machine several that wait for each other are many times slower.
	OMP_NUM_THREADS=1 $(BIN)/veca quickstart

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

research-test: $(VENV)/.installed-dev
	# The laboratory, which gates nothing.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 research/tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs:
	# The API reference, from the docstrings; needs nothing installed.
	$(PYTHON) docs/build_api.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis quickstart
