"""llama.cpp live: tokens, logits and hidden states of a GGUF file, from a process of its own.

Tests that need it are skipped where LLAMA_CPP_PYTHON names no Python that has llama-cpp-python.
"""

import json
import os
import subprocess
from pathlib import Path

from scripts.llama_cpp_peer import Peer, available, python

_TOKENS = """
import json, sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
ask = json.load(sys.stdin)
answer = []
for text in ask["texts"]:
    answer.append(model.tokenize(text.encode(), add_bos=ask["special"], special=ask["special"]))
print(json.dumps(answer))
"""

_HIDDEN = """
import json, sys, llama_cpp
model = llama_cpp.Llama(
    sys.argv[1], embedding=True, pooling_type=int(sys.argv[2]), n_ctx=128, n_threads=1,
    n_gpu_layers=0, verbose=False)
answer = [model.embed(text) for text in json.load(sys.stdin)["texts"]]
print(json.dumps(answer))
"""


def tokens(path: Path, texts: list[str], special: bool = False) -> list[list[int]]:
    """The tokens of each text, with or without those around a text."""
    return _run(_TOKENS, [path], {"texts": texts, "special": special})


def hidden(path: Path, texts: list[str], pooling: int) -> list:
    """The vectors of each text, or with pooling 0 of each of its tokens."""
    return _run(_HIDDEN, [path, pooling], {"texts": texts})


def logits(path: Path, ids: list[int]) -> list[float]:
    """The logits after some tokens, with a cache in float32."""
    with Peer(path, context=64, cache="F32", flash="off") as peer:
        return peer.logits(ids)


def following(path: Path, ids: list[int], text: list[int]) -> list[list[float]]:
    """The logits after some tokens, and then after each further one of a text, by a cache in float32."""
    with Peer(path, context=len(ids) + len(text), cache="F32", flash="off") as peer:
        found = [peer.logits(ids)]
        for i, token in enumerate(text[:-1]):
            peer.decode([token], 1, len(ids) + i)
            found += peer.last()
    return found


def _run(script: str, arguments: list, ask: dict) -> list:
    command = [python(), "-c", script, *map(str, arguments)]
    done = subprocess.run(
        command, input=json.dumps(ask), capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


__all__ = ["available", "following", "hidden", "logits", "tokens"]
