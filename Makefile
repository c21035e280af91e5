# make demo    set up and get a real answer from a throw-away daemon
# make lint    style, types, import directions
# make test    everything a contributor must pass; .ci/run calls it
# make test-long, make bench, make eval, make clean
#
# PYTHON=...   another interpreter, 3.11 or later
# EXTRA=cuda   MLX for NVIDIA, or EXTRA= for the processor, where the choice below is wrong

# Written for make 3.81 as well, which is what Apple ships: it gives a recipe no options of the shell, so a line
# with a pipe sets pipefail itself.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first interpreter on the path that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$p"; exit; fi; done)

# MLX's CUDA build needs a driver for CUDA 13. Markers in pyproject.toml choose every other build.
EXTRA ?= $(shell if nvidia-smi 2>/dev/null | grep -qE 'CUDA[^|]*Version: *(1[3-9]|[2-9][0-9])'; then echo cuda; fi)

# The tests start Python some hundred times. Where the environment forbids it to keep what it has compiled, every
# start compiles all modules again: a third of the work of the tests of live daemons.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Stamps carry the extra in their names: choosing another one installs it.
RUN := .venv/.run-$(EXTRA)
DEV := .venv/.dev-$(EXTRA)

# pip names every requirement three times; the large downloads are what one waits for. It would compile all
# modules of all packages; what is imported is a small part, and Python keeps that compiled by itself.
PIP := set -o pipefail; $(BIN)/python -m pip install --no-input --no-compile --disable-pip-version-check \
	--progress-bar off
BRIEF := awk '/(Downloading|Using cached) .*\([0-9.]+ (MB|GB)\)/ { n = split($$(NF-2), dirs, "/"); split(dirs[n], file, "-"); \
	print "  " file[1] " " file[2] " " $$(NF-1) " " $$NF; fflush() } \
	/^Installing collected/ { print "  installing"; fflush() }'

# The environment alone, for scripts.
.PHONY: env
env: $(DEV)

.PHONY: help demo lint test test-long bench eval clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

.venv/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "fleetd needs Python 3.11 or later: install it, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) fleetd/process/supported.py
	@echo "creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "this Python cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PIP) --quiet --upgrade pip

$(RUN): pyproject.toml | .venv/bin/python
	@echo "installing fleetd$(EXTRA:%= for %) into .venv (some 400 MB the first time)"
	@$(PIP) -e '.$(EXTRA:%=[%])' | $(BRIEF)
	@touch $@

$(DEV): pyproject.toml | .venv/bin/python
	@echo "installing fleetd$(EXTRA:%= for %) and the tools to develop it into .venv (some 600 MB the first time)"
	@$(PIP) -e '.[dev$(EXTRA:%=,%)]' | $(BRIEF)
	@touch $@ $(RUN)

demo: $(RUN)
	@$(BIN)/python demo/run.py

lint: $(DEV)
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Five parts of about the same work, each in a process of its own, because tests of live daemons often wait.
# What fails in lint ends all. A part that takes longer than TEST_S seconds is ended, and says where it was.
LIVE = tests/live
REQUESTS = tests/requests
ENGINE_A = $(wildcard tests/engine/test_[a-r]*.py)
ENGINE_B = $(wildcard tests/engine/test_[s-z]*.py) $(NODES)
NODES = tests/p2p tests/models
PYTEST = $(BIN)/python -m pytest -q -p no:cacheprovider
TEST_S = 3600
test: $(DEV)
	@trap 'kill $$live $$requests $$a $$b $$rest $$watch 2>/dev/null || true' EXIT; \
	$(PYTEST) $(LIVE) > .live-tests.log 2>&1 & live=$$!; \
	$(PYTEST) $(REQUESTS) > .requests-tests.log 2>&1 & requests=$$!; \
	$(PYTEST) $(ENGINE_A) > .engine-a-tests.log 2>&1 & a=$$!; \
	$(PYTEST) $(ENGINE_B) > .engine-b-tests.log 2>&1 & b=$$!; \
	$(MAKE) --no-print-directory lint || exit 1; \
	$(PYTEST) $(patsubst %,--ignore=%,$(LIVE) $(REQUESTS) $(NODES) tests/engine) & rest=$$!; \
	{ sleep $(TEST_S) & trap "kill $$!" TERM; wait $$! && kill -ABRT $$live $$requests $$a $$b $$rest; } \
		> /dev/null 2>&1 & watch=$$!; \
	failed=0; wait $$rest || failed=1; \
	for part in "$$a engine-a" "$$b engine-b" "$$requests requests" "$$live live"; do \
		set -- $$part; wait $$1 || failed=1; \
		echo "tests of part $$2:"; cat .$$2-tests.log; rm .$$2-tests.log; \
	done; \
	exit $$failed

# More generated cases, and what runs for minutes on purpose.
test-long: $(DEV)
	@$(PIP) -e '.[dev,long$(EXTRA:%=,%)]' | $(BRIEF)
	FLEETD_API_CASES=4000 $(BIN)/python -m pytest -m 'long or hypothesis' --hypothesis-profile long --timeout 1800

bench: $(DEV)
	@$(PIP) -e '.[dev,bench$(EXTRA:%=,%)]' | $(BRIEF)
	$(BIN)/python -m bench

# What smart prefill costs in quality: hours on two cores; `python -m eval --share 0.2` asks a fifth as much.
eval: $(DEV)
	$(BIN)/python -m eval

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
