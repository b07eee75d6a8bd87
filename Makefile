# make demo   environment, install, and one private run under attack with the defaults
# make test   environment, install, lint, types, every test
# make quick  the paper's experiments in miniature, on digits
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint types unit quick bench wheel clean

demo: $(VENV)/installed
	$(BIN)/noisegate run

test: lint types unit

lint: $(VENV)/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/developed
	$(BIN)/mypy

unit: $(VENV)/developed
	$(BIN)/python -m pytest

quick: $(VENV)/developed
	$(BIN)/noisegate reproduce --quick --out runs/quick

bench: $(VENV)/benched
	$(BIN)/python benchmarks/round.py

wheel: $(VENV)/developed
	$(BIN)/python -m build --wheel

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/developed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/benched: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
