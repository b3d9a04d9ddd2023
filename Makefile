# One verb for each task; every verb sets the project up first, which is instant once it has been done.
SHELL := bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.penstock-setup
DEV_STAMP := $(VENV)/.penstock-setup-dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
NAME ?= words
ARGS ?=
SEEDS ?= 1000
JOBS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev java demo test test-all bench bench-page lint sim clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: java $(STAMP) ## what flows and the demonstration need: .venv, and Java where we may install it

setup-dev: setup $(DEV_STAMP) ## and what the extras, tests and checks need

java:
	@scripts/java.sh

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) -V`: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing the pinned packages into $(VENV)"
	@$(PIP) -r requirements.txt -e .
	@touch $@

$(DEV_STAMP): $(STAMP) requirements-extras.txt requirements-dev.txt
	@echo "setup: installing what the extras, tests and checks need into $(VENV)"
	@$(PIP) -r requirements.txt -r requirements-extras.txt -r requirements-dev.txt
	@touch $@

demo: setup ## the demonstration: the top words of a sliding window, rescaled while you watch
	@$(BIN)/penstock demo $(ARGS)

test: setup-dev ## the import contracts and the tests that every change must pass: make test ARGS="tests/unit -x"
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m penstock.engines.spark.archive
	@PYTHON=$(BIN)/python scripts/test.sh $(ARGS)

test-all: setup-dev ## the same with every fault, kill point and long storm, and many more seeds: hours
	@$(BIN)/lint-imports --no-cache
	@PENSTOCK_THOROUGH=1 PYTHON=$(BIN)/python scripts/test.sh $(ARGS)

bench: setup-dev ## a benchmark with its peers: make bench NAME=words ARGS="--quick"
	@$(BIN)/penstock bench $(NAME) $(ARGS)

bench-page: setup-dev ## docs/benchmarks.md from benchmarks/results/*.json
	@$(BIN)/python -m benchmarks.pages

lint: setup-dev ## ruff, mypy and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --strict examples/*.py
	@$(BIN)/lint-imports --no-cache

sim: setup ## the simulator, on all cores: make sim SEEDS=10000 ARGS="--from 5000"
	@$(BIN)/penstock simulate --seeds $(SEEDS) --jobs $(JOBS) $(ARGS)

clean: ## removes the environment and everything that was built or cached
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache spark-warehouse
	@rm -rf src/*.egg-info
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
