# make demo     stream a text from the demo checkpoint
# make test     run all tests                      make test ARGS="tests/test_layers.py -x"
# make check    formatting, lint, types and all tests
# make fix      format, and repair what lint can repair
# make families run the tests that compare with transformers, and write what they find into README.md's table
# make bench    measure against the peers          make bench ARGS=...
#
# Each one first sets up what it needs in .venv: minutes once, and again only when pyproject.toml or
# constraints.txt change. Needed beforehand: Python 3.11 or later (PYTHON=python3.12 names another one)
# and, for compiled graphs, a C++ compiler.
#
# The build of torch. constraints.txt asks for one release of torch, and pip takes its default build.
#  - Another build of the same release (CPU only, one CUDA, ROCm): give pip the index that pytorch.org
#    names for it, PIP_EXTRA_INDEX_URL=<that index> make demo
#  - A torch of your own: install it in an environment and name that, make demo VENV=/path/to/environment
#    In an environment other than .venv nothing is pinned, so any torch >= 2.11 stays as it is.
#  - The newest releases of everything, in .venv: make demo CONSTRAINTS=

PYTHON = python3
VENV = .venv
CONSTRAINTS = $(if $(filter .venv,$(VENV)),constraints.txt)
ARGS =

# Tests run in this many processes, each on one thread, since a small model leaves a second core idle; with one seed of
# hashes, since all must find the same tests, and some are named by sets.
# JOBS=0 runs them in this one, as a debugger needs it.
JOBS = 2

PROMPT = In the beginning
TOKENS = 64

# A build of torch for a GPU brings its own Triton. Beside a build for the CPU this one serves the tests of the kernels.
TRITON = triton==3.6.0

RUN = $(VENV)/bin/python
PYTEST = -m pytest $(if $(filter-out 0,$(JOBS)),-n $(JOBS))
# A stamp carries a checksum of this folder's path: an installation points at its checkout, so a
# checkout that was moved is set up anew.
STAMP := .fmoe-$(firstword $(shell pwd | cksum))
INSTALL = $(RUN) -m pip install --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
FROM_WHEEL = PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/build/site" $(RUN)

.PHONY: demo test check lint test-wheel fix families bench setup

demo: $(VENV)/$(STAMP)-run
	@$(RUN) -m fmoe generate --model demo '$(subst ','\'',$(PROMPT))' --max-new-tokens $(TOKENS) --temperature 0.8 --top-p 0.95 $(ARGS)

test: $(VENV)/$(STAMP)-dev
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(RUN) $(PYTEST) $(ARGS)

check: lint
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(RUN) $(PYTEST) $(ARGS)

# A type checker looks for fmoe.models below fmoe/ only, so it is shown the tree as it is installed. Without its cache,
# which takes the links for other modules than their targets.
lint: $(VENV)/$(STAMP)-dev
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	rm -rf build/types && mkdir -p build/types/fmoe
	ln -s "$(CURDIR)"/fmoe/* "$(CURDIR)"/models build/types/fmoe
	cd build/types && $(abspath $(RUN)) -m mypy --strict --config-file ../../pyproject.toml --cache-dir /dev/null -p fmoe
	$(RUN) -m pytest -q tests/test_layers.py

# The end-to-end tests once more, on what a wheel holds. PYTHONSAFEPATH keeps this folder off the path, bench with it.
test-wheel: $(VENV)/$(STAMP)-dev
	rm -rf build
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w build/dist .
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target build/site build/dist/fmoe-*.whl
	@$(FROM_WHEEL) -c 'import sys, fmoe; sys.exit("/build/site/" not in fmoe.__file__ and f"tested {fmoe.__file__}")'
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(FROM_WHEEL) $(PYTEST) $(filter-out tests/test_bench.py tests/test_tune_steps.py tests/test_tuning_fp8.py,$(wildcard tests/test_*.py tests/models)) $(ARGS)

fix: $(VENV)/$(STAMP)-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

families: $(VENV)/$(STAMP)-dev
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(RUN) -m tests.models.families_table $(ARGS)

bench: $(VENV)/$(STAMP)-dev
	$(RUN) -m bench $(ARGS)

setup: $(VENV)/$(STAMP)-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "fmoe needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# To run fmoe.
$(VENV)/$(STAMP)-run: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "Setting up $(VENV) ..." >&2
	@rm -f $(VENV)/.fmoe-*
	$(INSTALL) -e . >&2
	@touch $@

# To work on it: what the tests and the checks need, besides.
$(VENV)/$(STAMP)-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "Setting up $(VENV) ..." >&2
	@rm -f $(VENV)/.fmoe-*
	$(INSTALL) -e '.[test,dev]' >&2
	@$(RUN) -c "import triton" 2>/dev/null || $(INSTALL) $(TRITON) >&2 || echo "no Triton: the tests of its kernels will be skipped" >&2
	@touch $(VENV)/$(STAMP)-run $@
