# `make refresh` sets everything up and runs the main job on this machine; `make test` sets everything up and runs the tests.
# Nothing outside .venv, the caches and SRIFT_HOME (default .srift) is written.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
CHECKS := $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy --no-error-summary \
  && { $(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; false; }; }
# One process a core, two at least: the one whose tests start hosts mostly waits. Each imports for some 12 s of CPU.
PROCESSES ?= $(shell n=$$(nproc); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))
PYTEST := $(BIN)/pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# Debian keeps ip, tc and friends in sbin directories that an ordinary user's PATH leaves out.
export PATH := $(PATH):/usr/sbin:/sbin
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Every process of a test run would compile all of ours again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Rows that came with the package, and are those of the file that BENCHMARKS.md names.
SEEDS     := warehouse/seeds
ROWS      ?= $(SEEDS)/training_runs_t4.parquet
FACTS     ?= $(SEEDS)/workloads.csv
CATALOGUE ?= ../shared/data/ec2_catalogue.csv

.PHONY: help setup tools refresh refresh-emulated chaos test test-fast test-slow mutants check up bench bench-models bench-held-out bench-campaign bench-planner bench-answer bench-world bench-spot bench-strategies clean

help: ## the targets below
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

setup: tools $(READY) ## virtual environment, pinned dependencies, the command `srift`

refresh: setup ## the main job, once: ARGS="--max-usd 0" is passed on to `srift refresh`
	@$(BIN)/srift refresh $(ARGS)

refresh-emulated: setup ## EC2 without AWS: real hosts behind an emulated API, from launch to table (root; about 10 minutes)
	@$(BIN)/python -m tests.world $(ARGS)

chaos: setup ## what may go wrong on EC2, seeded: ARGS="--scenarios 200 --seed 2026" (two minutes)
	@$(BIN)/python -m tests.chaos $(ARGS)

test: setup ## the checks and every test that holds a guard: PYTEST_ARGS="tests/models -x" is passed on to pytest
	@($(CHECKS)) > $(VENV)/check.log 2>&1 & checks=$$!; \
	$(PYTEST) -m "not slow" $(PYTEST_ARGS); tests=$$?; \
	wait $$checks || { cat $(VENV)/check.log; exit 1; }; exit $$tests

test-fast: setup ## the tests that start neither hosts nor processes
	$(PYTEST) -m "not local and not slow" $(PYTEST_ARGS)

test-slow: setup ## emulated EC2, chaos, PostgreSQL, the browser, the documents (root; about 10 minutes)
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

mutants: setup ## takes the guards out one by one, on a copy: ARGS="--only 'lease-*' --jobs 2" (three to twenty minutes)
	@$(BIN)/python -m tests.mutants $(ARGS)

check: setup ## ruff, mypy and import-linter
	@$(CHECKS)

up: setup ## the schedule, with the Prefect and MLflow pages; Ctrl-C ends it
	@$(BIN)/python deployments/up.py $(ARGS)

bench: setup ## judge it: setups never measured, the noise floor, ten pieces of advice (about 35 minutes, after `make refresh`)
	@for name in holdout noise advice; do \
	  PREFECT_HOME="$${SRIFT_HOME:-$$PWD/.srift}/prefect" $(BIN)/python -m tests.benchmarks.$$name || exit; done

bench-models: setup ## the step-time models on measured rows: ROWS=file FACTS=file CATALOGUE=file (about 10 minutes)
	@$(BIN)/python -m tests.benchmarks.models $(ROWS) --workloads $(FACTS) --catalogue $(CATALOGUE) $(ARGS)

bench-held-out: setup ## errors and intervals on groups left out, three GPU kinds: ARGS="--rivals" or "--ablations" (about 10 minutes)
	@$(BIN)/python -m tests.benchmarks.held_out $(ARGS)

bench-campaign: setup ## dollars until choices are good, ours and rivals': ROWS=file FACTS=file CATALOGUE=file (about 4 minutes)
	@$(BIN)/python -m tests.benchmarks.campaign $(ROWS) --workloads $(FACTS) --catalogue $(CATALOGUE) $(ARGS)

bench-planner: setup ## the planner at EC2's scale, in a made-up market: ARGS="--plot planner.png" (about 3 minutes)
	@$(BIN)/python -m tests.benchmarks.planner $(ARGS)

bench-answer: setup ## `srift recommend` about EC2 as a command, 30,000 rows imported: ROWS=file FACTS=file (about 5 minutes)
	@$(BIN)/python -m tests.benchmarks.answer $(ROWS) --workloads $(FACTS) $(ARGS)

bench-world: setup ## the models on GPUs and sizes that no file has, in a made-up world: ARGS="--seed 1" (about 9 minutes)
	@$(BIN)/python -m tests.benchmarks.gpu_world $(ARGS)

bench-spot: setup ## what is said of jobs on spot machines, on records in ../shared/data: ARGS="--jobs 600" (a minute or two)
	@$(BIN)/python -m tests.benchmarks.spot $(ARGS)

bench-strategies: setup ## every strategy against its claim, on local hosts: ARGS="--parts bytes,update" (root; hours for all parts)
	@$(BIN)/python -m tests.benchmarks.strategies $(ARGS)

clean: ## remove the environment and the caches; the measurements in SRIFT_HOME stay
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# A stamp: done again whenever the declared or the pinned dependencies change.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; about 2 GB and a few minutes)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/pip install --quiet --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

tools:
	@missing=; \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || missing="$$missing python3.11"; \
	"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3.11-venv"; \
	for tool in ip tc; do command -v $$tool >/dev/null || { missing="$$missing iproute2"; break; }; done; \
	for tool in unshare nsenter setpriv; do command -v $$tool >/dev/null || { missing="$$missing util-linux"; break; }; done; \
	test -z "$$missing" || { \
	  echo "Srift needs what this machine lacks:$$missing. On Debian or Ubuntu:" >&2; \
	  echo "    sudo apt-get install --yes$$missing" >&2; \
	  echo "Another Python of 3.11 or 3.12 is chosen with: make PYTHON=/path/to/python ..." >&2; exit 1; }
