#!/usr/bin/env bash
# Makes .venv in the repository root and installs the project into it, editable.
#
#   scripts/setup.sh [EXTRAS]      EXTRAS: names from pyproject.toml, comma separated (test, dev, ...); none by default
#
# Says on standard error what it does where there is something to do, which takes minutes the first time. A second call with
# nothing changed says nothing, returns at once and needs no network.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
extras=${1:-}
venv=$root/.venv
python=$venv/bin/python

fail() {
    echo "setup: $*" >&2
    exit 1
}

find_python() {
    local name
    for name in python3.13 python3.12 python3.11 python3; do
        # Asked, not looked up: a version manager leaves commands on the path that only say that they are not there.
        if "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    fail "Python 3.11 or newer with its venv module is needed; tried python3.13, python3.12, python3.11 and python3."
}

say() {
    echo "setup: $*" >&2
}

stamp_text() {
    echo "$root"
    "$python" --version
    cat "$root/pyproject.toml" "$root/constraints/highest.txt" | cksum
}

make_venv() {
    local found
    found=$(find_python)
    say "making .venv with $found"
    log "$found" -m venv --clear "$venv"
}

# Runs a command quietly; where it fails, shows what it said.
log() {
    local output
    output=$(mktemp)
    if ! "$@" >"$output" 2>&1; then
        cat "$output" >&2
        rm -f "$output"
        fail "this failed: $*"
    fi
    rm -f "$output"
}

# A torch that is there and new enough (a CUDA build, say) stays; without one, pip takes the constraint's version.
has_torch() {
    "$python" - <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    numbers = version("torch").split("+")[0].split(".")
except PackageNotFoundError:
    sys.exit(1)
sys.exit((int(numbers[0]), int(numbers[1])) < (2, 11))
PYTHON
}

install() {
    local constraint=()
    local what=hiddentap${extras:+[$extras]}
    if has_torch; then
        say "installing $what into .venv"
    else
        constraint=(--constraint "$root/constraints/highest.txt")
        say "downloading and installing torch and $what into .venv (minutes, and about 1 GB)"
    fi
    # The build requirement comes first and the build is not isolated: then pip asks no index where all is installed.
    log "$python" -m pip install --quiet --disable-pip-version-check "setuptools>=77"
    log "$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation "${constraint[@]}" \
        --editable "$root${extras:+[$extras]}"
}

"$python" -c '' 2>/dev/null || make_venv
stamp=$venv/.setup-${extras:-none}
if [[ ! -f $stamp || $(<"$stamp") != "$(stamp_text)" ]]; then
    install
    stamp_text >"$stamp"
fi
