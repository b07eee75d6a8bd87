# make demo   environment, install, and one private run under attack with the defaults
# make test   environment, install, lint, types, every test
# make kernels   the tests of the GPU kernels, by Triton's interpreter on this CPU (a part of make test)
# make docs   whether the tables in the docs are those of the committed benchmark results, and their outputs what is printed
# make outputs   the outputs that the docs show, written anew
# make site   the documentation site in site/, with every warning an error, and what its pages load and link to
# make quick  the paper's experiments in miniature, on digits
# make lowest    the command line with the lowest versions that are allowed, in an environment of its own
# make flower    noisegate on a real Flower, a SuperLink and four SuperNodes: some ten minutes
# make versions  the command line with the newest ones, on every Python from 3.11 to 3.13 that is here
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# These set TRITON_INTERPRET before Triton is imported, so they need a process of their own.
KERNELS := $(wildcard tests/test_kernel*.py) tests/test_judging.py

# These start processes and keep deadlines, so they have the machine for themselves, after all others.
ALONE := $(patsubst %,tests/test_%.py,crashes deploy faults federation flower server)

# Two halves of about the same length, side by side: these files, and all others. A new file falls into the second half.
# `pytest --durations=0` says how long each test takes; move a name where the halves have drifted apart.
HALF   := accountant audit fortified ledger one_line pages redteam resume run store
FIRST  := $(filter-out $(KERNELS),$(wildcard $(HALF:%=tests/test_%.py)))
SECOND := $(filter-out $(FIRST) $(KERNELS) $(ALONE),$(wildcard tests/test_*.py))

# The wheels of the lowest torch bring some 3 GB of CUDA along: LOWEST_TORCH=2.13.0 tries the rest with a smaller one.
LOWEST       ?= .venv-lowest
LOWEST_TORCH ?= 2.6.0

.PHONY: demo test lint types unit unit-first unit-second unit-alone kernels docs outputs site quick flower lowest versions bench wheel clean

demo: $(VENV)/installed
	$(BIN)/noisegate run

test: lint types unit

lint: $(VENV)/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/developed
	$(BIN)/mypy

unit: $(VENV)/developed
	$(MAKE) --jobs=2 unit-first unit-second kernels
	$(MAKE) unit-alone

unit-first: $(VENV)/developed
	$(BIN)/python -m pytest $(FIRST)

# The output of this one and of the next comes at its end, so that two do not print at the same time.
unit-second: $(VENV)/developed
	$(BIN)/python -m pytest $(SECOND) > $(VENV)/unit-second.txt 2>&1; \
	status=$$?; cat $(VENV)/unit-second.txt; exit $$status

unit-alone: $(VENV)/developed
	$(BIN)/python -m pytest $(ALONE)

# Without Triton, which is installed on Linux alone, they are skipped, and say so.
kernels: $(VENV)/developed
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(KERNELS) > $(VENV)/kernels.txt 2>&1; \
	status=$$?; cat $(VENV)/kernels.txt; exit $$status

docs: $(VENV)/developed
	$(BIN)/python -m pytest tests/docs

outputs: $(VENV)/developed
	PYTHONPATH=tests $(BIN)/python tests/docs/outputs.py

# The environment variable leaves out a note on the future of mkdocs, which is no warning of ours.
site: $(VENV)/sited
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest tests/site

quick: $(VENV)/developed
	$(BIN)/noisegate reproduce --quick --out runs/quick

lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet -c constraints-lowest.txt torch==$(LOWEST_TORCH) -e .
	.ci/smoke $(LOWEST)/bin/python

flower: $(VENV)/developed
	$(BIN)/python benchmarks/flower_processes.py

versions:
	.ci/versions

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

$(VENV)/sited: $(VENV)/developed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[site]'
	touch $@

$(VENV)/benched: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
