"""Decoding a synthetic 8 B Llama in bf16 on one accelerator, against what its memory gives.

bandwidth  bytes read a second by a sum over a large array: what a decode step could reach.
decode     one token of each of 1 and 8 sequences at a context of 128 and 2048: bytes of the weights
           and of the cache read, over the time of a step, as a part of that. Wanted: 80 %.
copies     bytes of the copies of weights in the optimised program: a layer is to be read where it
           lies in the stack. Wanted: none.

Needs about 18 GB of memory on the accelerator. --quick runs a small model on any backend.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from maxjax import init
from maxjax.cli.bench import weight_bytes
from maxjax.models import Llama, LlamaConfig
from maxjax.nn import KVCache

# Llama 3.1 8B.
CONFIG = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024,
                  "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


def bandwidth(size: int, rounds: int) -> float:
    """Bytes a second of a sum over bf16, summed in float32."""
    data = jnp.ones((size // 2,), jnp.bfloat16)
    read = jax.jit(lambda a: a.sum(dtype=jnp.float32))
    return data.nbytes / median(lambda: read(data), rounds)


def median(run: functools.partial, rounds: int) -> float:
    """The median of the seconds of a call, after two that do not count."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


@functools.partial(jax.jit, donate_argnums=2)
def step(model: Llama, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """A token of each sequence → logits of the next, and the cache."""
    return model(tokens, cache, last=True)


def decode(model: Llama, batch: int, context: int, steps: int) -> tuple[float, int]:
    """Seconds of a step, of many that are waited for together, and the bytes it has to read."""
    cache = model.cache(batch, -(-(context + 4 * steps) // 256) * 256, "bfloat16")
    cache = dataclasses.replace(cache, lengths=jnp.full(batch, context, jnp.int32))
    tokens = jnp.arange(batch, dtype=jnp.int32)[:, None]
    program = step.lower(model, tokens, cache).compile()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(steps):
            logits, cache = program(model, tokens, cache)
        logits.block_until_ready()
        times.append((time.perf_counter() - start) / steps)
    used = 2 * context * cache.keys.nbytes // cache.keys.shape[3]
    return min(times), weight_bytes(model, batch) + used


_COPY = re.compile(r"= (\w+)\[([\d,]+)\]\S* (?:copy|copy-start|dynamic-slice)\(")


def copied(program: jax.stages.Compiled, least: int) -> int:
    """Bytes of copies and slices of at least so many numbers that stand by themselves in a program."""
    total = 0
    for _, dims in _COPY.findall(program.as_text()):
        count = 1
        for n in dims.split(","):
            count *= int(n)
        total += 2 * count if count >= least else 0
    return total


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a small model, without meaning")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform == "cpu" and not options.quick:
        print("no accelerator here: nothing to measure (--quick runs a small model)")
        return 0
    config = SMALL if options.quick else CONFIG
    steps = 2 if options.quick else 32
    probe = bandwidth((1 << 22) if options.quick else (4 << 30), 3 if options.quick else 20)
    print(f"{device.device_kind}: reads {probe / 1e9:.0f} GB/s")
    model = init(Llama(LlamaConfig.from_dict(config), "bfloat16"), jax.random.key(0))
    tokens, cache = jnp.zeros((1, 1), jnp.int32), model.cache(1, 256, "bfloat16")
    program = step.lower(model, tokens, cache).compile()
    least = config["hidden_size"] * config["num_key_value_heads"] * config["head_dim"]
    print(f"copies of weights in a decode step: {copied(program, least):,} bytes  wanted 0")
    for batch in (1, 8):
        for context in (128,) if options.quick else (128, 2048):
            seconds, read = decode(model, batch, context, steps)
            print(
                f"batch {batch} at {context:4}: {seconds * 1e3:7.2f} ms a step, {batch / seconds:7.1f} tok/s, "
                f"{read / seconds / 1e9:6.0f} GB/s, {read / seconds / probe:.0%} of what it reads  wanted 80 %",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
