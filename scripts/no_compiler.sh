#!/usr/bin/env bash
# Tests maxjax on a machine without a C++ compiler: makes a wheel, installs it into a temporary folder, and runs
# there the tests that do not need the compiled kernels, which then use the jnp forms. PYTHON=/path/to/python must have the dependencies. It takes about a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
root="$PWD"
python="${PYTHON:-$root/.venv/bin/python}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
fail() { echo "no_compiler.sh: $*" >&2; exit 1; }

"$python" -m pip wheel -q --disable-pip-version-check --no-deps \
  -w "$folder/wheel" . 2> "$folder/pip.log" || fail "no wheel: $(cat "$folder/pip.log")"
[ -f "$(echo "$folder"/wheel/maxjax-*-py3-none-any.whl)" ] || fail "made $(ls "$folder/wheel")"
"$python" -m pip install -q --disable-pip-version-check --no-deps --target "$folder/site" \
  "$folder"/wheel/*.whl

# pytest puts its root folder first on the path, so that folder must not contain maxjax.
mkdir "$folder/checkout"
cp -r pyproject.toml tests scripts "$folder/checkout"
cd "$folder/checkout"
unset MAXJAX_KERNELS MAXJAX_KERNELS_LIBRARY
export PYTHONPATH="$folder/site" JAX_PLATFORMS=cpu MAXJAX_COMPILE_CACHE=0 CXX=/nonexistent XDG_CACHE_HOME="$folder/cache"

where="$("$python" -c 'import maxjax; print(maxjax.__file__)')"
case "$where" in "$folder/site/"*) ;; *) fail "maxjax is $where" ;; esac
[ -z "$(find "$folder/site" -name '*.so' -o -name '*.dylib')" ] || fail "the wheel has a library"
status="$("$python" -c 'from maxjax.kernels import native; print(native.status())' 2> /dev/null)"
case "$status" in *"CPU kernels cannot be compiled (no C++ compiler"*) ;; *) fail "the kernels' status: $status" ;; esac

attention="derivatives or exported or vmap or without_jit or nothing_to_do or do_not_fit"
"$python" -m pytest -q -p no:cacheprovider tests/kernels \
  -k "test_matmul or test_no_library or (test_decode_attention and ($attention))"

# Compares attention and matmuls of a few sizes with NumPy, and checks that the log gives the reason once.
"$python" - 2> "$folder/log" <<'EOF'
import logging

import jax
import numpy as np

from maxjax.kernels import decode_attention, matmul

logging.basicConfig()
rng = np.random.default_rng(0)
for tokens, depth in ((1, 40), (3, 200), (33, 64)):
    x, w = (rng.standard_normal((n, depth)).astype("f4") for n in (tokens, 7))
    for run in (matmul, jax.jit(matmul), jax.vmap(matmul, (0, None))):
        np.testing.assert_allclose(run(x, w), x @ w.T, rtol=1e-4, atol=1e-4)

q, keys, values = (rng.standard_normal((2, n, *s, 8)).astype("f4") for n, s in
                   ((4, ()), (2, (9,)), (2, (9,))))
k, v, lengths = q[:, :2] + 1, q[:, 2:] - 1, np.array([0, 5])
found = jax.jit(decode_attention)(q, k, v, keys, values, lengths)
for b, n in enumerate(lengths):
    keys[b, :, n], values[b, :, n] = k[b], v[b]
    for h in range(4):
        weights = np.exp(keys[b, h // 2, : n + 1] @ q[b, h] / 8**0.5)
        wanted = weights @ values[b, h // 2, : n + 1] / weights.sum()
        np.testing.assert_allclose(found[0][b, h], wanted, rtol=1e-4, atol=1e-5)
np.testing.assert_array_equal(found[1], keys)
np.testing.assert_array_equal(found[2], values)
EOF
[ "$(grep -c 'jnp forms are used instead' "$folder/log")" = 1 ] || fail "logged: $(cat "$folder/log")"
echo "no_compiler.sh: ok; the kernels' status: $status"
