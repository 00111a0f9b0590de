#!/usr/bin/env bash
# Runs a campaign of the property tests: 1,000 examples each, drawn from a seed that is printed.
#   scripts/property_tests.sh                    another seed each time
#   scripts/property_tests.sh 4093207842         the same examples again
#   scripts/property_tests.sh 4093207842 20000 tests/storage
# Tests that compile programs (tests/nn) keep their few examples, which are also drawn from the seed.
set -euo pipefail
cd "$(dirname "$0")/.."
seed="${1:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}"
export MAXJAX_PROPERTIES="${2:-1000}"
echo "seed $seed: repeat with scripts/property_tests.sh $seed $MAXJAX_PROPERTIES"
exec "${PYTHON:-.venv/bin/python}" -m pytest -m hypothesis --hypothesis-seed="$seed" "${@:3}"
