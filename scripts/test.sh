#!/usr/bin/env bash
# Sets up the environment where that is not done yet, then runs all tests, the slow ones as
# well, in two processes. Arguments go to pytest: scripts/test.sh -x tests/storage
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" -m "" "$@"
