# Two commands do it all on a fresh machine with Python 3.11 or newer and make:
#   make demo    sets up, packs the sample chats, verifies and loads them, trains a tiny model
#   make test    sets up, runs the tests
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   := demo
SAMPLE := packing/sample
# Without a folder for its logs torchrun makes a temporary one, which stays.
TWO    := $(BIN)/torchrun --standalone --nproc-per-node 2 --log-dir $(DEMO)/logs
# The pin keeps pip from fetching gigabytes of CUDA libraries; drop it on a machine with a GPU.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints-cpu.txt

# Two ranks on two cores: torch's spinning threads would stand in each other's way.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test lint format bench clean
help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.train: pyproject.toml constraints-cpu.txt
	@echo "setting up $(VENV): one to three minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	$(PIP) --editable '.[train,dev]'
	@touch $@

demo: $(VENV)/.train  ## pack the sample chats, look at them, train a tiny model on them
	@rm -rf $(DEMO)
	$(BIN)/padfree pack $(SAMPLE)/chats.jsonl --tokenizer $(SAMPLE)/tokenizer --out $(DEMO)/shards --capacity 1024 --eval-fraction 0.1
	$(BIN)/padfree verify $(DEMO)/shards
	$(BIN)/padfree inspect $(DEMO)/shards --example 0
	$(BIN)/python benchmarks/first_batch.py $(DEMO)/shards
	$(TWO) -m training benchmarks/configs/demo.toml --set run.steps=40
	$(BIN)/python -m training check $(DEMO)/run --eval-ratio 0.7
	$(TWO) -m training benchmarks/configs/demo.toml --resume
	@echo
	@echo "Next, with your own chats and your own model's tokenizer:"
	@echo "  $(BIN)/padfree pack chats.jsonl --tokenizer Qwen/Qwen3-0.6B --out shards"
	@echo "  $(BIN)/padfree inspect shards"

test: $(VENV)/.dev  ## run the tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/.dev  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev  ## run the benchmarks that need no GPU; results in benchmarks/results
	for script in plan load read encode prepare memory; do $(BIN)/python benchmarks/$$script.py || exit 1; done

clean:  ## remove what make made
	rm -rf $(VENV) .venv-* $(DEMO) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
