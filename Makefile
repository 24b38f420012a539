# Every target builds what it needs in .venv, from Python 3.11+ and pip alone.

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
SOURCES := $(wildcard torchdeq deq_zoo tests examples benchmarks tools)
# What `make test` needs: an extra of pyproject.toml each.
TESTED := $(foreach extra,dev zoo video export serve transformers reference,.venv/.has-$(extra))

.PHONY: help demo test test-all test-torch test-gpu bench lint docs coverage wheel test-wheel clean
.NOTPARALLEL:  # two pip runs in one environment would trip over each other

help:
	@echo "make demo      train a small equilibrium network, leave demo/index.html"
	@echo "make test      fast tests         make test-all  all tests"
	@echo "make test-torch TORCH=2.6.0       tests of the library with another torch (2.6 to 2.15)"
	@echo "make lint      ruff and mypy      make bench     benchmarks"
	@echo "make docs      build site/        make clean     remove what make made, .venv too"
	@echo "make test-gpu  the tests that use an accelerator, where there is one"
	@echo "make coverage  lines of the library that its tests run, in htmlcov/"
	@echo "make wheel     dist/*.whl         make test-wheel  use it in an empty environment"

# Its tensors are small: a second thread gains little, and on a busy machine it is in the way.
demo: export OMP_NUM_THREADS := 1
demo: .venv/.has-zoo
	$(BIN)/python -m examples.demo

# One thread per worker: two workers already fill two cores.
# oneDNN picks its kernels by what the processor advertises. Some machines advertise AMX without
# enabling it, and there a bfloat16 matmul dies with SIGILL; this ceiling keeps to plain AVX-512.
test test-all test-torch: export OMP_NUM_THREADS := 1
test test-all test-torch: export MKL_NUM_THREADS := 1
test test-all test-torch: export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16

test: $(TESTED)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-all: $(TESTED) .venv/.has-docs .venv/.has-notebooks
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow or not slow"

# On a machine with an accelerator, in an environment whose torch can use it: BIN=path/to/bin.
test-gpu:
	TORCHDEQ_REQUIRE_ACCELERATOR=1 $(BIN)/python -m pytest -q tests/gpu

# The library's own tests (no model of the zoo, no page or example that needs one) with any version
# of torch, in an environment of its own; .venv is neither needed nor touched. Only 2.13.0 is known
# to come as a small CPU build: the others may bring gigabytes. TESTS=tests/grad runs a part.
TESTS ?= tests
test-torch: .venv-torch/$(TORCH)/.ready
	.venv-torch/$(TORCH)/bin/python -m pytest -n 2 -rs -p no:cacheprovider $(TESTS)

.venv-torch//.ready:
	@echo "which torch? make test-torch TORCH=2.6.0"; exit 1

.venv-torch/%/.ready:
	$(PYTHON) -m venv .venv-torch/$*
	.venv-torch/$*/bin/python -m pip install --quiet "torch==$*" hypothesis numpy pytest pytest-xdist scipy
	@touch $@

bench: .venv/.has-bench
	$(BIN)/python -m benchmarks

# The other extras are here for the types they bring to mypy.
lint: $(TESTED) .venv/.has-bench .venv/.has-docs .venv/.has-notebooks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy $(SOURCES)
	$(BIN)/mypy -c "$$($(BIN)/python tests/code_blocks.py README.md)"

docs: .venv/.has-docs
	$(BIN)/python -m tools.site

# Which lines of the library do its own tests run? Slow: every line is watched.
coverage: export OMP_NUM_THREADS := 1
coverage: export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16
coverage: .venv/.has-dev .venv/.has-zoo .venv/.has-video
	$(BIN)/python -m pytest -n 2 --dist loadgroup --cov=torchdeq --cov-report=term --cov-report=html \
		--ignore=tests/zoo --ignore=tests/golden --ignore=tests/contracts/test_families.py

# A wheel under the name that the package index knows; the import names stay torchdeq and deq_zoo.
DISTRIBUTION ?= torchdeq
wheel: | $(BIN)/pip
	rm -rf build/wheel dist && mkdir -p build/wheel
	git archive HEAD | tar -x -C build/wheel
	sed -i.bak -e 's/^name = "torchdeq"/name = "$(DISTRIBUTION)"/' \
		-e 's/"torchdeq\[/"$(DISTRIBUTION)[/g' build/wheel/pyproject.toml
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist build/wheel

# Install the wheel in an empty environment, leave the clone, and use it.
test-wheel:
	rm -rf build/clean && $(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[mdeq]"
	cd build && clean/bin/python ../tools/try_wheel.py

clean:
	rm -rf .venv .venv-torch site .cache demo build dist htmlcov *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing `venv` writes, so its presence means the environment is whole.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or later is needed, this is {v}: make PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/.has-%: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$*]"
	@touch $@
