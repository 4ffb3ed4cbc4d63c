# Two commands matter: `make demo` shows it, `make test` proves it. Both set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(VENV)-lock/bin/uv

.DEFAULT_GOAL := help
.PHONY: help install demo test chaos peers bench lint lock clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

# Again only when the lock or the project's metadata changed.
$(VENV)/.installed-lock: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with PYTHON=…" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@

$(VENV)/.installed: $(VENV)/.installed-lock pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

install: $(VENV)/.installed  ## set up .venv from the lock file

demo: $(VENV)/.installed  ## orders → Postgres → Kafka → Spark, with a kill on the way; pass options as ARGS="…"
	@$(BIN)/outbox demo $(ARGS)

test: $(VENV)/.installed  ## the whole test suite on real services
	@$(BIN)/python tests/class_archives.py
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

chaos: $(VENV)/.installed  ## everything killed and stopped at random, eight runs of CHAOS_SECONDS (180) each
	$(BIN)/python -m pytest tests/chaos -s $(ARGS)

peers: $(VENV)/.installed  ## a real Debezium beside our relay and in its place; fetches 20 MB of jars at first
	$(BIN)/python -m pytest tests/peers $(ARGS)

bench: $(VENV)/.installed  ## a relay beside a bare produce() loop, its latency at 600/s, a consumer beside JDBC append
	$(BIN)/python benchmarks/drain.py $(ARGS)
	$(BIN)/python benchmarks/latency.py
	$(BIN)/python benchmarks/consume.py

lint: $(VENV)/.installed  ## ruff, mypy --strict, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Hashes, but no addresses: the lock works with whatever index the machine is set up for.
lock:  ## resolve the dependencies anew into requirements.lock
	test -x $(UV) || ($(PYTHON) -m venv $(VENV)-lock && $(VENV)-lock/bin/pip install --quiet uv)
	$(UV) pip compile --universal --python-version 3.11 --all-extras --generate-hashes --no-header --no-annotate --quiet \
		$(ARGS) pyproject.toml --output-file requirements.lock

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(VENV)-lock .pytest_cache .mypy_cache .ruff_cache .import_linter_cache dist build
