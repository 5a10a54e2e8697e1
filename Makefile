# Every target runs in .venv, which the first one to need it makes (scripts/setup.sh).
# `make test PY=python3` runs in an environment that already has the dependencies.

PY := .venv/bin/python

ifeq ($(PY),.venv/bin/python)
RUN := .venv/.run-ready
DEV := .venv/.dev-ready
endif

PARTS := test-aot test-e2e test-engine test-serve test-teach test-kernels test-real  # the longest first
# So many parts at a time. Half of what test-serve does is waiting, so there is one more than processors.
JOBS := $(shell expr $$(nproc 2>/dev/null || echo 1) + 1)
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
TOGETHER := $(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) $(SYNC)
# The fifth of the rest that `make test-fifth` runs: CI takes it from HEAD, so that every test runs every few landings.
FIFTH := 0
# What pytest is told of which tests to run (tests/support/selection.py): nothing is all.
CHOICE :=
# The net below each test's own limits (tests/support/waiting.py): one that hangs fails after 20 minutes, and the rest runs.
HANGS := --timeout=1200
.PHONY: help demo test test-all test-fifth setup gpu-test bench docs format clean chromium lint types $(PARTS) test-newest
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUN) ## generate text with the model inside the package
	@echo
	$(PY) -m tritonllm generate --prompt "There was a fox named" --max-tokens 500
	@echo
	$(PY) -m tritonllm generate --chat --prompt "What is 47 + 66?"
	@echo
	$(PY) examples/generate.py
	@echo
	@echo "Next: .venv/bin/tritonllm generate --help, examples/, README.md"

test: ## what a change must pass, in 15 minutes of two cores, no GPU needed: the parts below, one process each
	@echo "$(JOBS) parts at a time (JOBS=1: one after the other); what a part prints comes when it has ended"
	@$(TOGETHER) CHOICE=--quick types $(PARTS) lint

test-fifth: ## a fifth of what `make test` leaves out (FIFTH=0 to 4)
	@echo "fifth $(FIFTH) of what make test leaves out"
	@$(TOGETHER) CHOICE=--fifth=$(FIFTH) $(if $(filter 0,$(FIFTH)),test-newest) $(PARTS)

test-all: ## all tests that need no GPU: an hour of two cores
	@$(TOGETHER) types test-newest $(PARTS) lint

lint: $(DEV) ## ruff: rules and formatting
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(DEV) ## mypy
	$(PY) -m mypy

test-kernels: $(DEV) ## every kernel against its reference, in Triton's interpreter
	TRITON_INTERPRET=1 $(PY) -m pytest $(HANGS) $(CHOICE) tests/kernels

test-e2e: $(DEV) ## the engine as users have it, in one process and in several, and the command line, on the CPU path
	$(PY) -m pytest $(HANGS) $(CHOICE) tests/e2e

SERVED := tests/serve tests/teach tests/route  # what stands on the engine
TAUGHT := $(filter-out tests/serve,$(SERVED))
test-engine: $(DEV) ## models, the engine's parts, documents and all other tests
	$(PY) -m pytest $(HANGS) $(CHOICE) $(addprefix --ignore=,tests/real tests/e2e $(SERVED))

test-serve: $(DEV) ## the server
	$(PY) -m pytest $(HANGS) $(CHOICE) tests/serve

test-teach: $(DEV) ## the teaching modes and the router
	$(PY) -m pytest $(HANGS) $(CHOICE) $(TAUGHT)

chromium: ## bring a browser for the tests of the status page, if this machine has none (Debian, as root)
	scripts/chromium.sh

test-real: $(DEV) ## a published model against transformers (`make gpu-test` does it on a GPU)
	$(PY) -m pytest $(HANGS) $(CHOICE) tests/real

test-aot: $(DEV) ## every kernel compiled for sm_90, and in `make test-all` for sm_80, sm_100 and gfx942
	TRITONLLM_CPU_BACKEND=compile $(PY) -m pytest $(HANGS) $(CHOICE) tests/aot

NEWEST := .venv-newest
ifeq ($(PY),.venv/bin/python)
NEWEST_READY := $(NEWEST)/.dev-ready
NEWEST_PY := $(NEWEST)/bin/python
else
NEWEST_PY := $(PY)
endif
# A sample: each kind of kernel compiled for Hopper, where the releases differ most, and one of each wing interpreted.
SAMPLE := elementwise/test_norm.py attention/test_merge.py moe/test_direct.py sampling/test_truncation.py
# Whether each kernel compiles, not what its machine code is like: test-aot looks at that. (One of those others took more
# than five minutes in Triton 3.9's ptxas.) So each with one activation: another is the same kernel with other terms.
EACH_KERNEL := ((compile and (90 or hopper)) or test_hopper) and not (gelu or options)
test-newest: $(NEWEST_READY) ## with the newest Triton: every kernel compiled for sm_90, a sample interpreted
	$(NEWEST_PY) -m pytest $(HANGS) tests/engine/test_releases.py tests/engine/test_compilation.py tests/engine/test_precompile.py
	TRITON_INTERPRET=1 $(NEWEST_PY) -m pytest $(HANGS) $(addprefix tests/kernels/,$(SAMPLE))
	TRITONLLM_CPU_BACKEND=compile $(NEWEST_PY) -m pytest $(HANGS) tests/aot -k "$(EACH_KERNEL)"

# The same on every machine: these run without a GPU.
test-kernels test-e2e test-engine test-serve test-teach test-aot test-newest test-real: export CUDA_VISIBLE_DEVICES =
# On the CPU a second thread costs more than it brings to tensors as small as these: on a busy machine, 20 times more.
demo test-kernels test-e2e test-engine test-serve test-teach test-aot test-newest test-real: export OMP_NUM_THREADS = 1
# Tests start hundreds of processes; where bytecode is not written, each compiles the package anew, 0.35 s.
test-kernels test-e2e test-engine test-serve test-teach test-aot test-newest test-real: export PYTHONDONTWRITEBYTECODE =

gpu-test: $(DEV) ## the tests that need an NVIDIA GPU: kernels at real shapes, parity of models
	$(PY) -m pytest -m gpu

RESULTS := bench/results
bench: $(DEV) ## measure kernels, attention and engine on an NVIDIA GPU: bench/results/, and plots in docs/img/
	$(PY) -m bench.attention --out $(RESULTS)/attention.json
	$(PY) -m bench.plot $(RESULTS)/attention.json -o docs/img/attention.svg
	$(PY) -m bench.kernels --out $(RESULTS)/kernels.json
	$(PY) -m bench.plot $(RESULTS)/kernels.json --only K3,K4,K5,K6,K7 -o docs/img/kernels.svg
	$(PY) -m bench.engine --out $(RESULTS)/engine.json
	$(PY) -m bench.plot $(RESULTS)/engine.json -o docs/img/engine.svg
	$(PY) -m bench.timeline --out $(RESULTS)/timeline.json
	$(PY) -m bench.plot $(RESULTS)/timeline.json -o docs/img/timeline.svg

docs: $(DEV) ## the pages of docs/ as a site, in site/
	$(PY) -m mkdocs build --strict

setup: $(DEV) ## only make .venv, with the development tools

format: $(DEV) ## rewrite the sources as `make lint` wants them
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean: ## remove .venv and everything else that these targets make
	rm -rf .venv .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEV): pyproject.toml constraints-cpu.txt scripts/setup.sh
	scripts/setup.sh .venv dev,serve,real
	@touch .venv/.run-ready $@

$(NEWEST_READY): pyproject.toml constraints-newest.txt scripts/setup.sh
	CONSTRAINTS=constraints-newest.txt scripts/setup.sh $(NEWEST) dev
	@touch $@

$(RUN): pyproject.toml constraints-cpu.txt scripts/setup.sh
	scripts/setup.sh .venv
	@touch $@
