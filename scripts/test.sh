#!/usr/bin/env bash
# Sets up the environment if that is not done yet, then runs the default set of tests in two processes.
# Arguments go to pytest: scripts/test.sh -x tests/storage; scripts/test.sh --all
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
# Most of the time goes into compiling programs that run once, so they are compiled quickly. `.ci/full` runs the
# tests without these settings, as users run programs.
export JAX_DISABLE_MOST_OPTIMIZATIONS=1
export XLA_FLAGS="${XLA_FLAGS:-} --xla_cpu_use_fusion_emitters=false"
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist worksteal "$@"
