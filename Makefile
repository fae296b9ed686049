# make demo    sets everything up and makes a clip, then the same clip with replay beside it
# make test    sets everything up and passes the tests
# make lint    style, format and types
# make bench   measures what replay saves
# make sanitize  passes the native decoder's tests under AddressSanitizer, UBSan and ThreadSanitizer
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
.PHONY: setup demo test lint bench sanitize clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
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
	$(BIN)/fastcar bench

# Each build is installed into an environment of its own, which borrows all other packages. The C++ library is loaded
# beside the sanitizer's, which looks for what throws exceptions before the interpreter has loaded one.
sanitize: setup
	$(MAKE) --no-print-directory build/address build/thread

build/address: SANITIZERS = address,undefined
build/address: RUNTIME = libasan.so
build/thread: SANITIZERS = thread
build/thread: RUNTIME = libtsan.so
# It knows no threads started by the child of a process with threads.
build/thread: DESELECT = --deselect "tests/test_native.py::test_after_a_fork[3]"
.PHONY: build/address build/thread
build/address build/thread:
	test -x $@/bin/python || $(BIN)/python -m venv $@
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $@/lib/python*/site-packages)/borrowed.pth
	$@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
	    -C build-dir=$@/cmake -C cmake.define.FASTCAR_SANITIZE=$(SANITIZERS) .
	LD_PRELOAD="$$(gcc -print-file-name=$(RUNTIME)) $$(gcc -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
	    OMP_NUM_THREADS=1 $@/bin/python -m pytest -p no:xdist -p no:cacheprovider --capture=sys \
	    $(DESELECT) tests/test_native.py

clean:
	rm -rf $(VENV) build dist out src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
