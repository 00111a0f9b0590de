#!/usr/bin/env bash
# Runs the blocks of docs/clusters.md that need Ray, with a Ray of this machine.
#
# Ray is installed once into .ray, an environment that also sees the packages of .venv: about 500 MB.
set -euo pipefail
cd "$(dirname "$0")/.."

python="$PWD/.venv/bin/python"
package="ray[data,serve]>=2.60"
wanted="$PWD $package"
if [ "$(cat .ray/.done 2>/dev/null)" != "$wanted" ]; then
  echo "ray_pages.sh: installing Ray into .ray" >&2
  "$python" -m venv --clear .ray
  site="$(.ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  packages_of_venv="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  echo "import site; site.addsitedir('$packages_of_venv')" > "$site/venv.pth"
  .ray/bin/python -m pip install -q --disable-pip-version-check "$package"
  echo "$wanted" > .ray/.done
fi

home="$(mktemp -d)" # Ray writes into the home folder; the caches stay where they are
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$HOME/.cache}"
trap 'rm -rf "$home"' EXIT
export HOME="$home" PYTHONPATH="$PWD" RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0
export RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=$((80 << 20))
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=60 RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S=60

# Ray gives its processes 30 seconds to start, which may be too few where other steps run beside this one.
for attempt in 1 2 3; do
  status=0
  .ray/bin/python -m scripts.pages clusters > "$home/log" 2>&1 || status=$?
  cat "$home/log"
  grep -q "current node timed out during startup" "$home/log" || break
done
exit "$status"
