#!/usr/bin/env bash
# Asks the resolver whether the project can be installed: with each extra, with the combinations that the documents name, beside
# the trainers and engines of docs/compatibility.md, and on each Python. Installs nothing.
#
#   scripts/check_resolves.sh          prints a line for each set; ends with 1 where one has no solution
#
# Needs uv (extra dev) and a package index; without an index it says so and ends with 0.
set -uo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
uv=$root/.venv/bin/uv
out=$(mktemp)
trap 'rm -f "$out"' EXIT
failed=0

# solve PYTHON EXTRAS [OTHER REQUIREMENT]
solve() {
    local python=$1 extras=$2 other=${3:-}
    printf '%s\n' "hiddentap${extras:+[$extras]} @ file://$root" ${other:+"$other"} |
        "$uv" pip compile --quiet --system-certs --no-header --no-annotate --python-version "$python" - >"$out" 2>&1
}

# The versions in a solution that a reader looks for, on one line.
versions() {
    grep -E '^(torch|transformers|vllm|sglang|ray|specforge|speculators|nvidia-modelopt|nemo-automodel|trl)==' "$out" | tr '\n' ' '
}

check() {
    local label="Python $1 ${2:+[$2] }${3:-}"
    if solve "$@"; then
        echo "ok      $label: $(versions)"
    else
        echo "failed  $label:"
        cat "$out"
        failed=1
    fi
}

if ! printf 'safetensors\n' | "$uv" pip compile --quiet --system-certs - >"$out" 2>&1; then
    echo "skipped: no package index answers: $(tail -n 1 "$out")"
    exit 0
fi

for extras in "" accelerate datasets images ray report vllm test docs dev; do
    check 3.11 "$extras"
done
for extras in accelerate,datasets,images,report vllm,datasets ray,datasets test,dev; do
    check 3.11 "$extras"
done
for other in specforge==0.2.0 speculators==0.9.0 nvidia-modelopt==0.47.0 nemo-automodel==0.7.0 trl==1.16.0 sglang==0.5.23; do
    check 3.11 "" "$other"
done
for python in 3.12 3.13 3.14; do
    check "$python" ""
    check "$python" vllm
done
exit "$failed"
