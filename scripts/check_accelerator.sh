#!/usr/bin/env bash
# Runs on a machine with one accelerator, without a network, in at most 8 minutes: the tests marked for devices, then the benchmark on
# a random Llama of 1.1 billion parameters and a random mixture of experts of 6.8 billion, both in bfloat16.
#
#   scripts/check_accelerator.sh [--device cuda] [--quick] [--out FOLDER]
#
# Needs a Python with torch, transformers, safetensors, click, rich, jinja2, numpy and pytest, and this checkout: PYTHON=..., python3 by
# default. Leaves FOLDER/*.json with every figure and FOLDER/table.md, the table of docs/benchmarks.md. `--device cpu --quick`
# rehearses it with tiny models in a minute or two; the figures of a rehearsal mean nothing.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-python3}
device=cuda
quick=()
size=full
out=$PWD/accelerator
limit=470
failed=0
while (($#)); do
    case $1 in
    --device) device=$2 && shift 2 ;;
    --quick) quick=(--quick) && size=tiny && limit=3600 && shift ;;
    --out) out=$2 && shift 2 ;;
    *) echo "check_accelerator: unknown option $1" >&2 && exit 2 ;;
    esac
done
mkdir -p "$out"
out=$(cd -- "$out" && pwd -P)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The checkout's folder need not be called hiddentap: a link of that name makes it the package.
ln -s "$root" "$work/hiddentap"
export PYTHONPATH=$work${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
cd "$work"

say() {
    echo "[$((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))] $*" >&2
}

say "device tests"
"$python" -m pytest "$root/tests/device" "$root/tests/outputs/test_host_copy.py" --rootdir "$root/tests" -c "$root/tests/pytest.ini" \
    -p no:cacheprovider -q

# measure KIND NAME SECTION... : one call of the benchmark, its figures in KIND-NAME.json and its table in KIND-NAME.md.
measure() {
    local kind=$1 name=$2 sections=() left=$((limit - SECONDS))
    for section in "${@:3}"; do sections+=(--only "$section"); done
    say "$kind: $name"
    if ! timeout "$((left > 1 ? left : 1))" "$python" "$root/scripts/benchmark.py" --model "$work/$kind" --device "$device" --dtype bfloat16 \
        --folder "$work" "${sections[@]}" --rounds 3 --seconds 3 --others-every 3 "${quick[@]}" --json "$out/$kind-$name.json" \
        >"$out/$kind-$name.md" 2>"$out/$kind-$name.log"; then
        say "$kind: $name did not end well or in time; see $out/$kind-$name.log"
        failed=1
    fi
}

for kind in llama moe; do
    say "$kind: making the model"
    "$python" "$root/scripts/make_random_model.py" "$kind" "$work/$kind" --size "$size" --device "$device" >&2
    measure "$kind" device device generation
done
rm -rf "${work:?}/moe"
measure llama early-stop early-stop
measure llama memory memory
# Last, for it takes longest: other tools' strategies and compiled layers on both data sets.
measure llama speed speed

{
    for file in "$out"/*.md; do
        [[ $file == "$out/table.md" ]] && continue
        printf '## %s\n\n' "$(basename "$file" .md)"
        cat "$file"
        echo
    done
} >"$out/table.md"
say "figures in $out/*.json, the table in $out/table.md"
exit "$failed"
