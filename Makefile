# All contributor and CI commands. They need only Python and make: `make demo`, `make test`.
#
#   PYTHON  the interpreter that creates the virtual environment
#   VENV    the folder of the virtual environment
#   TORCH   pip requirement for torch; without a GPU, name a CPU build to avoid the CUDA packages
#   TRL     pip requirement for TRL in test-newest
#   PLACES  pip requirements of test-places, each in its own environment
#   JOBS    test processes; each one loads torch (about 1 GB)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch
TRL ?= trl
PLACES ?= axolotl==0.19.0 ms-swift==4.6.0 llamafactory==0.9.5
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?= --json demo.json

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-oldest test-compile test-newest test-places test-hopper test-quantized test-lm-eval test-gpu mutants style quality types examples notebooks docs site build clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# One stamp per set of extras, so that the demo does not install the test tools.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	@touch $@

$(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[$*]"
	@touch $@

# Not editable: the demo runs from this folder, and setuptools warns about editable installs of packages next to pyproject.toml.
$(VENV)/.bench: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet ".[bench]"
	@touch $@

install: $(VENV)/.dev  ## create the virtual environment for development

# An existing development install must not be replaced by a copy.
demo: $(or $(wildcard $(VENV)/.dev),$(VENV)/.bench)  ## train a small model on this machine without and with CCE; downloads no data
	$(BIN)/python -m hf_cce demo $(DEMO_ARGS)

test: $(VENV)/.dev  ## run all tests except the slow ones (GPU tests are skipped without a GPU)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.dev  ## run the slow tests: kernels compiled for every architecture, packaging, notebooks, launchers
	$(BIN)/python -m pytest -n $(JOBS) -m slow $(PYTEST_ARGS)

# PEFT 0.18 does not keep all tied weights tied, hence -k "not stay".
test-oldest: $(VENV)/.dev  ## test every class with the oldest supported Transformers, and adapters with the oldest PEFT
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/oldest "transformers==5.0.*"
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/oldest "peft==0.18.*"
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -n $(JOBS) tests/modeling/test_all_classes.py tests/modeling/test_patching.py $(PYTEST_ARGS)
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -n $(JOBS) -k "not stay" tests/modeling/test_peft.py tests/modeling/test_peft_late.py $(PYTEST_ARGS)

test-compile:  ## test torch.compile with another version of torch: OTHER="torch==2.9.*"; downloads several GB
	test -e $(VENV)/torch/.done || { $(PYTHON) -m venv $(VENV)/torch && $(VENV)/torch/bin/python -m pip install --quiet "$(OTHER)" \
		"transformers==5.17.*" accelerate peft pytest pytest-timeout hypothesis "numpy<2.3" && touch $(VENV)/torch/.done; }
	PYTHONPATH=$(CURDIR) $(VENV)/torch/bin/python -m pytest -k "(compil or graph) and not around and not adaption" \
		tests/distributed/test_engines.py tests/modeling/test_lazy_tensor.py tests/modeling/test_within.py tests/modeling/test_peft.py $(PYTEST_ARGS)

test-newest: $(VENV)/.dev  ## test TRL's trainers and the callback with the newest TRL and Transformers; TRL="--pre trl" or git+https://…
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/newest transformers
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/newest accelerate peft
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/newest $(TRL)
	PYTHONPATH=$(abspath $(VENV))/newest $(BIN)/python -c "import transformers, trl; print('transformers', transformers.__version__, 'trl', trl.__version__)"
	PYTHONPATH=$(abspath $(VENV))/newest HF_CCE_NEWEST=1 $(BIN)/python -m pytest -n $(JOBS) tests/trainers/test_trl.py tests/trainers/test_trl_sft_data.py tests/trainers/test_callback.py tests/modeling/test_patching.py $(PYTEST_ARGS)

# Each project pins its own PEFT, TRL and Transformers; an environment takes about 4 GB. LLaMA-Factory imports torchaudio: without a
# GPU, set TORCH="torch==2.11.* torchvision torchaudio --index-url https://download.pytorch.org/whl/cpu", otherwise its run is skipped.
test-places:  ## train with the released Axolotl, ms-swift and LLaMA-Factory, with and without hf_cce
	set -e; for place in $(PLACES); do \
		home=$(VENV)/places/$$place; \
		if [ ! -e $$home/.done ]; then \
			$(PYTHON) -m venv $$home; \
			$$home/bin/python -m pip install --quiet $(TORCH); \
			$$home/bin/python -m pip install --quiet $$place . pytest pytest-timeout; \
			touch $$home/.done; \
		fi; \
		$$home/bin/python -m pytest tests/trainers/test_integrations.py -k "axolotl or swift or llama_factory" $(PYTEST_ARGS); \
	done

test-hopper: $(VENV)/.dev  ## check that the Hopper kernels compile correctly with the Triton that runs them; needs no GPU
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/hopper "triton==3.6.*"
	PYTHONPATH=$(abspath $(VENV))/hopper $(BIN)/python -m pytest tests/triton_kernels/test_aot.py -k loops_carry $(PYTEST_ARGS)

# Installed outside the environment, because other packages import bitsandbytes and torchao if they find them.
test-quantized: $(VENV)/.dev  ## test heads quantized by bitsandbytes and torchao
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/quantized "bitsandbytes>=0.50" "torchao>=0.18"
	PYTHONPATH=$(abspath $(VENV))/quantized $(BIN)/python -m pytest -n $(JOBS) tests/modeling/test_quantized_heads.py $(PYTEST_ARGS)

test-lm-eval: $(VENV)/.dev  ## test the model of lm-evaluation-harness with its release
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/lm_eval "lm-eval==0.4.13"
	PYTHONPATH=$(abspath $(VENV))/lm_eval $(BIN)/python -m pytest tests/trainers/test_lm_eval.py $(PYTEST_ARGS)

test-gpu: $(VENV)/.dev  ## run only the tests that need a GPU, sequentially
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

mutants: $(VENV)/.dev  ## break the code in one place at a time and see which tests notice; resumes where it stopped
	$(BIN)/python tests/mutants/run.py; $(BIN)/python -m tests.support.promises

style: $(VENV)/.dev  ## format the code and apply lint fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

quality: $(VENV)/.dev  ## check format and lint, as in CI
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(VENV)/.dev  ## check types, as in CI
	$(BIN)/mypy

examples: $(VENV)/.dev  ## run the Python of README and docs/, and the demo on a tiny model
	$(BIN)/python -m pytest tests/docs/test_docs.py tests/cli/test_demo.py $(PYTEST_ARGS)

notebooks: $(VENV)/.dev  ## run the notebooks and store their outputs
	$(BIN)/python notebooks/execute.py

docs: $(VENV)/.dev  ## write the generated parts of README and docs/: tables, pictures, promises, wrong calls
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m tests.support.wrong_calls
	$(BIN)/python -m tests.support.promises
	$(BIN)/python docs/make_pictures.py

site: $(VENV)/.site  ## build README and docs/ as a site in build/site
	$(BIN)/mkdocs build --strict -f docs/site/mkdocs.yml

build: $(VENV)/.dev  ## build sdist and wheel in dist/
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build

clean:  ## remove the virtual environment, build outputs and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache demo.json
