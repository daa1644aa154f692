# make demo   train a small GPT on text that every machine has, its layers streamed through two slots
# make demo-disk   a deeper GPT, three times what its host memory is told to hold: the rest is on disk
# make test   ruff, mypy and pytest, as .ci/run does
# make test TORCH=2.15.0   the same with another release of PyTorch, in a virtual environment of its own
# make test-nullgpu   the tests of CUDA's streams and memory, on tests/nullgpu in place of a GPU
PYTHON ?= python3
TORCH :=
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INPUTS := pyproject.toml constraints.txt Makefile streamer/version.py
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

# PyTorch's CUDA build, of which the default wheel for Linux is one
NULLGPU_TORCH ?= 2.14.1
NULLGPU := .venv-nullgpu/bin/python

# dozens of processes of the tests import the package: what the first has compiled is there for the others
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-disk test test-nullgpu nullgpu clean

demo: $(VENV)/.demo
	$(BIN)/streamer train configs/gpt2-demo.toml

demo-disk: $(VENV)/.demo
	$(BIN)/streamer train configs/gpt2-demo.toml --output runs/demo-disk --steps 60 \
	  --set model.args.n_layer=24 --set stream.host_memory=16MB --set stream.disk=.

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 3 --dist worksteal

nullgpu: .venv-nullgpu/.test-$(NULLGPU_TORCH)

test-nullgpu: nullgpu
	NULLGPU_DEVICES=2 tests/nullgpu/run.sh $(NULLGPU) -m pytest -m cuda_api --assert=plain -n 2 \
	  --dist load tests/nullgpu tests/backends tests/bench tests/ranks tests/cli/test_calibrate.py

.venv-nullgpu/.test-$(NULLGPU_TORCH): $(INPUTS)
	$(PYTHON) -m venv .venv-nullgpu
	$(NULLGPU) -m pip --disable-pip-version-check --quiet install torch==$(NULLGPU_TORCH) --editable '.[plot]' \
	  pytest hypothesis pytest-xdist transformers
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: run 'make PYTHON=python3.11 $(MAKECMDGOALS)' with a newer one"; exit 1; }
	$(PYTHON) -m venv $(VENV)

ifdef TORCH
$(CONSTRAINTS): $(BIN)/python constraints.txt
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@
endif

$(VENV)/.demo: $(BIN)/python $(CONSTRAINTS) $(INPUTS)
	$(PIP) install --constraint $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.test: $(BIN)/python $(CONSTRAINTS) $(INPUTS)
	$(PIP) install --constraint $(CONSTRAINTS) --editable '.[dev,hf,plot]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf .venv .venv-nullgpu .venv-torch-* runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
