# Every target creates .venv itself, from requirements.lock with hashes: with uv when it is on PATH,
# else with venv and pip. It is rebuilt when the lock or pyproject.toml changes. PYTHON=python3.13
# uses an environment of its own, .venv-python3.13.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run quick test lint check format bench dashboard pictures dist lock clean

# Without cached bytecode imports take two to three times as long.
unexport PYTHONDONTWRITEBYTECODE

# Recursive on purpose: evaluated only when .venv has to be created. The interpreter is run, not just
# found, because a version manager may have a shim for one that is not installed.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
UV = $(shell command -v uv 2>/dev/null)

VENV := .venv$(if $(filter command environment,$(firstword $(origin PYTHON))),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK_TOOLS := .tools

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP) ## See it work: a live system with its dashboard (ARGS="--port 9000" for another port)
	$(BIN)/fairlane demo --dashboard $(ARGS)

quick: $(STAMP) ## Check types, layers and the model, and run the conformance suite on SQLite: under a minute
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not postgresql and not redis and not postgresql_redis" \
	    tests/model tests/conformance tests/test_layers.py tests/test_public_api.py $(ARGS)

test: $(STAMP) ## Run the tests (ARGS="-k lane" is passed to pytest; ARGS=-n0 runs them in one process)
	$(BIN)/python -m pytest -n 6 --dist worksteal $(ARGS)

lint: $(STAMP) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test ## Check format, lint and types, then run the tests

format: $(STAMP) ## Format the code and apply the lint fixes that are safe
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(STAMP) ## Run the benchmarks (ARGS is passed on)
	$(BIN)/python -m benchmarks $(ARGS)

dashboard: $(STAMP) ## Build the dashboard from dashboard/ into the package
	$(BIN)/python dashboard/node.py npm run build

pictures: $(STAMP) ## Make the pictures of the docs, in docs/pictures
	FAIRLANE_PICTURES=docs/pictures $(BIN)/python -m pytest -q -n 0 tests/dashboard/test_pictures.py

dist: $(STAMP) ## Build the source distribution and the wheel into dist/
	$(BIN)/python -m hatchling build

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

clean: ## Remove environments, caches and build results
	rm -rf .venv .venv-* $(LOCK_TOOLS) dashboard/node_modules dist build .coverage .coverage.* htmlcov .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Built from scratch each time, so that it holds what the lock names and nothing else. The project is
# installed without build isolation: its build backend is in the lock too, with hashes.
$(STAMP): pyproject.toml requirements.lock
	@$(require_python); \
	python=$$($(PYTHON) -c 'import sys; print(sys.executable)'); \
	if [ -n "$(UV)" ]; then \
	    echo "Creating $(VENV) with uv"; \
	    "$(UV)" venv --quiet --clear --python "$$python" $(VENV); \
	    "$(UV)" pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock; \
	    "$(UV)" pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .; \
	else \
	    echo "Creating $(VENV) with venv and pip"; \
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
