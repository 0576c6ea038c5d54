# Every target does its own set-up: a virtual environment in .venv, torch, this project. Where there is no GPU, the
# versions are those in constraints/, and torch is the CPU build if pip's configuration offers one.
# PYTHON chooses the interpreter, PIP_ARGS adds arguments to pip.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := constraints/constraints-cpu.txt
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
PINS := $(if $(HAS_GPU),,-c $(CONSTRAINTS))

.PHONY: demo test test-slow lint format setup wheel clean

demo: $(READY)
	$(BIN)/mok-cute demo

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 -m slow

# Types are checked in the layout of the installed package: links put templates/ where mok_cute.templates is.
lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf build/types && mkdir -p build/types/mok_cute
	ln -s $(CURDIR)/mok_cute/* build/types/mok_cute/
	ln -s $(CURDIR)/templates build/types/mok_cute/templates
	$(BIN)/mypy build/types/mok_cute tests perf

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(READY)

# The stamp is newer than what decides the set-up, so a second run installs nothing.
$(READY): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) $(PINS) "torch>=2.10"
	$(BIN)/python -m pip install $(PIP_ARGS) $(PINS) -e ".[dev]"
	touch $@

wheel: $(READY)
	$(BIN)/python -m pip wheel $(PIP_ARGS) --no-deps -w build/wheel .

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
