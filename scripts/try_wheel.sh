#!/usr/bin/env bash
# Tests a wheel as a user gets it: installs the wheel of a folder that fits this machine into a new environment,
# generates text with it, and removes the environment. On Linux the wheel must have kernels.
#
#   scripts/try_wheel.sh dist [python3.12]           with the newest dependencies
#   scripts/try_wheel.sh dist python3.12 lowest      with the lowest versions that pyproject.toml allows
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
dist="$(cd "$1" && pwd)"
python="${2:-python3}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"  # not beside the sources
"$python" -m venv venv
: >constraints
[ "${3:-newest}" = newest ] || "$python" "$root/scripts/lowest_versions.py" >constraints
# Dependencies come from the index; maxjax only from the folder.
version="$(basename "$dist"/maxjax-*.tar.gz .tar.gz)"
venv/bin/pip install -q --disable-pip-version-check -c constraints --find-links "$dist" --only-binary maxjax "${version/maxjax-/maxjax==}"
venv/bin/python -c "import maxjax; assert maxjax.__file__.startswith('$folder'), maxjax.__file__"
found="$(JAX_PLATFORMS=cpu venv/bin/maxjax env)"
kernels="$(grep -A1 '^kernels' <<<"$found" | tail -n 1)"
[ "$(uname)" != Linux ] || [[ "$kernels" != *"first use"* ]] || { echo "$kernels" >&2; exit 1; }
answer="$(JAX_PLATFORMS=cpu venv/bin/maxjax generate "What is 37 + 48?")"
[ "$answer" = "37 + 48 = 85" ] || { echo "it says: $answer" >&2; exit 1; }
echo "$("$python" --version), ${3:-newest} dependencies (jax $(venv/bin/python -c 'import jax; print(jax.__version__)')), $(venv/bin/maxjax --version): $answer; kernels:$(tr -s ' ' <<<" $kernels")"
