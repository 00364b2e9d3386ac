# Ridgeline: `make help` lists the targets. Every target may be run again at any time.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RIDGE  := $(BIN)/ridge
# Workers for the test suite: every test process compiles with several threads of its own.
JOBS   ?= 2
# The real text of the quickstart: the standard library of this interpreter.
CORPUS := data/quickstart
# Overrides for the quickstart run, e.g. `make quickstart ARGS="trainer.steps=100"`.
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint format types check-layers bench clean install

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Ridgeline needs Python >= 3.11; found $$($(PYTHON) -V). Try: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The stamps make a second run instant; they are renewed when the packaging changes.
$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing Ridgeline into $(VENV) (a minute or two the first time) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,parity]'
	@touch $@

install: $(VENV)/.installed  ## make .venv and install the package

quickstart: $(VENV)/.installed  ## corpus, tokenizer, training, evaluation and a sample, in about six minutes
	@BIN=$(BIN) CORPUS=$(CORPUS) sh scripts/quickstart.sh $(ARGS)

test: $(VENV)/.installed-dev  ## the test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup tests

lint: $(VENV)/.installed-dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev  ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev  ## mypy
	$(BIN)/mypy

check-layers: $(VENV)/.installed-dev  ## import-linter: who may import whom
	$(BIN)/lint-imports

bench: $(VENV)/.installed-dev  ## the benchmarks of docs/LOG.md (minutes, one after another)
	@for b in tests/bench/*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

clean:  ## remove the environment, caches, prepared data and runs
	rm -rf $(VENV) data runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build *.egg-info
