#!/usr/bin/env bash
# From a fresh clone to a real model: sets up .venv, looks into the MiniLM checkpoint,
# embeds sentences with it and prints which of them are alike; then asks the small language model
# that comes with maxjax for a sum.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --light

# Found by its place, not by importing the package: its code would need torch.
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
