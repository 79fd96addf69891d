# Two commands on a fresh machine: `make run` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What users install beside the core, and those of it whose lowest versions are tested.
EXTRAS := train,probe,viz,export,hf,demo,embed,search
LOWEST_EXTRAS := train,probe,viz,export,hf,embed,search
# One thread: on a busy machine several that wait for each other are many times slower.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: run test test-fast test-gpu coverage research-test attack lint docs docs-version build sbom lowest clean

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

attack: $(VENV)/.installed-dev  # about 20 minutes on two cores; a stopped one goes on
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[attack]' \
		|| echo "atheris cannot be installed here; fuzzing is skipped"
	OMP_NUM_THREADS=1 $(BIN)/python -m attack all

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The live demo on the front page takes an export of some minutes: VECA_LIVE_DEMO=1 make docs has it,
# as what is published does.
docs: $(VENV)/.installed-dev  # the site, into build/site; broken links and warnings fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-version: $(VENV)/.installed-dev  # the site of VERSION into the branch gh-pages, beside the others
	VECA_LIVE_DEMO=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest
	$(BIN)/mike set-default latest

build: $(VENV)/.installed-dev  # the wheel and the source archive, into dist/
	$(BIN)/python -m build

sbom: $(VENV)/.installed-dev  # what a release runs with, version by version, as CycloneDX
	$(PYTHON) -m venv --clear $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt '.[$(EXTRAS)]'
	$(VENV)-release/bin/python -m pip uninstall --quiet --yes pip setuptools
	mkdir -p build
	sed "s/^dynamic = .*/version = \"$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/veca/version.py)\"/" \
		pyproject.toml > build/pyproject.toml  # it takes the version from there alone
	$(BIN)/cyclonedx-py environment --pyproject build/pyproject.toml --mc-type library \
		--output-reproducible --short-PURLs -o build/veca.cdx.json $(VENV)-release/bin/python

lowest:  # with the lowest versions that are declared: the core alone, which extras would raise, and all
	$(PYTHON) -m pip install --quiet uv
	for extras in test test,$(LOWEST_EXTRAS); do \
		uv venv --quiet --clear --python $(PYTHON) $(VENV)-lowest && \
		uv pip install --quiet --python $(VENV)-lowest --resolution lowest-direct -e ".[$$extras]" && \
		OMP_NUM_THREADS=1 $(VENV)-lowest/bin/python -m pytest -n 2 \
			-m "not slow and not browser and not gpu" || exit 1; \
	done

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-release .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	rm -rf coverage.md build dist quickstart
