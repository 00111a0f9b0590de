#!/usr/bin/env bash
# Builds the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer and runs their
# tests: a read or a write past an array, or undefined behaviour of C++, ends them.
#
#   scripts/sanitize_kernels.sh            takes about two minutes, half of them for compiling
#   scripts/sanitize_kernels.sh --prove    proves that it finds a mistake: a copy reads one element too far
#
# Of tests/kernels it runs those that reach the C++ code in different ways: types, sizes, lengths, options,
# layers, addresses, threads, loops. It leaves out derivatives, exports and jaxprs, which run the jnp form,
# and meshes, on which each device runs the same code as a single one. CXX names the compiler.
# Without a compiler or without the sanitizers' libraries it says so and exits with 0.
set -euo pipefail
cd "$(dirname "$0")/.."
root="$PWD"
python="${PYTHON:-$root/.venv/bin/python}"
cxx="${CXX:-g++}"
here="$root/maxjax/kernels/cpu"
build="$root/build/sanitized"

skipped() {
  echo "skipped: $1" >&2
  exit 0
}

# Prints the path of a library of the compiler, or nothing if it has none.
library() {
  local path
  path="$($cxx -print-file-name="$1")"
  case "$path" in /*) if [ -e "$path" ]; then readlink -f "$path"; fi ;; esac
}

command -v "${cxx%% *}" >/dev/null || skipped "there is no ${cxx%% *}"
preload=""
for name in libasan.so libubsan.so libstdc++.so; do
  path="$(library "$name")"
  [ -n "$path" ] || skipped "$cxx has no $name"
  preload="$preload${preload:+:}$path"
done

mkdir -p "$build"
# -O1 at the end overrides -O3, which takes five times as long to compile with the checks.
printf '#!/bin/sh\nexec %s "$@" -O1\n' "$cxx" >"$build/cxx"
chmod +x "$build/cxx"

compile() { # folder of the sources, library
  if [ -e "$2" ] && [ -z "$(find "$1" "$0" -newer "$2" -type f ! -name '*.so')" ]; then return; fi
  CXX="$build/cxx" "$python" -m maxjax.native_library --sources "$1" --sanitize address,undefined --output "$2" >/dev/null
}

# Leaks of Python at exit are not reported, nor its own mixing of allocators.
run() { # library, arguments of pytest
  local file="$1"
  shift
  MAXJAX_KERNELS_LIBRARY="$file" LD_PRELOAD="$preload" \
    ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:abort_on_error=0 \
    UBSAN_OPTIONS=print_stacktrace=1 "$python" -m pytest -q -p no:cacheprovider -s "$@"
}

what="types or type_on or random_products or any_rank or next_to_nothing or sums_of_nothing or any_address or parts_of"
what="$what or several_weights or out_of_range or same_in_every_bit or below_the_least"
what="$what or lengths or any_width or not_matter or options or large_scores"
what="$what or every_format or narrow_types or random_sizes or any_bits or not_finite or any_size or same_kernel"
what="$what or steps_equal or donated or not_donated or both_caches or threads or test_pages"
what="($what) and not derivatives and not mesh and not exported"
tests=(tests/kernels/test_product.py tests/kernels/test_packed_product.py tests/kernels/test_decode_attention.py)
tests+=(tests/kernels/test_pages.py)

if [ "${1:-}" = --prove ]; then
  copy="$build/copy"
  rm -rf "$copy"
  mkdir -p "$copy"
  cp "$here"/*.cc "$here"/*.h "$copy"
  sed -i 's/i < depth - k; i++) rest/i <= depth - k; i++) rest/' "$copy/product.h"
  if cmp -s "$here/product.h" "$copy/product.h"; then
    echo "sanitize_kernels.sh: product.h has changed: nothing to break there" >&2
    exit 1
  fi
  compile "$copy" "$build/broken.so"
  if run "$build/broken.so" -k type_on_every_level tests/kernels/test_product.py >"$build/broken.txt" 2>&1; then
    echo "sanitize_kernels.sh: a read past the weights was not found" >&2
    exit 1
  fi
  grep -m 1 -E "ERROR: AddressSanitizer|runtime error" "$build/broken.txt"
  echo "found: the sanitized kernels end a program that reads too far"
  exit 0
fi

compile "$here" "$build/libmaxjax_kernels.so"
run "$build/libmaxjax_kernels.so" -k "$what" "${tests[@]}" || {
  echo "failed: the sanitized kernels, or their tests; see above" >&2
  exit 1
}
echo "passed: the kernels' tests with AddressSanitizer and UndefinedBehaviorSanitizer"
