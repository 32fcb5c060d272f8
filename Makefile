# Two commands do all the set-up there is: `make demo` and `make test`.
# While you work: `make test-quick`, in a minute or two. Before a release: `make check-all`, in an hour.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc -name "*.cpp" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh") setup.py pyproject.toml
SECONDS ?= 600
export DGLBACKEND := pytorch
unexport PYTHONDONTWRITEBYTECODE # compiled once, not by each of the hundred processes that tests start

.PHONY: demo test test-quick check-all lint bench chaos fuzz fuzz-numbers soak sanitize sanitize-quick sanitize-cuda sanitize-selftest clean

demo: $(VENV)/.built ## make the environment, train GraphSAGE on a built-in graph
	$(BIN)/gnnsys demo

DURATIONS := --durations=30 --durations-min=0.5
test: $(VENV)/.built $(VENV)/.tools ## make the same environment if needed, run every test but the long ones
	$(BIN)/python -m pytest -m "not long" $(DURATIONS) $(PYTEST_ARGS)

test-quick: $(VENV)/.built $(VENV)/.tools ## some tests of every room, without processes (tests/support/quick.py)
	$(BIN)/python -m pytest --quick -m "not long" $(PYTEST_ARGS)

# The order is that of what fails most often.
check-all: lint ## style and types, all tests with the long ones, all native code under sanitizers
	$(BIN)/python -m pytest $(DURATIONS) $(PYTEST_ARGS)
	$(MAKE) sanitize

chaos: $(VENV)/.built $(VENV)/.tools ## kill shards, trainers and leaders of a job on two hosts, 30 times
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

lint: $(VENV)/.built $(VENV)/.tools ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.built $(VENV)/.tools ## every benchmark that needs no GPU, beside what it is compared with
	$(BIN)/gnnsys bench ops
	$(BIN)/gnnsys bench loader
	$(BIN)/gnnsys bench partition
	$(BIN)/gnnsys bench store
	$(BIN)/gnnsys bench pipeline
	$(BIN)/gnnsys bench dist

fuzz: $(VENV)/.built $(VENV)/.tools ## a million mutated messages, a million sealed ones, a thousand faults in part files
	$(BIN)/python -m tests.fuzz.faults --faults 1000
	$(BIN)/python -m tests.fuzz.run --messages 1000000
	$(BIN)/python -m tests.fuzz.run --messages 1000000 --sealed

SEED ?= 0
fuzz-numbers: $(VENV)/.built $(VENV)/.tools ## random models, loaders, training and jobs against plain torch, each for SECONDS
	$(BIN)/python -m tests.fuzz.fullgraph --seconds $(SECONDS) --seed $(SEED)
	$(BIN)/python -m tests.fuzz.sampling --seconds $(SECONDS) --seed $(SEED)
	$(BIN)/python -m tests.fuzz.state --seconds $(SECONDS) --seed $(SEED)
	$(BIN)/python -m tests.fuzz.jobs --seconds $(SECONDS) --seed $(SEED)

soak: $(VENV)/.built $(VENV)/.tools ## a server at full load for SECONDS; fails where anything grows
	$(BIN)/python -m tests.fuzz.soak --seconds $(SECONDS)

sanitize: $(VENV)/.built $(VENV)/.tools ## native code under AddressSanitizer, UBSan and ThreadSanitizer (docs/native.md)
	$(BIN)/python csrc/sanitize/run.py address
	$(BIN)/python csrc/sanitize/run.py thread

sanitize-quick: $(VENV)/.built $(VENV)/.tools ## a part of it, in minutes
	$(BIN)/python csrc/sanitize/run.py address --quick

# Kernels that end the process on purpose, and traced ones, are no work for it; initcheck must see every allocation.
CUDA_TESTS ?= tests/cuda
CUDA_PYTEST = $(BIN)/python -m pytest -p no:xdist -k "not torch_library and not ends_the and not captur" $(CUDA_TESTS)
sanitize-cuda: $(VENV)/.built $(VENV)/.tools ## the kernels' tests under compute-sanitizer; needs a GPU
	for tool in memcheck racecheck; do \
		compute-sanitizer --error-exitcode 1 --kernel-regex kns=gnnsys --tool $$tool $(CUDA_PYTEST) || exit 1; done
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --tool initcheck $(CUDA_PYTEST)

sanitize-selftest: $(VENV)/.built $(VENV)/.tools ## mistakes made on purpose, each of which must be found
	$(BIN)/python csrc/sanitize/run.py address --selftest
	$(BIN)/python csrc/sanitize/run.py thread --selftest

clean:
	rm -rf $(VENV) build dist *.egg-info gnnsys/*.so

$(VENV)/.packages: requirements/base.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements/base.txt
	touch $@

$(VENV)/.built: $(VENV)/.packages $(SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/.tools: $(VENV)/.packages requirements/test.txt
	$(BIN)/python -m pip install --quiet --requirement requirements/test.txt
	touch $@
