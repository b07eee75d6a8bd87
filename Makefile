# make demo   environment, install, and one private run under attack with the defaults
# make test   environment, install, lint, types, every test
# make quick  the paper's experiments in miniature, on digits
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Two halves of about the same length, side by side; a new file falls into one of them by its name.
FIRST  := $(wildcard tests/test_[a-p]*.py)
SECOND := $(filter-out $(FIRST),$(wildcard tests/test_*.py))

.PHONY: demo test lint types unit unit-first unit-second quick bench wheel clean

demo: $(VENV)/installed
	$(BIN)/noisegate run

test: lint types unit

lint: $(VENV)/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/developed
	$(BIN)/mypy

unit: $(VENV)/developed
	$(MAKE) --jobs=2 unit-first unit-second

unit-first: $(VENV)/developed
	$(BIN)/python -m pytest $(FIRST)

# Its words come at its end, so that the two do not talk at once.
unit-second: $(VENV)/developed
	$(BIN)/python -m pytest $(SECOND) > $(VENV)/unit-second.txt 2>&1; \
	status=$$?; cat $(VENV)/unit-second.txt; exit $$status

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
