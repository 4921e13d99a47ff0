#!/usr/bin/env bash
# Runs the main tests with the lowest versions that the project takes (constraints/lowest.txt).
#
#   scripts/test_lowest.sh [PYTEST OPTIONS]     for example: scripts/test_lowest.sh -k generate -x
#
# Makes .venv-lowest (5 GB: that torch has CUDA's libraries with it) where it is missing or was made of other versions.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv-lowest
python=$venv/bin/python
stamp=$venv/.complete
cd "$root"

# What a change of versions can break: hooks, the mixin, outputs, files, a run, generation, reading.
main_tests=(
    tests/hooks/test_tap.py tests/hooks/test_residual.py tests/hooks/test_positions.py
    tests/mixin/test_capture.py tests/mixin/test_setters.py
    tests/outputs
    tests/store/test_dataset.py tests/store/test_shard.py tests/store/test_writer.py
    tests/models/test_decoder.py tests/models/test_head.py tests/models/test_loading.py
    tests/run/test_offline.py
    tests/sampling/test_generate_rows.py tests/sampling/test_generate_greedy.py
    tests/reading
)

wanted=$(cat pyproject.toml constraints/lowest.txt | cksum)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    [[ -x $python ]] || python3.11 -m venv "$venv"
    pip=("$python" -m pip --quiet --disable-pip-version-check)
    # An old pip takes minutes to find the set.
    "${pip[@]}" install --upgrade pip "setuptools>=77"
    "${pip[@]}" install --no-build-isolation --constraint constraints/lowest.txt --editable . pytest pytest-xdist accelerate pillow
    echo "$wanted" >"$stamp"
fi

OMP_NUM_THREADS=1 exec "$python" -m pytest "${main_tests[@]}" -q -m "not slow and not smollm2" --numprocesses 2 --dist worksteal "$@"
