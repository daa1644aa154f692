# make demo   train a small GPT on text that every machine has, its layers streamed through two slots
# make test   ruff, mypy and pytest, as .ci/run does
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INPUTS := pyproject.toml constraints.txt Makefile streamer/version.py

.PHONY: demo test clean

demo: .venv/.demo
	$(BIN)/streamer train configs/gpt2-demo.toml

test: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: run 'make PYTHON=python3.11 $(MAKECMDGOALS)' with a newer one"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python $(INPUTS)
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

.venv/.test: .venv/bin/python $(INPUTS)
	$(PIP) install --constraint constraints.txt --editable '.[dev,hf,plot]'
	@touch $@ .venv/.demo

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
