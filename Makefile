# make serve and make test do all set-up on a fresh machine with Python, make and a C++ compiler.
# Everything made lies in .venv and build; stamps in .venv say what is done already.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PORT ?= 8000
BENCH ?= --workload benchmarks/workloads/W1.json
NATIVE := CMakeLists.txt $(shell find native -type f 2>/dev/null)
CPP := $(shell find native -name '*.cc' -o -name '*.h' 2>/dev/null)
BUILD_NEEDS := 'scikit-build-core>=1.1' 'nanobind>=3.1'
# The only range that installs as a plain CPU build; others fetch gigabytes.
TORCH := torch==2.13.0
# ON makes warnings of the C++ compiler errors, and compiles all of the module again for the tests.
WERROR ?= OFF

.DEFAULT_GOAL := help
.PHONY: help serve build test soak lint format types bench clean

help:
	@echo 'make serve   set up, fetch the demo model, start the server on port $(PORT)'
	@echo 'make test    set up and run every test'
	@echo 'make soak    the core for hours: ten thousand cases of each kind, small worlds in many sizes'
	@echo 'make build   build and install Octavo into $(VENV)'
	@echo 'make lint    ruff and clang-format        make types   mypy --strict'
	@echo 'make format  put the sources in order     make bench   octavo bench throughput $$(BENCH)'
	@echo 'make clean   remove $(VENV) and build'

serve: $(VENV)/.built
	$(BIN)/octavo pull demo
	$(BIN)/octavo serve --model demo --port $(PORT)

build: $(VENV)/.built

# A worker for each core: the threads of PyTorch, and threads that spin, would be too many.
test: $(VENV)/.tested
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST)

# Each test says in the end what it tried; OCTAVO_TEST_SEED=… repeats a run.
soak: $(VENV)/.tested
	OCTAVO_TEST_SOAK=1 nice $(BIN)/python -m pytest -rP tests/core/test_block_pool.py \
	  tests/core/test_block_manager.py tests/core/test_scheduler_machine.py tests/core/test_small_world.py $(PYTEST)

lint: $(VENV)/.tested
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(if $(CPP),$(BIN)/clang-format --dry-run -Werror $(CPP))

format: $(VENV)/.tested
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

types: $(VENV)/.tested
	$(BIN)/mypy --strict

bench: $(VENV)/.built
	$(BIN)/octavo bench throughput $(BENCH)

clean:
	rm -rf $(VENV) build dist

# Asked first: an environment of too old a Python would stay, and fail later.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or later, \
$(PYTHON) is %s; try make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Built without isolation, so that a second build compiles only what changed.
$(VENV)/.tools: $(VENV)/.made
	$(PIP) install --quiet $(BUILD_NEEDS) $$(command -v cmake >/dev/null || echo cmake) \
	  $$(command -v ninja >/dev/null || echo ninja)
	@touch $@

$(VENV)/.built: $(VENV)/.tools pyproject.toml $(NATIVE)
	@for cxx in "$$CXX" c++ g++ clang++; do command -v "$$cxx" >/dev/null && exit; done; \
	  echo 'Octavo needs a C++20 compiler: install g++ or clang++, or set CXX' >&2; exit 1
	@echo 'Building Octavo: about a minute on two free cores'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --quiet --no-build-isolation --editable .
	@touch $@

# For the tests the module also holds plain C++ doubles of the instruction sets this machine lacks.
$(VENV)/.tested: $(VENV)/.built
	@echo 'Setting up the tests: PyTorch to compare with, more kernels: some minutes the first time'
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install --quiet $(TORCH)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --quiet --no-build-isolation \
	  --config-settings=cmake.define.OCTAVO_EMULATE=ON --config-settings=cmake.define.OCTAVO_WERROR=$(WERROR) \
	  --editable '.[test]'
	@touch $@
