#!/usr/bin/env bash
# Runs the test suite in the repository's own .venv, which it makes where it is missing; the tests marked slow are left out.
#
#   scripts/test.sh [PYTEST OPTIONS]     for example: scripts/test.sh -k conversations -x
#   scripts/test.sh -m slow              those left out;  -m "" runs all
#
# HIDDENTAP_SKIP_SMOLLM2=1 leaves out the SmolLM2 folder (a 93 MB download, once); the tests that need it are then skipped.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python

"$root/scripts/setup.sh" test
if [[ ${HIDDENTAP_SKIP_SMOLLM2:-} != 1 ]]; then
    "$python" "$root/scripts/smollm2.py" >/dev/null
fi

cd "$root"
# Two workers of one thread each: tiny models gain nothing from threads, and bits depend on their number. A worker takes whole
# stretches of the suite, and from the other's at the end (worksteal): what the tests of a file share is made once, not in both.
OMP_NUM_THREADS=1 exec "$python" -m pytest tests/ -q --numprocesses 2 --dist worksteal -m "not slow" "$@"
