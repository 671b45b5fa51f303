VENV := .venv
BIN := $(VENV)/bin
export VTOKEN_EXTRA ?= cpu
STAMP := $(VENV)/.stamp-$(VTOKEN_EXTRA)

# No program here reports its use, and none asks a model hub.
export VLLM_NO_USAGE_STATS := 1
export VLLM_DO_NOT_TRACK := 1
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test check kvpress test-gpu

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: $(STAMP) ## show what eviction gives back: stock vLLM, naive eviction and vToken side by side
	$(BIN)/vtoken demo $(ARGS)

serve: $(STAMP) ## serve the default model with eviction on port 8000 until Ctrl-C
	$(BIN)/vtoken serve --policy streaming_llm --budget 256 --reclaim eager $(ARGS)

test: $(STAMP) ## run every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

check: $(STAMP) ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kvpress: $(STAMP) ## compare what our policies keep with kvpress (an environment of its own)
	scripts/kvpress.sh

test-gpu: $(STAMP) ## run the tests that need a CUDA device (set up with VTOKEN_EXTRA=gpu)
	$(BIN)/python -m pytest -m gpu $(ARGS)

# The one set-up step. It runs again when the dependencies or the script change.
$(STAMP): pyproject.toml scripts/setup.sh
	VTOKEN_VENV=$(VENV) scripts/setup.sh
	@touch $@
