# Every target sets up what it needs: a virtual environment of its own, cached until pyproject.toml changes.
# Needs Python 3.11 or newer with pip. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
PIP := $(RUN) -m pip --disable-pip-version-check
BASE := $(VENV)/.base-installed
ENGINE := $(VENV)/.engine-installed
ATHERIS := $(VENV)/.atheris-looked-for
WORLDS ?= benchmarks/worlds

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BASE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "specproxy needs Python 3.11 or newer; set PYTHON=python3.x" >&2; exit 2; }
	@echo "Setting up $(VENV) (about a minute, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --upgrade pip setuptools
	@$(PIP) install --quiet --editable '.[test]'
	@touch $@

# The engine's binding is compiled from source. Without a compiler everything else still works; its tests are
# then skipped, and fail where CI=true.
$(ENGINE): $(BASE)
	@if command -v c++ >/dev/null 2>&1; then \
		echo "Compiling llama-cpp-python for the embedded engine (6 to 12 minutes on two cores, once)"; \
		$(PIP) install --editable '.[embedded]' && touch $@; \
	else \
		echo "No C++ compiler: going on without the embedded engine" >&2; \
	fi

# Atheris has wheels for Linux and some versions of Python; without it hypothesis alone makes inputs.
$(ATHERIS): $(BASE)
	@$(PIP) install --quiet --only-binary atheris --editable '.[fuzz]' \
		|| echo "No wheel of atheris for this Python: going on with hypothesis alone" >&2
	@touch $@

setup: $(BASE) ## Make the virtual environment with all but the embedded engine

demo-embedded: $(ENGINE) ## The demo on the embedded engine (compiles it once)
	@$(RUN) -m benchmarks.demo --engine embedded

demo: $(BASE) ## Proxy, real lanes and a real model: what was routed where, and what it gained
	@$(RUN) -m benchmarks.demo

test: $(BASE) $(ENGINE) ## All tests, engines included
	@$(RUN) -m pytest -m "not docs"

test-unit: $(BASE) ## Tests that need no engine (seconds)
	@$(RUN) -m pytest -m "not engine and not embedded and not browser and not docs"

docs: $(BASE) ## Write the parts of docs/ that come from the code
	@$(RUN) docs/generate.py

docs-test: $(BASE) ## Run every command of docs/ and README, and count them
	@$(RUN) -m tests.docs

lint: $(BASE) ## Style, imports and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

audit: $(BASE) ## Known vulnerabilities of what is installed (asks the advisory service of PyPI)
	@$(RUN) .ci/audit

format: $(BASE) ## Let ruff fix what it can
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

bench-proxy: $(BASE) ## Time that the proxy adds to a call and to a stream
	@$(RUN) -m benchmarks.bench_proxy

chaos: $(BASE) ## Faults against the proxy: upstreams, clients, signals, disks (2 minutes)
	@$(RUN) -m benchmarks.chaos

bench-load: $(BASE) ## 500 streams at once: delay between events, CPU, memory, clients that do not read
	@$(RUN) -m benchmarks.bench_load

soak: $(BASE) ## Mixed traffic on real lanes that are killed at random (MINUTES=30)
	@$(RUN) -m benchmarks.soak --minutes $(or $(MINUTES),30)

fuzz: $(ATHERIS) ## Fuzz every parser with hypothesis and atheris (SECONDS=60, SEED=number, JOBS=1)
	@$(RUN) -m benchmarks.fuzz --seconds $(or $(SECONDS),60) --jobs $(or $(JOBS),1) $(if $(SEED),--seed $(SEED))

bench-classify: $(BASE) ## Accuracy of the classifier, and what its mistakes cost
	@$(RUN) -m benchmarks.bench_classify

bench-learner: $(BASE) ## Simulated traffic: the policy beside its baselines
	@$(RUN) -m benchmarks.bench_learner --worlds $(WORLDS)

bench-routing: $(BASE) ## What routing gains on real lanes (about 25 minutes)
	@$(RUN) -m benchmarks.bench_routing

bench-engine: $(ENGINE) ## The embedded engine against llama-server, over HTTP
	@$(RUN) -m benchmarks.bench_engine

bench-auto: $(ENGINE) ## The engine's auto against every fixed strategy and length
	@$(RUN) -m benchmarks.bench_auto

bench-verify: $(BASE) ## What verify finds on a real model, and how often it is wrong (half an hour or more)
	@$(RUN) -m benchmarks.bench_verify

conformance: $(BASE) ## The same requests directly and through the proxy, compared byte for byte (3 minutes)
	@$(RUN) -m benchmarks.conformance

bench-page: $(BASE) ## The page: size, first paint with 10,000 decisions stored, cost of keeping it live
	@$(RUN) -m benchmarks.bench_page

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
