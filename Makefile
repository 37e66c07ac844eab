# Every target makes .venv itself, from requirements.lock with hashes: with uv when it is on PATH,
# else with venv and pip. A changed lock or pyproject.toml makes it anew.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test check format bench lock clean

# Without cached bytecode imports take two to three times as long.
unexport PYTHONDONTWRITEBYTECODE

# Recursive on purpose: looked up only when .venv has to be made. Run, not just found, because a
# version manager may have a shim for an interpreter that is not installed.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
UV = $(shell command -v uv 2>/dev/null)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK_TOOLS := .tools

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP) ## See it work: a live demo with real workers (ARGS="--once" plays it once)
	$(BIN)/fairlane demo $(ARGS)

test: $(STAMP) ## Run the tests (ARGS="-k lane" is passed to pytest; ARGS=-n0 runs them in one process)
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

check: $(STAMP) ## Check format, lint and types, then run the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: $(STAMP) ## Format the code and apply the lint fixes that are safe
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(STAMP) ## Run the benchmarks (ARGS is passed on)
	$(BIN)/python -m benchmarks $(ARGS)

lock: ## Resolve pyproject.toml into requirements.lock (ARGS="--upgrade" for newer versions)
	@$(require_python); \
	uv="$(UV)"; \
	if [ -z "$$uv" ]; then \
	    echo "uv is not on PATH: installing it into $(LOCK_TOOLS)"; \
	    $(PYTHON) -m venv --clear $(LOCK_TOOLS); \
	    $(LOCK_TOOLS)/bin/python -m pip install -qq --disable-pip-version-check uv; \
	    uv=$(LOCK_TOOLS)/bin/uv; \
	fi; \
	"$$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	    --group dev --group bench pyproject.toml --output-file requirements.lock $(ARGS)

clean: ## Remove .venv, caches and build results
	rm -rf $(VENV) $(LOCK_TOOLS) dist build .coverage .coverage.* htmlcov .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made from nothing each time, so that it holds what the lock names and no more. The project goes
# in without build isolation: its build backend is in the lock too, and so has hashes.
$(STAMP): pyproject.toml requirements.lock
	@$(require_python); \
	python=$$($(PYTHON) -c 'import sys; print(sys.executable)'); \
	if [ -n "$(UV)" ]; then \
	    echo "Making $(VENV) with uv"; \
	    "$(UV)" venv --quiet --clear --python "$$python" $(VENV); \
	    "$(UV)" pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock; \
	    "$(UV)" pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .; \
	else \
	    echo "Making $(VENV) with venv and pip"; \
	    "$$python" -m venv --clear $(VENV); \
	    $(BIN)/python -m pip install -qq --disable-pip-version-check \
	        --require-hashes --requirement requirements.lock; \
	    $(BIN)/python -m pip install -qq --disable-pip-version-check \
	        --no-deps --no-build-isolation --editable .; \
	fi; \
	touch $@

# Also sets -e, so that the first failing command of a recipe ends it.
require_python = set -e; $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	{ echo "Fairlane needs Python 3.11 or newer; '$(PYTHON)' is older or missing. Name another one: make PYTHON=python3.12" >&2; exit 1; }
