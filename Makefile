# Two commands matter: `make demo` shows it, `make test` proves it. Both set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(VENV)-lock/bin/uv
# One has Spark to itself; acceptance tests, which the others begin with, wait for much of their time.
TEST_PROCESSES ?= 3

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
	@$(BIN)/python tests/support/class_archives.py
	@$(BIN)/python -m compileall -q outbox relay spark_jobs
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder $(ARGS)

chaos: $(VENV)/.installed  ## everything killed, halted and cut off at random: 40 runs of a minute, to docs/chaos.md
	@$(BIN)/python tests/chaos $(ARGS)

peers: $(VENV)/.installed  ## a real Debezium beside our relay and in its place; fetches 20 MB of jars at first
	$(BIN)/python -m pytest tests/peers $(ARGS)

# About two hours, on a machine that does nothing else; ARGS="--quick" to see in minutes that it works.
bench: $(VENV)/.installed  ## the relay beside Debezium and a bare loop, to build/bench.html; a consumer beside JDBC append
	@mkdir -p build
	$(BIN)/python benchmarks/relay.py --json build/bench.json --html build/bench.html $(ARGS)
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
