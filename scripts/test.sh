#!/usr/bin/env bash
# Sets up the environment where that is not done yet, then runs the tests.
# Arguments go to pytest: scripts/test.sh -x tests/storage
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
