# `make help` lists what there is. Every target makes its environment by itself; PYTHON=/path/to/python names another
# interpreter, for instance that of an environment in which vLLM is installed already.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PYTHON
unexport PYTHONDONTWRITEBYTECODE  # what was compiled once is not compiled in each of a hundred processes
BIN := .venv/bin

.PHONY: help setup static check quick-nodes quick-pool quick-engines quick-transfers quick-others test explore test-ranks test-accelerator test-matrix demo clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv: EMS, its tools and an engine (the CPU build of vLLM where there is none)
	@scripts/setup.sh

static: setup  ## lint, format, types, layers
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@NO_COLOR=1 $(BIN)/lint-imports --no-cache | tail -n +10

check: setup  ## the above and the quick tests, which start neither engines nor servers
	@$(MAKE) -j 4 --output-sync=target quick-engines quick-others quick-transfers static quick-nodes quick-pool

# Parts that run beside each other, those that take long first.  PyTorch and vLLM take as long as a thousand tests.
QUICK := $(BIN)/pytest -m "not e2e and not process and not slow and not accelerator" --hypothesis-profile quick
ENGINES := tests/vllm
TRANSFERS := tests/cc_v1 tests/transfers
NODES := tests/pool/node tests/pool/tiers

quick-nodes: setup
	@$(QUICK) $(NODES)

quick-pool: setup
	@$(QUICK) tests/pool $(addprefix --ignore=,$(NODES))

quick-engines: setup
	@$(QUICK) $(ENGINES)

quick-transfers: setup
	@$(QUICK) $(TRANSFERS)

quick-others: setup
	@$(QUICK) $(addprefix --ignore=,tests/e2e tests/pool $(ENGINES) $(TRANSFERS))

test: static  ## everything: the above and the end-to-end tests with real vLLM servers
	@$(BIN)/pytest -m "not e2e and not accelerator" -n 2 --dist loadfile
	@$(BIN)/pytest -m "e2e and not ranks"

explore: setup  ## the property tests with random examples; ROUNDS=10 for more of them
	@for round in $$(seq $${ROUNDS:-1}); do $(BIN)/pytest -m hypothesis --hypothesis-profile explore -n 2; done

test-ranks: setup  ## engines of several ranks on one pool, with real vLLM servers; wants four cores
	@$(BIN)/pytest -m ranks

test-accelerator: setup  ## copies and engines on the accelerator of this machine, which PYTHON's torch must know
	@$(BIN)/pytest -m accelerator tests/transfers
	@ENGINE_ARGUMENTS="$${ENGINE_ARGUMENTS---gpu-memory-utilization 0.2}" $(BIN)/pytest tests/e2e/test_shared_pool.py

test-matrix: setup  ## the connectors' tests with each release of vLLM; VERSIONS="0.28.0 0.30.0" names fewer
	@$(BIN)/python -m scripts.matrix $(VERSIONS)

demo: setup  ## pool, prefill and decode servers and router on this machine: one chat, one table
	@$(BIN)/python examples/demo.py

clean:  ## remove the environment and what tools and demo left
	@rm -rf .venv .venv.lock .venv-matrix .run .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	@find src tests scripts examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
