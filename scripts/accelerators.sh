#!/usr/bin/env bash
# Compiles programs with XLA's own compilers for TPUs and NVIDIA GPUs, and compares what they hold and move,
# copies, collectives and kernels with scripts/aot.txt. No such device is needed.
#
#   scripts/accelerators.sh                           compares; up to 4 minutes on two cores
#   scripts/accelerators.sh --packed                  compares programs of packed models; 10 to 20 minutes
#   scripts/accelerators.sh --table scripts/aot.txt   takes any arguments of scripts/aot.py
#
# The compilers are installed once into .compilers, an environment that also sees the packages of .venv: about
# 2 GB. They must not be in .venv, where JAX would look for a TPU and a GPU whenever it starts.
set -euo pipefail
cd "$(dirname "$0")/.."

python="$PWD/.venv/bin/python"
jax="$("$python" -c 'from importlib.metadata import version; print(version("jax"))')"
# scripts/aot.txt is valid for these versions.
packages=("libtpu==0.0.52" "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax" "nvidia-cudnn-cu13==9.28.1.4")

wanted="$PWD ${packages[*]}"
if [ "$(cat .compilers/.done 2>/dev/null)" != "$wanted" ]; then
  echo "accelerators.sh: installing ${packages[*]} into .compilers" >&2
  "$python" -m venv --clear .compilers
  .compilers/bin/python -m pip install -q --disable-pip-version-check --no-deps "${packages[@]}"
  site="$(.compilers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  packages_of_venv="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  echo "import site; site.addsitedir('$packages_of_venv')" > "$site/venv.pth"
  echo "$wanted" > .compilers/.done
fi

if [ $# = 0 ]; then set -- --check scripts/aot.txt --set floats; fi
if [ "$*" = --packed ]; then set -- --check scripts/aot.txt --set packed; fi
exec .compilers/bin/python scripts/aot.py "$@" 2> >(grep --line-buffered -v "cuInit\|^WARNING: All log messages" >&2)
