#!/usr/bin/env bash
# Compares the tokens that our policies keep with those that kvpress's scores would keep.
# kvpress needs another transformers than vLLM, so it gets an environment of its own: .venv-kvpress.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv-kvpress
KVPRESS=kvpress==0.5.5
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

if [ ! -e "$VENV/.stamp" ]; then
  rm -rf "$VENV"
  VTOKEN_VENV=$VENV VTOKEN_EXTRA=cpu scripts/setup.sh create_venv update_pip install_torch
  "$VENV/bin/python" -m pip install "$KVPRESS" pyarrow
  touch "$VENV/.stamp"
fi

model=$(.venv/bin/python -m worker.model)
.venv/bin/python -m benchmarks.quality.agreement texts "$WORK/texts.json"
HF_HUB_OFFLINE=1 "$VENV/bin/python" scripts/kvpress_scores.py \
  "$model" "$WORK/texts.json" "$WORK/scores.parquet"
.venv/bin/python -m benchmarks.quality.agreement compare "$WORK/scores.parquet"
