# Needs Python 3.11 or newer and make, nothing else. Each target makes the environment that it runs in when there is
# none, and installs again when pyproject.toml or a constraints file has changed.
#     make test ARGS="-k routing"      passes ARGS on
#     make test PYTHON=python3.12      makes .venv with another Python (after `make clean`)

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv
FLOOR := .venv-floor
RUN := $(VENV)/bin/python
PYTEST := -m pytest -n $(WORKERS) --dist worksteal
# No test may reach the hub; and one thread per worker, or two workers fight for the cores.
SUITE := env HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
# 2026-11-29, mkdocs-material 9.8: a notice about the theme's end of support, May 2027, on every build.
DOCS := env NO_MKDOCS_2_WARNING=1

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DELETE_ON_ERROR:

.PHONY: help tour test test-floor lint format docs bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "make %-12s %s\n", $$1, $$2 }'

tour: $(VENV)/.dev  ## wrap a tiny Gemma 4, read it, edit it, check it
	$(RUN) -m gemloupe tour $(ARGS)

test: $(VENV)/.dev  ## run the tests on the newest supported dependencies
	$(SUITE) GEMLOUPE_CONSTRAINTS=constraints.txt $(RUN) $(PYTEST) $(ARGS)

test-floor: $(FLOOR)/.dev  ## run the tests on the oldest supported dependencies
	$(SUITE) GEMLOUPE_CONSTRAINTS=constraints-floor.txt $(FLOOR)/bin/python $(PYTEST) $(ARGS)

lint: $(VENV)/.dev  ## check the format, the code and the types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(RUN)

format: $(VENV)/.dev  ## write the format, and mend what ruff can
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: $(VENV)/.docs  ## build the documentation into site/
	$(DOCS) $(VENV)/bin/mkdocs build --strict $(ARGS)

bench: $(VENV)/.dev  ## measure against the bare model
	$(RUN) benchmarks/run.py $(ARGS)

clean:  ## remove the environments and all that was built
	rm -rf $(VENV) $(FLOOR) .venv-transformerlens .venv-nnterp site dist build .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call install,VENV,CONSTRAINTS,EXTRA)
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "gemloupe needs Python 3.11 or newer, but $(PYTHON) says: $$($(PYTHON) --version 2>&1 | head -n 1)"; \
	    echo "Name another one, as in: make PYTHON=python3.12 ..."; exit 1; } >&2
	@echo "Installing gemloupe[$(3)] into $(1), with the pins of $(2) (when new: about a minute and 1.6 GB)."
	@$(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install --quiet -c $(2) -e '.[$(3)]'
	@touch $@
endef

$(VENV)/.dev: pyproject.toml constraints.txt constraints-shared.txt
	$(call install,$(VENV),constraints.txt,dev)

$(VENV)/.docs: $(VENV)/.dev
	$(call install,$(VENV),constraints.txt,docs)

$(FLOOR)/.dev: pyproject.toml constraints-floor.txt constraints-shared.txt
	$(call install,$(FLOOR),constraints-floor.txt,dev)
