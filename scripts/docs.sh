#!/usr/bin/env bash
# Builds the documentation into site/, or shows it while it is being written. A warning is an error.
#
#   scripts/docs.sh            builds site/index.html
#   scripts/docs.sh serve      shows it at http://127.0.0.1:8000 and builds again on every change of docs/
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bin=$root/.venv/bin
"$root/scripts/setup.sh" docs

# The reference is read from an installed copy: in the repository the package's folder has the repository's name.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
rm -rf "$root/build"
"$bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target "$copy" "$root"

cd "$root"
command=(build --strict --quiet --clean)
[[ ${1:-} == serve ]] && command=(serve)
# The theme's authors print a notice about another program of theirs on every build.
NO_MKDOCS_2_WARNING=1 PYTHONPATH=$copy "$bin/python" -m mkdocs "${command[@]}" --config-file mkdocs.yml
[[ ${1:-} == serve ]] || echo "$root/site/index.html"
