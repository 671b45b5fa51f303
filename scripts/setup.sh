#!/usr/bin/env bash
# Builds the virtual environment of this project, one step after the other.
#
#   scripts/setup.sh            every step
#   scripts/setup.sh STEP...    these steps only (the tests run them one at a time)
#
# VTOKEN_VENV         folder of the environment; default .venv
# VTOKEN_EXTRA        which build of vLLM: cpu (default) or gpu
# VTOKEN_TORCH_INDEX  index to ask for torch when the configured one does not offer the CPU build
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VTOKEN_VENV:-.venv}
EXTRA=${VTOKEN_EXTRA:-cpu}
TORCH_INDEX=${VTOKEN_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
TORCH=$(sed -n 's/^cpu = .*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
PIP=$(sed -n 's/^  "\(pip>=[^"]*\)".*/\1/p' pyproject.toml)
STEPS=(create_venv update_pip install_torch install_project drop_unusable check_imports)

stop() {
  echo "setup: FAILED: $1" >&2
  exit 1
}

# The two builds of vLLM write the same files, so an environment holds one of them only. The stamp
# is the Makefile's.
create_venv() {
  local other=gpu
  [ "$EXTRA" = cpu ] || other=cpu
  [ ! -e "$VENV/.stamp-$other" ] || stop "$VENV was set up for $other; delete it to set up $EXTRA"
  command -v python3.11 >/dev/null || stop "python3.11 is not on the PATH; install Python 3.11 first"
  python3.11 -m venv "$VENV" || stop "python3.11 could not create $VENV; is its venv module installed?"
}

# Python brings an older one, for which a download that breaks off has a wrong hash and is the end.
update_pip() {
  [ -n "$PIP" ] || stop "pyproject.toml does not say which pip it needs"
  "$VENV/bin/python" -m pip install "$PIP" || stop "the configured index does not give $PIP"
}

# vLLM's CPU build needs the CPU build of torch, which not every index offers: the local version
# "+cpu" cannot be uploaded to the public one.
install_torch() {
  [ "$EXTRA" = cpu ] || return 0
  [ -n "$TORCH" ] || stop "pyproject.toml pins no torch on the line of the cpu extra"
  if "$VENV/bin/python" -m pip install "$TORCH"; then
    echo "setup: $TORCH comes from the configured index"
    return 0
  fi
  echo "setup: the configured index does not give $TORCH, asking $TORCH_INDEX"
  # --no-deps: nothing but torch may come from there. The next step takes what torch needs from
  # the configured index.
  "$VENV/bin/python" -m pip install --no-deps --index-url "$TORCH_INDEX" "$TORCH" ||
    stop "neither the configured index nor $TORCH_INDEX gives $TORCH; see pip's messages above"
  echo "setup: $TORCH comes from $TORCH_INDEX"
}

install_project() {
  "$VENV/bin/python" -m pip install -e ".[$EXTRA,dev]" ||
    stop "pip could not install this project with its extras $EXTRA and dev"
}

# The public builds of these three do not import beside torch's CPU build, and transformers imports
# them as soon as they are there. vLLM runs text models without them.
drop_unusable() {
  [ "$EXTRA" = cpu ] || return 0
  "$VENV/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec ||
    stop "pip could not remove torchvision, torchaudio and torchcodec"
}

# transformers imports lazily: only naming a model class shows that it works.
check_imports() {
  HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 "$VENV/bin/python" -c \
    "from transformers import LlamaForCausalLM; from vllm import LLM" ||
    stop "vllm and transformers do not import in $VENV; delete that folder and run this again"
}

case $EXTRA in cpu | gpu) ;; *) stop "VTOKEN_EXTRA is '$EXTRA'; it must be cpu or gpu" ;; esac
[ $# -gt 0 ] || set -- "${STEPS[@]}"
for step in "$@"; do
  [[ " ${STEPS[*]} " == *" $step "* ]] || stop "no step '$step'; the steps are: ${STEPS[*]}"
  echo "setup: $step"
  "$step"
done
