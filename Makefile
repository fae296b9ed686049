# make demo    sets everything up and makes a clip, then the same clip with replay beside it
# make test    sets everything up and passes the tests
# make lint    style, format and types
# make bench   measures what replay saves
# make setup   only the set-up, into .venv
# make clean   removes what the others made
#
# Another interpreter: make PYTHON=python3.12 setup. One test: make test TESTS="tests/test_video.py -k gif".

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= a large yellow star moving left over a gradient navy background
OUT ?= out/demo
TESTS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := demo
.PHONY: setup demo test lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,lint,vila-u,hub,transformers]"
	touch $@

demo: setup
	mkdir -p $(OUT)
	$(BIN)/fastcar generate "$(PROMPT)" -o $(OUT)/clip.mp4
	$(BIN)/fastcar compare "$(PROMPT)" --replay 0.5 -o $(OUT)

# Two workers of one thread each: more threads than cores would make them wait for one another.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks.replay

clean:
	rm -rf $(VENV) build dist out src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
