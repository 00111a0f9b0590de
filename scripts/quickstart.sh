#!/usr/bin/env bash
# From a fresh clone to a real model: sets up .venv, inspects the MiniLM checkpoint,
# embeds sentences with it and prints which of them are alike; then asks the small language model
# that is part of maxjax for a sum.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --light

# The script looks up the package's location instead of importing it, which would need torch.
model="$(.venv/bin/python scripts/minilm.py)"

echo "\$ maxjax inspect MODEL | tail"
.venv/bin/maxjax inspect "$model" | tail -n 12
echo
echo "\$ maxjax embed --model MODEL \"The cat sat on the mat.\" | cut -c 1-76"
.venv/bin/maxjax embed --model "$model" "The cat sat on the mat." | cut -c 1-76
echo
.venv/bin/python scripts/quickstart.py "$model"
echo
echo "\$ maxjax generate \"What is 37 + 48?\""
.venv/bin/maxjax generate "What is 37 + 48?"
