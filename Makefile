# Every target builds what it needs in .venv, from Python 3.11+ and pip alone.

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
SOURCES := $(wildcard torchdeq deq_zoo tests examples benchmarks)

.PHONY: help demo test test-all test-torch bench lint docs clean
.NOTPARALLEL:  # two pip runs in one environment would trip over each other

help:
	@echo "make demo      train a small equilibrium network, leave demo/report.html"
	@echo "make test      fast tests         make test-all  all tests"
	@echo "make test-torch TORCH=2.6.0       tests of the library with another torch (2.6 to 2.15)"
	@echo "make lint      ruff and mypy      make bench     benchmarks"
	@echo "make docs      build site/        make clean     remove what make made, .venv too"

# Its tensors are small: a second thread gains little, and on a busy machine it is in the way.
demo: export OMP_NUM_THREADS := 1
demo: .venv/.has-zoo
	$(BIN)/python examples/demo.py

# One thread per worker: two workers already fill two cores.
# oneDNN picks its kernels by what the processor advertises. Some machines advertise AMX without
# enabling it, and there a bfloat16 matmul dies with SIGILL; this ceiling keeps to plain AVX-512.
test test-all test-torch: export OMP_NUM_THREADS := 1
test test-all test-torch: export MKL_NUM_THREADS := 1
test test-all test-torch: export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16

test: .venv/.has-dev .venv/.has-zoo .venv/.has-video
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-all: .venv/.has-dev .venv/.has-zoo .venv/.has-video
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow or not slow"

# The library's own tests (no model of the zoo, no page or example that needs one) with any version
# of torch, in an environment of its own; .venv is neither needed nor touched. Only 2.13.0 is known
# to come as a small CPU build: the others may bring gigabytes. TESTS=tests/grad runs a part.
TESTS ?= tests
NOT_CORE := tests/zoo tests/golden tests/test_examples.py tests/test_docs.py
test-torch: .venv-torch/$(TORCH)/.ready
	.venv-torch/$(TORCH)/bin/python -m pytest -n 2 -rs -p no:cacheprovider $(NOT_CORE:%=--ignore=%) $(TESTS)

.venv-torch//.ready:
	@echo "which torch? make test-torch TORCH=2.6.0"; exit 1

.venv-torch/%/.ready:
	$(PYTHON) -m venv .venv-torch/$*
	.venv-torch/$*/bin/python -m pip install --quiet "torch==$*" hypothesis numpy pytest pytest-xdist scipy
	@touch $@

bench: .venv/.has-bench
	$(BIN)/python -m benchmarks

# The other extras are here for the types they bring to mypy.
lint: .venv/.has-dev .venv/.has-zoo .venv/.has-video .venv/.has-bench
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy $(SOURCES)
	$(BIN)/mypy -c "$$($(BIN)/python tests/code_blocks.py README.md)"

docs: .venv/.has-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-torch site demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing `venv` writes, so its presence means the environment is whole.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or later is needed, this is {v}: make PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/.has-%: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$*]"
	@touch $@
