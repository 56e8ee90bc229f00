# make quickstart [STEPS=20]   environment, then training, evaluation and report
# make test                    the whole suite

PYTHON := .venv/bin/python
STEPS :=
RUNS := runs/quickstart$(if $(STEPS),-$(STEPS))
SHORT := $(if $(STEPS),--param=STEPS=$(STEPS))
LAUNCH := $(PYTHON) -m experiments.launch $(SHORT)
EVALUATE := $(PYTHON) -m experiments.evaluate

.PHONY: help quickstart test lint
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z.]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z.]+):.*## /  make \1\t/' | expand -t 22

.venv: requirements.txt pyproject.toml ## the environment only: Python 3.12 and the pinned packages
	@if python3.12 -c 'import ensurepip' 2>/dev/null; then python3.12 -m venv .venv; \
	elif command -v uv >/dev/null; then uv venv --python 3.12 --seed --allow-existing .venv; \
	else echo 'error: no python3.12 (with venv) and no uv found: install Python 3.12, for example' \
	  'with "apt-get install python3.12-venv", "pyenv install 3.12" or "pip install uv"' >&2; exit 2; fi
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch .venv

quickstart: .venv ## train and evaluate on text and on recall, make the page (STEPS=20: short)
	$(LAUNCH) --gin=quickstart.gin --run_dir=$(RUNS)/text
	$(EVALUATE) --run_dir=$(RUNS)/text --task=ppl --seq_len=4096
	$(LAUNCH) --gin=quickstart.gin --param="include 'method/swa.gin'" --run_dir=$(RUNS)/text_swa
	$(EVALUATE) --run_dir=$(RUNS)/text_swa --task=ppl --seq_len=4096
	$(LAUNCH) --gin=recall.gin --run_dir=$(RUNS)/recall
	$(EVALUATE) --run_dir=$(RUNS)/recall --task=recall
	$(EVALUATE) --run_dir=$(RUNS)/recall --task=needle --by=prefill --distances=64,256,1024,4096,16384
	$(LAUNCH) --gin=recall_swa.gin --run_dir=$(RUNS)/recall_swa
	$(EVALUATE) --run_dir=$(RUNS)/recall_swa --task=recall
	@$(PYTHON) -m experiments.report --output=$(RUNS) --run_dir=$(RUNS)/text \
	  --run_dir=$(RUNS)/text_swa --run_dir=$(RUNS)/recall_swa --run_dir=$(RUNS)/recall \
	  --next='the page: open $(RUNS)/index.html' \
	  --next='your own text: .venv/bin/python -m experiments.launch --gin=text.gin --param="TEXT='"'FOLDER'"'"' \
	  --next='the same at another length: $(EVALUATE) --run_dir=$(RUNS)/text --task=ppl --seq_len=2048' \
	  --next='what a run costs before it starts: $(LAUNCH) --gin=quickstart.gin --dry_run' \
	  --next='curves: metrics.jsonl and tensorboard/ in every run directory'

# JAX's CUDA compiler, which tests the Hopper kernel without a GPU. In a folder outside the packages:
# among them it would warn of the missing GPU at every import.
.venv/hopper: | .venv
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
	  jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2
	@touch $@

# lm-evaluation-harness (36 packages, 130 MB), which the quickstart does not need.
.venv/harness: requirements-harness.txt | .venv
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

test: .venv .venv/hopper .venv/harness ## the whole test suite, on two workers
	$(PYTHON) -m pytest -n 2 --dist=worksteal

lint: .venv ## ruff and pyright
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright
