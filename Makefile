# All targets use the environment .venv, which the first one creates. `make` without a target lists the targets.
PYTHON ?= python3
WORKERS ?= 2
# one: one configuration of each kernel for sm_90a; two: for sm_90a and sm_80; all: for every architecture, and the tests marked
# `thorough`; every: every configuration for every architecture, and the tests marked `every`, which take a quarter of an hour.
ARCHITECTURES ?= two
# Limits on the CPU seconds of all tests of a pass together; empty for no limit.
BUDGET ?=
BUDGET_INTERPRETED ?=
VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# On a machine without a GPU, `make demo` runs the study for a first look in less than a minute.
QUICK := $(if $(shell command -v nvidia-smi || command -v rocm-smi),,--quick)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt --build-constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test quick prose lint types layers docs check format clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.runtime ## run the 040 study at the size that suits this machine (a first look without a GPU); the report goes to reports/
	$(BIN)/onelaunch study run 040-linear-rnn $(QUICK) --out reports/040-linear-rnn/result.json --report-dir reports/040-linear-rnn --force

# Tests start Python a hundred times. Without stored bytecode each start would compile our modules again.
test quick: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.developer ## run the test suite: once with kernels compiled, once with kernels interpreted; durations go to build/
	$(PYTEST) -m "not interpret" --architectures=$(ARCHITECTURES) --durations-table=build/durations.txt \
		$(if $(BUDGET),--cpu-budget=$(BUDGET))
	TRITON_INTERPRET=1 $(PYTEST) -m interpret --architectures=$(ARCHITECTURES) --durations-table=build/durations-interpreted.txt \
		$(if $(BUDGET_INTERPRETED),--cpu-budget=$(BUDGET_INTERPRETED))

quick: $(VENV)/.developer ## run the tests that are not slow, in a few minutes: kernels compiled for sm_90a only, none interpreted
	$(PYTEST) -m "not interpret and not slow" --architectures=one

prose: $(VENV)/.developer ## write the wording that tests check to tests/snapshots/prose.txt, for review (TESTS=... for some tests)
	-$(BIN)/python -m pytest -q --update-prose -m "not interpret" --architectures=one $(TESTS)
	-TRITON_INTERPRET=1 $(BIN)/python -m pytest -q --update-prose -m interpret $(TESTS)
	git diff --stat tests/snapshots/prose.txt

lint: $(VENV)/.developer ## check rules and format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.developer ## check types with pyrefly, for the oldest and the newest Python
	$(BIN)/pyrefly check
	$(BIN)/pyrefly check --python-version 3.14

layers: $(VENV)/.developer ## check imports with import-linter: none from a higher layer, kernel files import only kernel files
	$(BIN)/lint-imports --no-cache --no-logo

docs: $(VENV)/.developer ## build the documentation; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

check: export ONELAUNCH_TEST_CACHE ?= $(CURDIR)/build/compiled
# The tests of pages look at the pages that `docs` has just built, and build none.
check: export ONELAUNCH_TEST_PAGES = $(CURDIR)/docs/_build/html
check: $(VENV)/.developer ## run lint, types, layers, docs and test, with every kernel compiled for every architecture
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types layers docs
	@$(MAKE) --no-print-directory test ARCHITECTURES=all

format: $(VENV)/.developer ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove everything that was built; measured results stay
	rm -rf $(VENV) build dist docs/_build docs/_generated .pytest_cache .ruff_cache .hypothesis

$(VENV)/.pip: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "onelaunch needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt pip
	@touch $@

$(VENV)/.runtime: $(VENV)/.pip pyproject.toml
	$(PIP) --editable '.[workbench,triton]'
	@touch $@

$(VENV)/.developer: $(VENV)/.runtime
	$(PIP) --quiet --editable '.[cuda,decode,serve]' --group test --group lint --group docs
	@touch $@
