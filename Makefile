# make serve: install, then serve a model over a pipeline.   make test: install, then run every check.   make clean: undo.
# Variables: MODEL (folder, hub id or GGUF file), PP (pipeline stages), PORT, ARGS (further options of `fullbore serve`),
# PYTHON (3.11 to 3.13), TORCH_INDEX (a pip index to take torch from, e.g. https://download.pytorch.org/whl/cpu).
SHELL := /bin/bash
PYTHON ?= python3
MODEL ?=
PP ?= 2
PORT ?= 8000
ARGS ?=
TORCH_INDEX ?=

VENV := .venv
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --no-input -c constraints.txt

.PHONY: serve test clean

serve: $(VENV)/installed
	$(VENV)/bin/fullbore serve $(MODEL) --pp-size $(PP) --port $(PORT) $(ARGS)

test: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy fullbore
	$(VENV)/bin/python -m pytest -m "not slow" -n 2 --dist loadfile
	$(VENV)/bin/python -m pytest -m "slow and not alone" -n 2
	$(VENV)/bin/python -m pytest -m alone

# Stamp files: what is installed is looked at again only when the lists of what to install have changed.
$(VENV)/installed: $(VENV)/created
	$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) --no-build-isolation -e '.[test]'
	@touch $@

# --no-deps: the index of torch need not have the versions of everything else that constraints.txt asks for.
$(VENV)/created: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "fullbore needs Python 3.11, 3.12 or 3.13; name one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "Python's venv module is missing; install it first: sudo apt install python3-venv"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) torch)
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
