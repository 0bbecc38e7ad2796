# Each target works from a bare clone: it makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m
# Some images turn it on; then each of the suite's hundreds of processes compiles all it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run demo test slow check bench clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

run: $(VENV)/.runs model  ## the main job: two engines behind OpenAI's routes, until Ctrl-C
	$(BIN)/dpkit run dpkit.toml

demo: $(VENV)/.runs model  ## two engines, each a process, answer four prompts
	$(BIN)/dpkit run dpkit.toml --max-tokens 48 --chat \
	  --prompt "What is the capital of France?" \
	  --prompt "Why is the sky blue?" \
	  --prompt "Name three fruits." \
	  --prompt "Write one sentence about the sea."

test: $(VENV)/.installed model  ## the whole fast suite
	$(BIN)/pytest

.PHONY: frontend
frontend: $(VENV)/.installed  ## vLLM's real frontend (61 MB), which some tests drive, into your cache
	$(BIN)/python tests/peers/fetch.py

.PHONY: vllm
vllm: $(VENV)/.installed  ## vLLM's own Python files and what they need (2 GB), which slow tests drive
	$(BIN)/python -m tests.peers.vllm_python

# No faulthandler watchdog: a run of minutes died (CPython 3.11) in the middle of its second dump.
slow: $(VENV)/.peers model  ## soaks, thousands of seeds, comparisons with transformers
	$(BIN)/pytest -m slow --timeout 1800 -o faulthandler_timeout=0

check: $(VENV)/.installed  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed model  ## speed, as ratios within one run; an hour on two busy cores
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

.PHONY: model
model: $(VENV)/.runs  ## the demo model, into your cache
	$(BIN)/dpkit fetch $(MODEL)

# torch is pinned in constraints.txt: left to itself, pip may choose a build of several GB.
$(VENV)/.runs: pyproject.toml constraints.txt
	@echo "installing torch and what serves into $(VENV): once, and it takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[torch,serve]'
	touch $@

$(VENV)/.installed: $(VENV)/.runs
	@echo "installing what the tests and checks need: once, and it takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[torch,dev]'
	touch $@

$(VENV)/.peers: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[torch,dev,peers]'
	touch $@

clean:  ## remove what the targets made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
