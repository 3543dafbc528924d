# The whole tool chain lives in .venv; the stamps in it say which pinned requirements are installed.

PYTHON ?= python3.11
# Processes that run tests: two more than the cores of a small machine, as many tests wait more than they compute.
JOBS ?= 4
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
RUN := $(VENV)/.run-installed
DEV := $(VENV)/.dev-installed
ANALYTICS := $(VENV)/.analytics-installed
OLDEST := $(VENV)/oldest
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links

.PHONY: help venv check lint format-check mypy pyright imports test soak exhaustive image oldest conformance bench demo demo-brokers demo-emergency report java \
	format lock clean

help:
	@echo "make demo         what Dynamoth does, live, on embedded Redis servers"
	@echo "make demo-brokers end users on edge brokers that are drained and killed"
	@echo "make demo-emergency  emergency reports for users, computed by Spark that is killed, audited (USERS= MINUTES=)"
	@echo "make report       records a demo, and explains it with Spark (needs Java 17)"
	@echo "make check        linters, type checkers and import contracts"
	@echo "make test         all tests"
	@echo "make soak         a game on real processes that are killed at random, under audit (SECONDS=600 SEED=)"
	@echo "make exhaustive   far more of what tests draw at random; takes an hour"
	@echo "make image        what the Dockerfile installs, without Docker"
	@echo "make oldest       the client's tests that depend on redis-py, with the oldest supported one"
	@echo "make conformance  redis-py's own publish/subscribe tests, against this client"
	@echo "make bench        benchmarks against real Redis servers"
	@echo "make venv         .venv with everything for development"
	@echo "make format       format and fix what the linter can fix"
	@echo "make lock         pin the newest versions of all requirements (UPGRADE= keeps the pins that still fit)"
	@echo "make clean        remove .venv and caches"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What `dynamoth` needs to run, and Dynamoth itself, editable.
$(RUN): requirements/run.txt pyproject.toml | $(BIN)/python
	$(PIP) --requirement requirements/run.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# What tests and checks need, on top.
$(DEV): requirements/dev.txt $(RUN)
	$(PIP) --requirement requirements/dev.txt
	@touch $@

# What `make report` needs, on top of what `make demo` has.
$(ANALYTICS): requirements/analytics.txt $(RUN) | java
	$(PIP) --requirement requirements/analytics.txt
	@touch $@

# The oldest supported redis-py, to be found before the one of the environment.
$(OLDEST)/.installed: requirements/oldest.txt $(DEV)
	rm -rf $(OLDEST)
	$(PIP) --no-deps --target $(OLDEST) --requirement requirements/oldest.txt
	@touch $@

venv: $(DEV)

check: lint format-check mypy pyright imports

lint: $(DEV)
	$(BIN)/ruff check

format-check: $(DEV)
	$(BIN)/ruff format --check

mypy: $(DEV)
	$(BIN)/mypy

pyright: $(DEV)
	$(BIN)/basedpyright

imports: $(DEV)
	$(BIN)/lint-imports

# Each worker takes tests from the others when it has none left. Tests start hundreds of processes, which find our modules
# compiled, also where the environment says that Python keeps none (containers often do).
PARALLEL := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=worksteal
test: $(DEV)
	$(PARALLEL) --durations=10

# RGame on real processes while servers, agents, balancers and clients are killed, hang and come back, under audit.
SECONDS ?= 600
soak: $(DEV)
	$(BIN)/python -m bench.churn --seconds $(SECONDS) --clients 60 --players 60 --rivals 1 --moves-at-once 2 \
		--flood-per-s 100000 $(SEED:%=--seed %) --faults kill hang-wake flood flush server-kill server-hang \
		balancer-kill balancer-hang client-kill

# More of what is drawn at random: seeds of the simulator, examples of properties, minutes of churn.
exhaustive: $(DEV)
	DYNAMOTH_TEST_SEEDS=5000 $(PARALLEL) tests/sim/test_seeds.py tests/sim/test_edge_seeds.py
	$(PARALLEL) --hypothesis-profile=exhaustive tests/agent tests/balancer tests/config tests/core tests/lla tests/machines
	$(BIN)/python -m bench.churn

# Downloads what the image has, so it is no part of the tests.
image: $(DEV)
	$(BIN)/python -m pytest tests/compose/image.py

OLDEST_TESTS := both client sync pubsub async_pubsub sync_pubsub sharded settings options tls drop_in
oldest: $(OLDEST)/.installed
	PYTHONPATH="$(CURDIR)/$(OLDEST)" $(PARALLEL) $(OLDEST_TESTS:%=tests/client/test_%.py)

conformance: $(DEV)
	$(BIN)/python -m tests.conformance

bench: $(DEV)
	$(BIN)/python -m bench

demo: $(RUN)
	$(BIN)/dynamoth demo

demo-brokers: $(DEV)
	$(BIN)/dynamoth demo-brokers

USERS ?= 400
MINUTES ?= 2
demo-emergency: $(ANALYTICS) $(DEV)
	$(BIN)/dynamoth demo-emergency --users $(USERS) --minutes $(MINUTES)

# A minute of the demo with a fixed number of servers: its crowd is the overload, its festival the hot channel. What its audit says is not the report's.
report: $(ANALYTICS)
	rm -rf build/recording build/report
	-$(BIN)/dynamoth demo --servers 3 --seconds 60 --record build/recording
	$(BIN)/dynamoth report build/recording --out build/report

# Known before anything is downloaded, and before a minute is recorded.
java:
	@version=$$("$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p'); \
		test "$${version:-0}" -ge 17 || { echo "Spark needs Java 17 or later: install openjdk-17-jre-headless" \
		"(Debian, Ubuntu), or set JAVA_HOME to one" >&2; exit 2; }

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# dev.txt first: the others take its versions, so that they can be installed on top of each other.
UPGRADE ?= --upgrade
lock: $(DEV)
	$(PIP) uv
	$(COMPILE) $(UPGRADE) pyproject.toml requirements/dev.in --extra dev --output-file requirements/dev.txt
	$(COMPILE) $(UPGRADE) pyproject.toml requirements/run.in --extra cli --extra embedded --extra fast \
		--constraint requirements/dev.txt --output-file requirements/run.txt
	$(COMPILE) $(UPGRADE) pyproject.toml requirements/analytics.in --extra analytics \
		--constraint requirements/dev.txt --output-file requirements/analytics.txt
	$(COMPILE) $(UPGRADE) requirements/conformance.in --no-deps \
		--constraint requirements/dev.txt --output-file requirements/conformance.txt

clean:
	rm -rf $(VENV) dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
