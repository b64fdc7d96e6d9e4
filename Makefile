# Everything runs from a clean checkout: the first target that needs .venv makes it.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
JOBS ?= 2

# make test TORCH=2.15.0 tests with another torch, in a venv of its own that no constraint pins.
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
PINS := $(if $(TORCH),torch==$(TORCH),-c constraints.txt)
BIN := $(VENV)/bin
# Python compiles the modules that it imports; pip would compile all of torch first.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install -q --no-compile $(PINS)
# A worker that has run out of tests takes some of another worker's.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Processes that the tests start read what the first of them has compiled to bytecode.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo quick test sweeps lint bench-start bench-calls bench-capture bench-buckets bench-schedule bench-stages bench-transforms bench-remat bench-random bench-optimizers bench-backward bench-planner conformance fuzz models gpu-check sizes clean examples bench-sent bench-train bench-checkpoints faults long-runs bench-pipeline bench-experts bench-sequences bench-published bench-reports bench-sweeps bench-growth report-check docs

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# constraints.txt pins torch; PyTorch's own CPU index (PIP_EXTRA_INDEX_URL) makes the download smaller.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "shardfn needs Python 3.11 or newer: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[test,viz]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP) -e '.[bench]'
	@touch $@

venv: $(VENV)/.installed  ## make .venv with everything that the demo and the tests need

demo: venv  ## train on 8 simulated ranks and compare with one device
	$(BIN)/python -m shardfn demo

quick: venv  ## ruff, then a few minutes of tests: no Inductor, no real ranks, a fifth of the laws
	$(BIN)/ruff check .
	SHARDFN_EFFORT=1/5 $(PYTEST) -m quick

test: venv  ## ruff, then the laws, of long ones a sample, every docstring example, and pyright; TORCH=2.15.0 for another torch
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	SHARDFN_EFFORT=1/5 $(PYTEST) -m "not sweep"

sweeps: venv  ## the cases of the large sweeps that make test leaves out, tests/sweeps.txt, and all examples of properties
	$(PYTEST) -m "sweep or property"

lint: venv  ## ruff, and pyright with the pinned torch
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(TORCH),,$(BIN)/pyright)

conformance: venv  ## every operator of torch's database, sharded in every way: ARGS="--ops add sum --resume"
	PYTHONPATH=.:tests:tests/support $(BIN)/python -m conformance $(ARGS)

fuzz: venv  ## random bad arguments of every public function and method, then random programs: SECONDS=600 SEED=7
	PYTHONPATH=.:tests:tests/support $(BIN)/python -m tests.faults.fuzz $(or $(SECONDS),600) $(SEED)

faults: venv  ## inject faults into jobs of real processes, and write docs/logs/faults.md: ARGS="kill save" tries some
	PYTHONPATH=.:tests $(BIN)/python -m tests.faults $(ARGS)

long-runs: venv  ## 10,000 calls, 1,000 functions, 1,000 shapes: memory, threads and files: ARGS="shapes --part 0.1"
	PYTHONPATH=.:tests:tests/support $(BIN)/python -m tests.faults.long_runs $(ARGS)

bench-calls: $(VENV)/.installed-bench  ## the price of one call, next to torch.compile and jax.jit
	$(BIN)/python -m bench.calls

bench-start: $(VENV)/.installed-bench  ## from a process's start to its first result: cold, stored, an artefact; next to torch.compile and JAX
	$(BIN)/python -m bench.start $(RUNS)

bench-capture: venv  ## what capture costs by node, on a ResNet and on Llamas of 24 and 80 layers
	$(BIN)/python -m bench.models.capture

bench-schedule: venv  ## what placing and scheduling programs of up to 100,000 nodes costs
	$(BIN)/python -m bench.schedule

bench-buckets: venv  ## whole training steps on two ranks, next to DDP and FSDP, and over a slow link: ARGS="--only mlp"
	$(BIN)/python -m bench.buckets $(ARGS)

bench-transforms: venv  ## scan over layers of any depth, and gradients of many samples next to torch.func
	$(BIN)/python -m bench.transforms

bench-stages: venv  ## what capture, partition and simulation of the demo's step cost
	$(BIN)/python -m bench.stages

bench-remat: venv  ## what checkpoint saves on GPT blocks, and what it costs
	$(BIN)/python -m bench.remat

bench-random: $(VENV)/.installed-bench  ## 100 million random numbers and a dropout of as many, next to torch and JAX
	$(BIN)/python -m bench.random

bench-optimizers: venv  ## a compiled step of 300 parameters, next to torch's fused AdamW
	$(BIN)/python -m bench.optimizers

bench-backward: venv  ## loss.backward() through a call, next to bucketed_grad and torch.compile
	$(BIN)/python -m bench.backward

models: venv  ## the models that people use, one step each, and docs/models.md: ARGS="Llama T5" tries some
	$(PIP) -e '.[models]'
	$(BIN)/python -m bench.models $(ARGS)

examples: venv  ## the training examples on one device, on simulated ranks and under torchrun: ARGS="resnet resumed"
	$(BIN)/python -m bench.training.examples $(ARGS)

bench-sent: venv  ## what a step of ddp and of zero1 to zero3 sends, next to DDP and FSDP2
	$(BIN)/python -m bench.training.sent

bench-train: venv  ## time and peak memory of a step of the Llama example on two ranks, next to DDP and FSDP2: ARGS="--rounds 5"
	$(BIN)/python -m bench.training.steps $(ARGS)

bench-checkpoints: venv  ## saving and loading of sharded state next to torch.distributed.checkpoint: SIZE=1GB
	$(BIN)/python -m bench.training.checkpoints $(SIZE)

bench-pipeline: venv  ## a GPT in stages on 2 and 4 ranks, next to torch.distributed.pipelining: ARGS="--ranks 2 --only 1f1b"
	$(BIN)/python -m bench.pipeline $(ARGS)

bench-experts: venv  ## a mixture of experts on 2 and 4 ranks, by placement and per rank, next to all_to_all_single by hand: ARGS="--ranks 2"
	$(BIN)/python -m bench.experts $(ARGS)

bench-sequences: venv  ## causal attention on a sequence over 2 and 4 ranks, by placement next to a ring by hand: ARGS="--ranks 2"
	$(BIN)/python -m bench.sequences $(ARGS)

bench-published: venv  ## published runs of large models beside what lowered.time and lowered.memory say: ARGS="--write" writes docs/time-model.md, "--only 70B" tries some
	$(BIN)/python -m bench.published $(ARGS)

bench-planner: venv  ## what planning a Llama of 70 billion parameters at once spares and takes: ARGS="80 --scan" stacks its layers, ARGS=--auto chooses placements
	$(BIN)/python -m bench.planner $(ARGS)

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs  ## the site, build/docs/index.html: every page that has code is run, an error or a dead link fails
	$(BIN)/python -m sphinx -W --keep-going -q -j $(JOBS) -b html docs build/docs

# No .venv: a GPU machine brings its own torch; missing packages may come by PYTHONPATH.
gpu-check:  ## the laws on a GPU, with the python3 and torch that are there
	SHARDFN_ANY_TORCH=1 PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" python3 -m bench.gpu.check

bench-growth: venv  ## the start of a step of 2 to 32 layers, and of 300 parameters' AdamW, next to torch.compile: ARGS="--layers 8 80"
	$(BIN)/python -m bench.growth $(ARGS)

bench-reports: venv  ## what the report of a Llama of 70 billion parameters on 1,024 ranks, and of DeepSeek-V3 on 2,048, takes
	$(BIN)/python -m bench.reports $(ARGS)

bench-sweeps: venv  ## what a sweep of a Llama of 70 billion parameters on three meshes of 1,024 ranks takes: ARGS="--planner global"
	$(BIN)/python -m bench.sweeps $(ARGS)

report-check: venv  ## the page of sf.report in Debian's Chromium, which it installs: widths, light and dark, keyboard
	command -v chromium >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends chromium; } \
		|| echo "chromium is missing, and apt-get cannot install it: tests of the page in a browser are skipped"
	$(PIP) -e '.[pages]'
	! command -v chromium >/dev/null || export SHARDFN_BROWSER=1; $(PYTEST) -n 0 tests/reports

sizes:  ## what the code weighs, room by room: AST nodes, statements, packed bytes
	$(PYTHON) -m tests.support.reading.sizes

clean:  ## remove what was built, .venv included
	rm -rf .venv .venv-* build dist demo-report *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
