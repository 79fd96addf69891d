# Two commands on a fresh machine: `make run` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread: on a busy machine several that wait for each other are many times slower.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: run test test-fast test-gpu coverage research-test lint docs docs-version build lowest clean

run: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/veca quickstart

test: $(VENV)/.installed-dev
	$(TEST)

test-fast: $(VENV)/.installed-dev  # under two minutes on two cores
	$(TEST) -m "not slow and not browser and not gpu"

test-gpu: $(VENV)/.installed-dev  # the attention kernels on a real GPU; mostly compiling, side by side
	$(BIN)/python -m pytest -n 8 -m gpu tests/attention

coverage: $(VENV)/.installed-dev
	$(TEST) --cov --cov-report=term --cov-report=markdown:coverage.md

research-test: $(VENV)/.installed-dev  # the laboratory, which gates nothing
	$(TEST) research/tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev  # the site, into build/site; broken links and warnings fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-version: $(VENV)/.installed-dev  # the site of VERSION into the branch gh-pages, beside the others
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest
	$(BIN)/mike set-default latest

build: $(VENV)/.installed-dev  # the wheel and the source archive, into dist/
	$(BIN)/python -m build

lowest:  # the core of the package with the lowest versions that it declares
	$(PYTHON) -m pip install --quiet uv
	uv venv --quiet --clear --python $(PYTHON) $(VENV)-lowest
	uv pip install --quiet --python $(VENV)-lowest --resolution lowest-direct -e '.[test]'
	OMP_NUM_THREADS=1 $(VENV)-lowest/bin/python -m pytest -n 2 -m "not slow and not browser and not gpu"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	rm -rf coverage.md build dist quickstart
