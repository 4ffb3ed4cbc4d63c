# Two commands matter: `make demo` shows it, `make test` proves it. Both set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(VENV)-lock/bin/uv
HELM := $(VENV)-helm/bin/helm
# Two begin with Spark; acceptance tests, which the others begin with, wait for much of their time.
TEST_PROCESSES ?= 5
PYTEST := -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder
FAST := -m pytest -n 2 --dist loadgroup -q tests/spark/test_one_event.py tests/unit tests/integration/spark_jobs/test_sink_contract.py
# The other pysparks that are supported. Each has a lock of one line; what else it needs is in the common one.
OTHERS := $(patsubst tests/pyspark-%.lock,%,$(wildcard tests/pyspark-*.lock))
MATRIX := $(OTHERS:%=$(VENV)-pyspark-%)
# The other versions of Kafka that the sandbox can start.
KAFKAS := $(shell sed -n 's/^\[kafka-\(.*\)\]$$/\1/p' outbox/sandbox/jars.lock)

# pytest keeps what it has compiled of the tests; without, each of its processes compiles all of them in each run.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-lowest test-dist matrix $(OTHERS:%=matrix-%) matrix-kafka \
	$(KAFKAS:%=matrix-kafka-%) spec chaos soak mutants peers bench chart docs docs-reference dist screenshots lint lock audit clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

define environment
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with PYTHON=…" if sys.version_info < (3, 11) else 0)'
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(1)
	@touch $@
endef

# Again only when the lock or the project's metadata changed.
$(VENV)/.installed-lock: requirements.lock
	$(call environment,$<)

$(VENV)-docs/.installed-lock: docs/requirements.lock
	$(call environment,$<)

$(MATRIX:%=%/.installed-lock): $(VENV)-pyspark-%/.installed-lock: requirements.lock tests/pyspark-%.lock
	@mkdir -p $(@D)
	@sed '/^pyspark==/,/[^\\]$$/d' requirements.lock | cat - tests/pyspark-$*.lock > $(@D)/requirements.lock
	$(call environment,$(@D)/requirements.lock)

# The lower bound of each dependency of ours; the newest of what they bring along.
$(VENV)-lowest/.installed-lock: pyproject.toml | $(UV)
	@mkdir -p $(@D)
	$(UV) pip compile --resolution lowest-direct --python-version 3.11 --all-extras --generate-hashes --no-header --no-annotate \
		--quiet --upgrade pyproject.toml --output-file $(@D)/requirements.lock
	$(call environment,$(@D)/requirements.lock)

$(UV):
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.installed $(VENV)-lowest/.installed $(MATRIX:%=%/.installed): %/.installed: %/.installed-lock pyproject.toml
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)-audit/bin/pip-audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit

install: $(VENV)/.installed  ## set up .venv from the lock file

demo: $(VENV)/.installed  ## orders → Postgres → Kafka → Spark, with a kill on the way; pass options as ARGS="…"
	@$(BIN)/python -m examples.demo $(ARGS)

test: $(VENV)/.installed  ## the whole test suite on real services; TEST_SEED=… repeats the random choices of a run
	@$(BIN)/python -m compileall -q outbox relay spark_jobs tests/support
	@# What it compiles is kept: in a clean clone, each process of the run would compile all tests.
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null & $(BIN)/python tests/support/class_archives.py && wait
	$(BIN)/python $(PYTEST) --durations=20 $(ARGS)

matrix: $(OTHERS:%=matrix-%)  ## the consumer's tests with the other pysparks that are supported; docs/reference/versions.md

$(OTHERS:%=matrix-%): matrix-%: $(VENV)-pyspark-%/.installed
	@$(<D)/bin/python tests/support/class_archives.py
	$(<D)/bin/python $(PYTEST) tests/spark tests/acceptance/test_demo.py tests/acceptance/test_quickstart.py \
		$$(grep -rlE --include='*.py' '(from|import) (spark_jobs|pyspark)' tests/unit tests/integration tests/acceptance) $(ARGS)

matrix-kafka: $(KAFKAS:%=matrix-kafka-%)  ## the acceptance tests with each other Kafka that the sandbox can start

$(KAFKAS:%=matrix-kafka-%): export OUTBOX_KAFKA_VERSION = $(@:matrix-kafka-%=%)
$(KAFKAS:%=matrix-kafka-%): $(VENV)/.installed
	@$(BIN)/python tests/support/class_archives.py
	$(BIN)/python $(PYTEST) tests/acceptance $(ARGS)

test-fast: $(VENV)/.installed  ## for the loop while writing: units, the sink's contract, one event end to end
	$(BIN)/python $(FAST) $(ARGS)

test-lowest: $(VENV)-lowest/.installed  ## test-fast with the oldest versions that pyproject.toml allows; needs Python 3.11
	$(VENV)-lowest/bin/python $(FAST) $(ARGS)

test-dist: $(VENV)/.installed  ## each extra of the wheel from the package index into an empty environment, and README's commands there
	$(BIN)/python -m pytest -n 0 tests/release $(ARGS)

spec: $(VENV)/.installed  ## the relay's protocol, by a model checker: docs/explanation/protocol.md; fetches 3 MB at first
	$(BIN)/python tests/support/tlc.py

chaos: $(VENV)/.installed  ## everything killed, halted and cut off at random: 64 runs of a minute with operators, summed up in docs/explanation/chaos.md
	@$(BIN)/python tests/chaos $(ARGS)

soak: $(VENV)/.installed  ## 90 minutes at 500 events a second, a fault each minute: memory, connections, files, rows and WAL stay flat
	@$(BIN)/python tests/chaos soak $(ARGS)

mutants: $(VENV)/.installed  ## guards of the product, each taken out once: the tests must notice; ARGS="NAME …" for some
	@$(BIN)/python tests/mutants $(ARGS)

peers: $(VENV)/.installed  ## a real Debezium beside our relay and in its place; fetches 20 MB of jars at first
	$(BIN)/python -m pytest tests/peers $(ARGS)

# About two hours, on a machine that does nothing else. ARGS="--quick" shows in minutes that it works; ARGS="--list" prints
# what is measured. WHAT=guarantees: what each guarantee costs, for a bare producer and for relays; half an hour.
# WHAT=audit: what `outbox audit` takes, and takes from the relay beside it; half an hour.
bench: $(VENV)/.installed  ## the relay beside Debezium and a bare loop, to build/bench.json; a consumer beside JDBC append
	@mkdir -p build
ifeq ($(WHAT),guarantees)
	$(BIN)/python benchmarks/relay.py --only guarantees costs turns latency drain --ways producer ours --json build/guarantees.json $(ARGS)
else ifeq ($(WHAT),audit)
	$(BIN)/python benchmarks/audit.py $(ARGS)
else
	$(BIN)/python benchmarks/relay.py --json build/bench.json $(ARGS)
	$(BIN)/python benchmarks/consume.py $(filter --list,$(ARGS)) $(if $(filter --quick,$(ARGS)),--events 20000 --rounds 1)
endif

$(HELM):
	GOBIN=$(abspath $(@D)) go install helm.sh/helm/v3/cmd/helm@v3.22.0

# A helm that is built like this takes the cluster for one of Kubernetes 1.20 unless another version is named.
chart: $(HELM)  ## plain manifests from deploy/chart, to deploy/kubernetes; builds helm at first, with Go
	rm -rf build/chart deploy/kubernetes
	mkdir -p deploy/kubernetes
	$(HELM) template outbox deploy/chart --kube-version 1.31.0 --values deploy/kubernetes.values.yaml --output-dir build/chart
	cp build/chart/outbox/templates/*.yaml deploy/kubernetes
	sha256sum $$(find deploy/chart deploy/kubernetes.values.yaml deploy/kubernetes/*.yaml -type f | LC_ALL=C sort) \
		> deploy/kubernetes/SHA256SUMS

docs-reference: $(VENV)/.installed  ## settings, commands, metrics and errors from the code, to docs/reference
	$(BIN)/python docs/reference/generate.py

screenshots: $(VENV)/.installed  ## the page's views as pictures, to docs/images; needs chromium
	@mkdir -p docs/images
	TEST_SCREENSHOTS=docs/images $(BIN)/python -m pytest -n 0 tests/spark/test_page.py

# Pages as they lie in the repository, and the files that they link to.
docs: $(VENV)-docs/.installed-lock docs-reference  ## the documentation as a site, to build/docs/site; warnings are errors
	rm -rf build/docs
	mkdir -p build/docs/pages/spark_jobs
	cp README.md CONTRIBUTING.md SECURITY.md build/docs/pages
	cp spark_jobs/order_totals.py build/docs/pages/spark_jobs
	find examples/recipes examples/jobs \( -name "*.py" -o -name "*.sql" \) -exec cp --parents {} build/docs/pages \;
	cp docs/zensical.toml build/docs
	find docs \( -name "*.md" -o -name "*.yaml" -o -name "*.png" -o -name "*.svg" -o -name "*.tla" -o -name "*.cfg" \) -exec cp --parents {} build/docs/pages \;
	$(VENV)-docs/bin/zensical build --strict --config-file build/docs/zensical.toml

dist: $(VENV)/.installed  ## wheel, sdist and bill of materials of the last commit, to dist; built twice and compared
	$(BIN)/python -m release

lint: $(VENV)/.installed  ## ruff, mypy --strict, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Hashes, but no addresses: the lock works with whatever index the machine is set up for.
lock: $(UV)  ## resolve the dependencies anew: requirements.lock, those of the docs, of the images and of the other pysparks
	$(UV) pip compile --universal --python-version 3.11 --all-extras --generate-hashes --no-header --no-annotate --quiet \
		$(ARGS) pyproject.toml --output-file requirements.lock
	$(UV) pip compile --universal --python-version 3.11 --group docs --generate-hashes --no-header --no-annotate --quiet \
		$(ARGS) --output-file docs/requirements.lock
	for image in relay:relay,web consumer:relay,web,spark,schemas; do $(UV) pip compile --universal --python-version 3.11 \
		$$(echo $${image#*:} | sed -E 's/([^,]+),?/--extra \1 /g') --generate-hashes --no-header --no-annotate --quiet \
		--constraint requirements.lock $(ARGS) pyproject.toml --output-file deploy/$${image%:*}.lock || exit; done
	echo hatchling | $(UV) pip compile - --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--quiet --constraint requirements.lock --output-file deploy/build.lock
	for other in $(OTHERS); do echo "pyspark==$$other.*" | $(UV) pip compile - --no-deps --generate-hashes --no-header \
		--no-annotate --quiet $(ARGS) --output-file tests/pyspark-$$other.lock || exit; done

audit: $(VENV)-audit/bin/pip-audit  ## known vulnerabilities of what the lock files pin; needs an index that lists them
	for lock in requirements.lock docs/requirements.lock deploy/relay.lock deploy/consumer.lock; do \
		$< --strict --disable-pip --require-hashes --requirement $$lock $(ARGS) || exit; done

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(VENV)-lock $(VENV)-audit $(VENV)-helm $(VENV)-lowest $(VENV)-docs $(VENV)-pyspark-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache dist build
