# rankmesh: `make` prints what there is.
#
# Variables: PYTHON (python3.11), VARIANT (cpu|gpu), PIP_ARGS (extra arguments of pip install), NAME and PORT of a mesh,
# ONCE=1 (make run ends after its answer), BENCH (name of a benchmark), PYTEST_ARGS (extra arguments of pytest).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Order is part of what targets mean here (cheap checks first), whatever MAKEFLAGS says.
.NOTPARALLEL:

# Whether somebody has asked for a certain one; .venv must then be of it.
PYTHON_ASKED := $(filter-out undefined default,$(origin PYTHON))
PYTHON ?= python3.11
VARIANT ?= cpu
PIP_ARGS ?=
PYTEST_ARGS ?=
export PYTHON VARIANT PIP_ARGS
# Compiled once: each of the many processes of a mesh or a test run would compile the same files again.
PACKAGES := shared services models training cluster kernels benchmarks
unexport PYTHONDONTWRITEBYTECODE
$(if $(filter cpu gpu,$(VARIANT)),,$(error VARIANT is cpu or gpu, not '$(VARIANT)'))

BIN := .venv/bin
RANKMESH := $(BIN)/rankmesh
PYTEST := $(BIN)/python -m pytest
# One process a core, so one thread each. The two plug-ins cost each process seconds, and these lanes use neither.
ON_ALL_CORES := OMP_NUM_THREADS=1
PARALLEL := -n auto --maxprocesses=8 --dist=loadfile -p no:schemathesis -p no:logging
# As the shell's variable and in quotes: a name that is none must reach the command that says so.
export NAME
NAME_AND_PORT := $(if $(NAME),--name "$$NAME") $(if $(PORT),--port $(PORT))

# A stamp is written after its step has succeeded, so an interrupted setup is done again.
RUN_STAMP := .venv/.run-$(VARIANT)
DEV_STAMP := .venv/.dev-$(VARIANT)
PACKAGE_STAMP := .venv/.package
NATIVE_STAMP := var/native/.built
CONSTRAINTS := $(if $(filter gpu,$(VARIANT)),requirements/gpu.txt,requirements/constraints-cpu.txt)

$(RUN_STAMP): requirements/base.in requirements/$(VARIANT).in requirements/torchrec.in $(CONSTRAINTS) scripts/setup.sh
	@scripts/setup.sh run
	@touch $@

$(DEV_STAMP): requirements/dev.in $(CONSTRAINTS) $(RUN_STAMP)
	@scripts/setup.sh dev
	@touch $@

# setuptools is in the environment already: no build isolation, no download.
$(PACKAGE_STAMP): pyproject.toml $(RUN_STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m compileall -q -j 0 $(PACKAGES)
	@touch $@

# Says in one line what came of it; without a compiler PyTorch's own operators are used, and the stamp is not written: a
# compiler that comes later is found.
$(NATIVE_STAMP): kernels/native/build.py $(wildcard kernels/native/src/*) $(PACKAGE_STAMP)
	@$(BIN)/python -m kernels.native --stamp $@

##@ Set up

.PHONY: help
help: ## Print this help
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(RUN_STAMP) $(PACKAGE_STAMP) $(NATIVE_STAMP) ## Create .venv with what a mesh needs
	@$(if $(PYTHON_ASKED),scripts/setup.sh check,:)

.PHONY: setup-dev
setup-dev: setup $(DEV_STAMP) ## The same, with linters and test tools
	@:

.PHONY: lock
lock: ## Write the constraint files again from the intent files
	scripts/lock.sh

##@ Use

.PHONY: run
run: setup ## Train or reuse a model, start a mesh, rank real requests, keep serving (ONCE=1: end after the answer)
	@$(RANKMESH) run $(if $(filter 1,$(ONCE)),--once) $(NAME_AND_PORT)

.PHONY: up
up: setup ## Start a mesh in the background
	@$(RANKMESH) up $(NAME_AND_PORT)

.PHONY: down
down: setup ## End a mesh
	@$(RANKMESH) down $(if $(NAME),--name "$$NAME")

.PHONY: bench
bench: setup ## Run a benchmark: make bench BENCH=mesh (without BENCH: list them)
	@$(RANKMESH) bench $(BENCH)

##@ Check

.PHONY: fmt
fmt: setup-dev ## Format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: lint
lint: setup-dev ## Format and lint rules, nothing changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.PHONY: types
types: setup-dev ## mypy, strict
	$(BIN)/mypy

.PHONY: imports
imports: setup-dev ## Import rules between packages
	$(BIN)/lint-imports --no-logo

.PHONY: unit
unit: setup-dev ## Unit tests and tests of the repository itself, on all cores
	$(ON_ALL_CORES) $(PYTEST) $(PARALLEL) $(PYTEST_ARGS)

.PHONY: kernels
kernels: setup-dev ## Triton kernels in the interpreter
	$(ON_ALL_CORES) $(PYTEST) -m interpret tests/unit/kernels $(PARALLEL) $(PYTEST_ARGS)

.PHONY: aot
aot: setup-dev ## Every Triton kernel compiled for sm_90: registers, spills, shared memory, tensor cores
	$(PYTEST) -m slow tests/unit/kernels/aot $(PYTEST_ARGS)

# Needs torch, triton and numpy only: the machine with the GPU may have no .venv.
.PHONY: gpu-check
gpu-check: ## Every Triton kernel on this machine's GPU: right, and how fast (OUT=rows.jsonl)
	TRITON_INTERPRET=0 $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m kernels.gpu_check \
	  --out $(or $(OUT),var/gpu-check.jsonl)

.PHONY: sim
sim: setup ## A mesh in simulated worlds with faults: make sim SEED=0 N=1000
	@$(BIN)/python -m cluster.simulation --seed $(or $(SEED),0) --count $(or $(N),1000)

.PHONY: integration
integration: setup-dev ## A real cluster, asked over HTTP
	@scripts/lane.sh integration tests/integration --timeout=600 $(PYTEST_ARGS)

.PHONY: chaos
chaos: setup-dev ## A real cluster whose parts are killed
	@scripts/lane.sh chaos tests/chaos --timeout=600 $(PYTEST_ARGS)

.PHONY: chaos-lab
chaos-lab: setup ## A scenario of configs/chaos/ in a mesh of its own: make chaos-lab SCENARIO=smoke SEED=0
	@$(RANKMESH) chaos run $(or $(SCENARIO),smoke) --seed $(or $(SEED),0)

.PHONY: fuzz
fuzz: setup-dev ## Hostile bytes into every parser, and the API against its own document: make fuzz N=10000
	$(PYTEST) -m "slow or not slow" tests/fuzz tests/contract -q --timeout=3600 --fuzz-examples $(or $(N),10000) $(PYTEST_ARGS)

# Asks the advisory database of PyPI about every pinned version: needs the network, so it is not part of `make ci`.
.PHONY: audit
audit: setup-dev ## Known holes in the pinned dependencies (needs the network)
	$(PYTHON) -m venv var/audit
	var/audit/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) pip-audit==2.9.0
	var/audit/bin/pip-audit --no-deps --disable-pip --progress-spinner off -r $(CONSTRAINTS)

.PHONY: test
test: unit kernels integration ## Everything that proves the product: unit, repo, kernels in the interpreter, integration

.PHONY: ci
ci: ## All that CI runs, cheap first, with the time of each step
	@scripts/ci.sh setup-dev lint types imports aot test

##@ Clean

.PHONY: clean
clean: ## Remove caches and build products (.venv and var/ stay)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info .coverage .coverage.* htmlcov
	find . -path ./.venv -prune -o -path ./var -prune -o -name __pycache__ -type d -exec rm -rf {} +
