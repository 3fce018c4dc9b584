# `make demo` and `make test` are all the set-up there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := runs/demo

.PHONY: help demo test test-slow test-parity lint format clean

help:
	@echo "make demo       install, fetch the default data, train, evaluate and analyse (about 15 minutes)"
	@echo "make test       install and run the default tests, linter and type checker"
	@echo "make test-slow  the tests that take longer or need the network"
	@echo "make test-parity  beside Hugging Face and torch, which it installs"
	@echo "make format     format the code"
	@echo "make clean      remove the environment and caches; runs/ stays"

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/moe train experiments/demo.py --run-dir $(DEMO)
	$(BIN)/moe evaluate $(DEMO)
	$(BIN)/moe analyze $(DEMO)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

test-parity: $(INSTALLED)
	$(BIN)/pip install --quiet --editable '.[test,parity]'
	$(BIN)/python -m pytest -m parity

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
