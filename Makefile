# Ridgeline: `make help` lists the targets. Every target may be run again at any time.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RIDGE  := $(BIN)/ridge
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
UV     ?= uv
# Workers for the test suite, for two cores: one more than that, as tests of several processes wait for each other and for deadlines.
JOBS   ?= 3
# Workers for the Slurm tests, each with a Slurm of its own: these wait more than they compute.
CLUSTERS ?= 3
# The real text of the quickstart: the standard library of this interpreter.
CORPUS := data/quickstart
# Overrides for the quickstart run, e.g. `make quickstart ARGS="trainer.steps=100"`.
ARGS   ?=
INJECTIONS := tests/explain/test_diagnosis_runs.py tests/trainer/test_straggler_runs.py
# The part of the suite that only computes: nothing is timed or has a deadline of seconds. CI runs it beside the Slurm tests, and the rest before:
# `make test WITHOUT="$(make computing)"`.
COMPUTING := tests/models tests/parity tests/sharding
WITHOUT   ?=
# Not in `make bench`: modules that others import, benchmarks of a GPU, one that needs a directory, and `make bench-memory`.
BENCHMARKS := $(filter-out benchmarks/checkout.py benchmarks/handwritten% benchmarks/gpu% benchmarks/diagnosis_matrix.py benchmarks/plan_vs_compile.py,$(wildcard benchmarks/*.py))

# What a new Python or JAX has broken or may break first, in a minute or two: settings, data, checkpoints, a run and its evaluation,
# gradients on a mesh, what XLA makes of the step, traces, the terminal. Of what imports no JAX little: it has run on the older Python.
# `make test-newest NEWEST_TESTS=tests` runs all.
NEWEST_VENV  := .venv-newest
# run-newest installs and tests, run-newest-again tests what failed last, install-newest only installs.
NEWEST_GOAL  := run-newest
NEWEST_TESTS := tests/configs $(addprefix tests/planner/test_,hardware.py parameters.py published.py step_time.py) \
  tests/rundir/test_events.py tests/hlo tests/measure/test_step_work.py \
  $(addprefix tests/observe/test_,goodput_live.py metrics.py profiler.py progress.py compilation.py writers.py) \
  $(addprefix tests/explain/test_,report.py tensorboard_browser.py trace_*.py) \
  $(addprefix tests/sharding/test_,mesh.py rules.py partition.py collective_budget.py) \
  tests/sharding/test_equality.py::test_other_rules_equal_one_device \
  $(addprefix tests/models/test_,loss.py remat.py convert.py) \
  $(addprefix tests/models/test_decoder.py::test_,rematerialization_recomputes_however_the_layers_run program_size_does_not_depend_on_depth) \
  tests/models/test_attention.py::test_chunked_keeps_no_scores \
  $(addprefix tests/loaders/test_,token_shards.py mixture.py rows.py packing.py readers.py tokenizers.py evaluation_set.py) \
  $(addprefix tests/trainer/test_,checkpoint.py optimizers.py start.py) \
  $(addprefix tests/cli/test_,cli.py data.py evaluate.py shardings.py tables.py)

.DEFAULT_GOAL := help
.PHONY: lock gpu-rehearsal test-stores test-computing test-computing-again computing test-again test-slurm-again test-injections-again help quickstart docs test test-injections test-slurm test-newest compositions bench-memory soak lint format types check-layers bench fuzz clean install install-newest run-newest run-newest-again

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Ridgeline needs Python >= 3.11; found $$($(PYTHON) -V). Try: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The stamps make a second run instant; they are renewed when the packaging changes.
# pip checks every file of the default installation against the hashes of the lock; setuptools, which builds the project, is in it too.
$(VENV)/.installed: $(BIN)/python pyproject.toml requirements.lock
	@echo "Installing Ridgeline into $(VENV) (a minute or two the first time) ..."
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed constraints.txt
	@echo "Installing what its tests need into $(VENV) (a few minutes the first time) ..."
	@$(PIP) -c constraints.txt --no-build-isolation -e '.[dev,docs,parity,aot]'
	@touch $@

lock: $(VENV)/.installed  ## renew requirements.lock (hashes of the default installation) and docs/LICENSES.md (needs uv)
	$(UV) pip compile pyproject.toml --universal --generate-hashes --no-annotate --quiet -c constraints.txt --custom-compile-command "make lock" -o requirements.lock
	$(MAKE) --no-print-directory install
	$(BIN)/python scripts/licenses.py > docs/LICENSES.md

install: $(VENV)/.installed  ## make .venv and install the package

quickstart: $(VENV)/.installed  ## corpus, tokenizer, training, evaluation and a sample, in a few minutes
	@BIN=$(BIN) CORPUS=$(CORPUS) sh scripts/quickstart.sh $(ARGS)

test: $(VENV)/.installed-dev  ## the test suite (FULL=1: all of the long tables and files, of which it draws a part for each commit)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder --ignore tests/slurm --ignore tests/stores $(addprefix --ignore=,$(INJECTIONS) $(WITHOUT)) tests

# A cache of its own: CI runs it beside the Slurm tests, whose last failures must not be overwritten.
test-computing: $(VENV)/.installed-dev  ## the part of the test suite that only computes
	$(BIN)/python -m pytest -o cache_dir=$(VENV)/computing_cache -n 2 --dist loadgroup --no-loadscope-reorder $(COMPUTING)

test-computing-again: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -o cache_dir=$(VENV)/computing_cache -p no:xdist --last-failed --last-failed-no-failures none $(COMPUTING)

computing:
	@echo $(COMPUTING)

test-injections: $(VENV)/.installed-dev  ## rules of the diagnosis on real runs with their faults planted, alone on the machine (FULL=1: all rules, not six)
	$(BIN)/python -m pytest --durations 5 $(INJECTIONS)

test-slurm: $(VENV)/.installed-dev  ## the tests that run on real Slurms: clusters of four nodes on this machine (FULL=1: all, not 25)
	@sh scripts/install_slurm.sh
	$(BIN)/python -m pytest -n $(CLUSTERS) --dist worksteal --durations 10 tests/slurm

test-stores: $(VENV)/.installed-dev  ## s3:// and gs:// inputs and copies of checkpoints against servers on this machine (moto, gcp-storage-emulator, 60 MB)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt s3fs gcsfs 'moto[s3]==5.2.1' flask==3.1.3 flask-cors==6.0.5 gcp-storage-emulator==2026.7.19
	$(BIN)/python -m pytest tests/stores

MINUTES ?= 120
GAP ?= 60
soak: $(VENV)/.installed-dev  ## a run under faults on a real Slurm: MINUTES long, one in GAP seconds, drawn by SEED (0: any); CI takes ten minutes
	@sh scripts/install_slurm.sh
	SOAK_MINUTES=$(MINUTES) SOAK_GAP_S=$(GAP) SOAK_SEED=$(SEED) $(BIN)/python -m pytest -s tests/slurm/test_soak.py

# The same on another interpreter: without torch, so without the parity tests.
test-newest:  ## a quick part of the suite on the newest Python found, with the newest JAX
	@if ! python=$$(sh scripts/newest_python.sh); then \
	  echo "test-newest: no Python >= 3.12 on PATH or in ~/.pyenv/versions: NOTHING WAS TESTED"; \
	else \
	  echo "test-newest: $$python ($$($$python -V))"; \
	  [ "$$($(NEWEST_VENV)/bin/python -V 2>&1)" = "$$($$python -V)" ] || "$$python" -m venv --clear $(NEWEST_VENV) || exit; \
	  $(MAKE) --no-print-directory VENV=$(NEWEST_VENV) PYTHON="$$python" $(NEWEST_GOAL); \
	fi

# What failed last, alone and one after another: real processes, browsers and clusters on a busy machine sometimes miss a deadline.
test-again: AGAIN := --ignore tests/slurm --ignore tests/stores $(addprefix --ignore=,$(INJECTIONS)) tests
test-slurm-again: AGAIN := tests/slurm
test-injections-again: AGAIN := $(INJECTIONS)
test-again test-slurm-again test-injections-again: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -p no:xdist --last-failed --last-failed-no-failures none $(AGAIN)

# A cache of its own: CI runs it beside the Slurm tests, whose last failures must not be overwritten.
run-newest: $(VENV)/.installed-newest
	$(BIN)/python -c 'from importlib.metadata import version as v; print("jax", v("jax"), "flax", v("flax"), "numpy", v("numpy"))'
	$(BIN)/python -m pytest -o cache_dir=$(NEWEST_VENV)/pytest_cache -n 2 --dist loadgroup --no-loadscope-reorder $(NEWEST_TESTS)

run-newest-again: $(VENV)/.installed-newest
	$(BIN)/python -m pytest -o cache_dir=$(NEWEST_VENV)/pytest_cache -p no:xdist --last-failed --last-failed-no-failures none $(NEWEST_TESTS)

$(VENV)/.installed-newest: $(VENV)/.installed constraints.txt
	@$(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

install-newest: $(VENV)/.installed-newest

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

docs: $(VENV)/.installed-dev  ## the documentation site, in build/site
	PYTHONPATH=$(CURDIR) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

fuzz: $(VENV)/.installed-dev  ## long campaigns of damaged files, links and shards, hostile configs and overrides (minutes); SEED=1 draws others
	$(BIN)/python -m tests.configs.hostile --cases 2000 --seed $(or $(SEED),0)
	$(BIN)/python -m tests.configs.hostile_overrides --cases 5000 --seed $(or $(SEED),0)
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.cli.damaged --cases 5000 --seed $(or $(SEED),0)
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.cli.damaged_shards --cases 1000 --seed $(or $(SEED),0)
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.cli.damaged_links --cases 500 --seed $(or $(SEED),0)

bench: $(VENV)/.installed-dev  ## the benchmarks of docs/LOG.md (minutes, one after another)
	@failed=; for b in $(BENCHMARKS); do echo "== $$b"; $(BIN)/python $$b || failed="$$failed $$b"; done; \
	  [ -z "$$failed" ] || { echo "make bench: failed or missed a required figure:$$failed" >&2; exit 1; }

COUNT ?= 200
SEED  ?= 0
compositions: $(VENV)/.installed-dev  ## all compositions of the mesh axes on 8 devices, samples on 16 and 32, against one device (half an hour)
	COMPOSITIONS=all $(BIN)/python -m pytest -n $(JOBS) tests/sharding/test_compositions.py
	for devices in 16 32; do \
	  XLA_FLAGS=--xla_force_host_platform_device_count=$$devices COMPOSITIONS=12 $(BIN)/python -m pytest tests/sharding/test_compositions.py || exit; \
	done

bench-memory: $(VENV)/.installed-dev  ## planned against compiled memory on COUNT drawn configs (20 s each; ARGS=--experts, --stages, or --long: rows over context)
	$(BIN)/python benchmarks/plan_vs_compile.py --seed $(SEED) --count $(COUNT) --json runs/plan_vs_compile.json $(ARGS)

# PYTHON is for the project's own environment; this one is Python 3.12.
GPU_PYTHON ?= python3.12
GPU_PARTS  ?= wheels bench compile
gpu-rehearsal:  ## what needs no GPU of benchmarks on a GPU machine without network (6 GB of packages, half an hour)
	PYTHON="$(GPU_PYTHON)" sh scripts/gpu_rehearsal.sh $(GPU_PARTS)

clean:  ## remove the environment, caches, prepared data and runs
	rm -rf $(VENV) $(NEWEST_VENV) .venv-gpu data runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build *.egg-info
