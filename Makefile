# `make refresh` sets everything up and runs the main job on this machine; `make test` sets everything up and runs the tests.
# Nothing outside .venv, the caches and SRIFT_HOME (default .srift) is written.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
DEV    := $(VENV)/ready-to-develop
CHECKS := $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy --no-error-summary \
  && { $(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; false; }; }
# One process a core, two at least: the one whose tests start hosts mostly waits. Each imports for some 12 s of CPU.
PROCESSES ?= $(shell n=$$(nproc); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))
PYTEST := $(BIN)/pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# Debian keeps ip, tc and friends in sbin directories that an ordinary user's PATH leaves out.
export PATH := $(PATH):/usr/sbin:/sbin
export PREFECT_SERVER_ANALYTICS_ENABLED := false
# A busy machine takes longer than the default of 20 s.
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS := 120
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Every process of a test run would compile all of ours again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help setup tools refresh refresh-emulated chaos test test-fast test-slow mutants check up bench develop clean

help: ## the targets below
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

setup: tools $(READY) ## virtual environment, pinned dependencies, the command `srift`

develop: tools $(DEV) ## the same, and what the tests and benchmarks need

refresh: setup ## the main job, once: ARGS="--max-usd 0" is passed on to `srift refresh`
	@$(BIN)/srift refresh $(ARGS)

refresh-emulated: develop ## EC2 without AWS: real hosts behind an emulated API, from launch to table (root; about 10 minutes)
	@$(BIN)/python -m tests.world

chaos: develop ## what may go wrong on EC2, seeded: ARGS="--scenarios 200 --seed 2026" (two minutes)
	@$(BIN)/python -m tests.chaos $(ARGS)

test: develop ## the checks and every test that holds a guard: PYTEST_ARGS="tests/models -x" is passed on to pytest
	@($(CHECKS)) > $(VENV)/check.log 2>&1 & checks=$$!; \
	$(PYTEST) -m "not slow" $(PYTEST_ARGS); tests=$$?; \
	wait $$checks || { cat $(VENV)/check.log; exit 1; }; exit $$tests

test-fast: develop ## the tests that start neither hosts nor processes
	$(PYTEST) -m "not local and not slow" $(PYTEST_ARGS)

test-slow: develop ## emulated EC2, chaos, PostgreSQL, the browser, the documents (root; about 14 minutes)
	@$(PYTEST) -m "slow and not emulated" $(PYTEST_ARGS); others=$$?; \
	$(BIN)/pytest -m emulated $(PYTEST_ARGS); emulated=$$?; \
	case "$$others$$emulated" in 00|05|50) ;; *) exit 1;; esac

mutants: develop ## takes the guards out one by one, on a copy: ARGS="--only 'lease-*'" (up to forty minutes)
	@$(BIN)/python -m tests.mutants $(ARGS)

check: develop ## ruff, mypy and import-linter
	@$(CHECKS)

up: setup ## the schedule, with the Prefect and MLflow pages; Ctrl-C ends it
	@$(BIN)/python deployments/up.py $(ARGS)

bench: develop ## one benchmark by its name: NAME=held_out ARGS="--write" writes its claims into BENCHMARKS.md
	@PREFECT_HOME="$${SRIFT_HOME:-$$PWD/.srift}/prefect" $(BIN)/python -m tests.benchmarks.$(or $(NAME),held_out) $(ARGS)

clean: ## remove the environment and the caches; the measurements in SRIFT_HOME stay
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The pip that comes with Python 3.11 takes twice as long.
PIP = $(BIN)/pip install --quiet --quiet --constraint constraints.txt
INSTALL = { test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV); } && $(PIP) --upgrade pip \
  && $(PIP) --no-compile --editable

# pip compiles packages one after another. Tests of packages and models of transformers are seldom
# imported. Some packages have files of other versions of Python, which cannot be compiled.
COMPILE = $(BIN)/python -W ignore -m compileall -q -j $$(nproc) -x '/tests?/|/transformers/models/' \
  $(VENV)/lib/python3*/site-packages > /dev/null 2>&1 || true

# Stamps: done again whenever the declared or the pinned dependencies change.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; about 2 GB and a few minutes)"
	@$(INSTALL) .
	@$(COMPILE)
	@touch $@

$(DEV): pyproject.toml constraints.txt
	@echo "setting up $(VENV) for development (once; about 3 GB and a few minutes)"
	@$(INSTALL) '.[dev]'
	@$(COMPILE)
	@touch $(READY) $@

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
