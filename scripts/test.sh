#!/usr/bin/env bash
# Sets up the environment if that is not done yet, then runs the default set of tests in two
# processes. The last line says how many tests were left out, and why: campaigns take long and are
# run by `.ci/full`. Arguments go to pytest: scripts/test.sh -x tests/storage
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist loadscope -m "not campaign and not oracle" "$@"
