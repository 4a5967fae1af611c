# make train and make test need nothing but python3: each first makes .venv and installs into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Empty files that say what has been installed; one older than its requirements is made anew.
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

.PHONY: help train test test-all lint clean

help:
	@echo "make train              draw 500 flowers, train on them, show what came out (minutes)"
	@echo "make train DATA=folder  train on your own photos, one sub-folder per class"
	@echo "make test               the tests that take minutes"
	@echo "make test-all           all tests, the slow ones too"
	@echo "make lint               check the style and the types"
	@echo "make clean              remove what these commands made; your own results stay"
	@echo
	@echo 'ARGS="..." goes to the training script or to pytest: make train ARGS="--epochs 20"'
	@echo "PYTHON=python3.12 chooses the Python that .venv is made with"

train: $(READY)
	@scripts/make_train.sh "$${DATA-}" $(ARGS)

test: $(READY_DEV)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(READY_DEV)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY_DEV)
	$(BIN)/ruff check . $(ARGS)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) sample_photos sample_run .pytest_cache .ruff_cache .mypy_cache
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -r {} +

$(READY): requirements.txt
	@scripts/make_venv.sh "$(PYTHON)" $(VENV) requirements.txt
	@touch $@

$(READY_DEV): requirements-dev.txt requirements.txt
	@scripts/make_venv.sh "$(PYTHON)" $(VENV) requirements-dev.txt
	@touch $@
