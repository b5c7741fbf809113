# Needs python3 (3.11 or newer, with venv), pip and make; the rest is installed into .venv, once.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo reproduce-digits robust bandwidth bench-ray tables test test-again lint soak fuzz clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-16s %s\n", $$1, $$2}'

demo: .venv/core.stamp ## ten clients, most without a label, train together on the digits: about 2 minutes
	$(BIN)/semidfl demo

reproduce-digits: .venv/report.stamp ## the paper's main table on digits, two seeds: results/table-main-digits.md
	$(BIN)/semidfl reproduce table-main --dataset digits --seeds 2

robust: .venv/report.stamp ## what each rule of mixing withstands: the tables of docs/robust.md
	$(BIN)/python docs/measure.py robust

bandwidth: .venv/report.stamp ## bytes against accuracy: the table of docs/bandwidth.md
	$(BIN)/python docs/measure.py bandwidth

bench-ray: .venv/ray.stamp ## 1,000 clients on Ray against the same in memory: a few minutes
	$(BIN)/semidfl bench ray

tables: .venv/report.stamp ## every table and figure of the paper that needs training, on a GPU: hours, can be stopped
	$(BIN)/python benchmarks/tables.py

test: .venv/dev.stamp ## the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-again: .venv/dev.stamp ## those that failed the last time, one after the other
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

lint: .venv/dev.stamp ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: .venv/dev.stamp ## 20 peers, 200 rounds, three of them killed and restarted at random: about 10 minutes, 8 GB
	$(BIN)/python benchmarks/soak.py

fuzz: .venv/dev.stamp ## 100,000 random and mutated messages at the decoder: about 2 minutes
	$(BIN)/python tests/fuzz_codec.py 100000

clean: ## remove .venv and all caches; runs/ stays
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "semidfl needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv .venv

# torch goes first and pinned, so that no later requirement can pull another build of it.
.venv/core.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable .
	@touch $@

.venv/report.stamp: .venv/core.stamp
	$(INSTALL) --editable '.[report]'
	@touch $@

.venv/ray.stamp: .venv/core.stamp
	$(INSTALL) --editable '.[ray]'
	@touch $@

.venv/dev.stamp: .venv/core.stamp
	$(INSTALL) --editable '.[dev,data,report,web,tensorboard,onnx,net,ray]'
	@touch $@
