"""Decoding and prefill of random Llamas on one accelerator, against hand-written JAX and the memory's bandwidth.

bandwidth  bytes read a second by a sum over a large array, measured beside every row.
decode     one token of each of 1 and 8 sequences after 128 and 2048 tokens, with a cache in bfloat16
           and in int8: the bytes of weights and cache that a step has to read, over its time, as
           a share of the bandwidth. Wanted: 80 %.
quantised  the same with weights in Q8_0 and Q4_K, and the speed-up over bfloat16. Wanted: 2 for Q4_K.
prefill    prompts of 2048 and 32768 tokens of one sequence, in chunks of 512: tokens a second.
ratio      the time of the same model hand-written in JAX (layers unrolled, weights as separate arrays;
           XLA's attention for decoding, cuDNN's for prefill) over maxjax's: above 1 maxjax is faster.
copies     bytes of copies of weights and caches in the optimised decode program. Wanted: none.

Weights are in bfloat16 unless quantised. The 8 B model needs about 40 GB. --quick runs small models on any backend.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import maxjax
from maxjax import init
from maxjax.cli.bench import weight_bytes
from maxjax.engine.batching.memory import page_size_of
from maxjax.models import Llama, LlamaConfig
from maxjax.nn.kv_cache.pages import PagedCache

# Llama 3.1 8B and Llama 3.2 1B.
_SHARED = {
    "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 65536, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "1 B": _SHARED | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                      "num_attention_heads": 32, "head_dim": 64},
    "8 B": _SHARED | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                      "num_attention_heads": 32},
}  # fmt: skip
SMALL = {"small": _SHARED | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
                             "vocab_size": 1024, "num_attention_heads": 2, "num_key_value_heads": 1}}  # fmt: skip
CHUNK = 512


def bandwidth(size: int, rounds: int) -> float:
    """Bytes a second that a sum over bfloat16 values reads; it adds in float32."""
    data = jnp.ones((size // 2,), jnp.bfloat16)
    read = jax.jit(lambda a: a.sum(dtype=jnp.float32))
    return data.nbytes / median(lambda: read(data), rounds)


def median(run: Callable[[], Any], rounds: int) -> float:
    """The median of the seconds of a call, after two calls that do not count."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


# --- maxjax


def paged(model: Llama, batch: int, most: int, kind: str, length: int = 0) -> PagedCache:
    """A cache of pages, as maxjax.generate has it, for sequences of up to ``most`` tokens; each has ``length``."""
    size = page_size_of(model)
    each = -(-most // size)
    pool = model.page_pool(batch * each, size, batch, kind)
    table = jnp.arange(batch * each, dtype=jnp.int32).reshape(batch, each)
    lengths = jnp.full(batch, length, jnp.int32)
    return PagedCache(pool, table, lengths, jnp.arange(batch, dtype=jnp.int32))


@functools.partial(jax.jit, donate_argnums=2)
def step(model: Llama, tokens: jax.Array, cache: PagedCache) -> tuple[jax.Array, PagedCache]:
    """Tokens of each sequence → logits of the next token, and the new cache."""
    return model(tokens, cache, last=True)


Job = tuple[jax.stages.Lowered, Callable[[jax.stages.Compiled], Any]]


def compiled(jobs: dict[Any, Job]) -> dict[Any, Any]:
    """The measurements of the jobs, run one after the other; their programs are compiled in parallel."""
    with ThreadPoolExecutor(4) as pool:
        programs = list(pool.map(lambda job: job[0].compile(), jobs.values()))
    return {
        key: run(program) for (key, (_, run)), program in zip(jobs.items(), programs, strict=True)
    }


def decode(model: Llama, batch: int, context: int, steps: int, kind: str, profile: bool) -> Job:
    """Seconds of a decode step, from many that are awaited together, and the bytes that it has to read."""
    slots = -(-(context + 4 * steps + 8) // 256) * 256
    cache = jax.eval_shape(lambda: paged(model, batch, slots, kind))
    tokens = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def run(program: jax.stages.Compiled) -> tuple[float, int]:
        cache = paged(model, batch, slots, kind, context)
        of_slot = sum(a.nbytes for a in jax.tree.leaves(cache.pool)) // cache.capacity
        one = lambda cache: program(model, tokens, cache)
        seconds = repeated(one, cache, steps, profile)
        return seconds, weight_bytes(model, batch) + context * of_slot

    return step.lower(model, tokens, cache), run


def prefill(model: Llama, length: int, rounds: int, profile: bool) -> Job:
    """Seconds of a prompt in chunks."""
    ids = jnp.zeros((1, CHUNK), jnp.int32)
    cache = jax.eval_shape(lambda: paged(model, 1, length, "bfloat16"))

    def run(program: jax.stages.Compiled) -> float:
        def once() -> Any:
            logits, cache = None, paged(model, 1, length, "bfloat16")
            for _ in range(length // CHUNK):
                logits, cache = program(model, ids, cache)
            return logits

        if profile:
            longest(lambda cache: program(model, ids, cache), paged(model, 1, length, "bfloat16"))
        return median(once, rounds)

    return step.lower(model, ids, cache), run


def longest(run: Callable[[Any], tuple[Any, Any]], state: Any, steps: int = 4) -> None:
    """Prints the kernels in which a step spends most of its time, according to JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                out, state = run(state)
            jax.block_until_ready(out)
        (path,) = Path(folder).rglob("*.xplane.pb")
        found: dict[str, list[float]] = {}
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    # Names of fusions of the same kind differ only in their numbers.
                    name = re.sub(r"_\d+$", "", event.name)
                    found.setdefault(name, []).append(event.duration_ns / 1e3 / steps)
    total = sum(map(sum, found.values()))
    print(f"    {total:.0f} us of kernels a step, {sum(map(len, found.values())) // steps} of them")
    for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:10]:
        print(f"    {sum(times):8.1f} us {len(times) // steps:5} x {name[:80]}")


def repeated(run: Callable[[Any], tuple[Any, Any]], state: Any, steps: int, profile: bool) -> float:
    """Seconds of a step, the least of three means over ``steps``; may print the kernels of some more."""
    times = []
    for _ in range(3):
        out = None
        start = time.perf_counter()
        for _ in range(steps):
            out, state = run(state)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / steps)
    if profile:
        longest(run, state)
    return min(times)


_COPY = re.compile(r"= (\w+)\[([\d,]+)\]\S* (?:copy|copy-start|dynamic-slice)\(")


def copied(program: jax.stages.Compiled, least: int) -> int:
    """Bytes of unfused copies and slices of at least ``least`` elements in a program."""
    total = 0
    for dtype, dims in _COPY.findall(program.as_text()):
        count = math.prod(map(int, dims.split(",")))
        width = re.search(r"\d+", dtype)  # bits, as in "bf16"; "pred" takes a byte
        total += count * (int(width[0]) if width else 8) // 8 if count >= least else 0
    return total


# --- by hand


def weights_by_hand(config: dict[str, Any]) -> dict[str, Any]:
    """Random weights ``[in, out]``, with separate arrays for each layer."""
    size, inner, width = (
        config["hidden_size"],
        config["intermediate_size"],
        config["head_dim"],
    )
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes = {"q": (size, q), "k": (size, kv), "v": (size, kv), "o": (q, size),
              "gate": (size, inner), "up": (size, inner), "down": (inner, size)}  # fmt: skip

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02)

    keys = iter(jax.random.split(jax.random.key(1), 8 * config["num_hidden_layers"] + 2))
    ones = lambda: jnp.ones(size, jnp.bfloat16)
    layers = [
        {name: normal(next(keys), shape) for name, shape in shapes.items()}
        | {"norm1": ones(), "norm2": ones()}
        for _ in range(config["num_hidden_layers"])
    ]
    vocabulary = config["vocab_size"]
    return {"layers": layers, "norm": ones(), "embed": normal(next(keys), (vocabulary, size)),
            "head": normal(next(keys), (size, vocabulary))}  # fmt: skip


def by_hand(
    weights: Any, ids: jax.Array, cache: Any, start: jax.Array, *, config: Any, causal: bool
) -> Any:
    """Tokens ``[B, T]`` at ``start`` → logits of the next, and the cache: keys, values ``[B, S, K, D]`` per layer."""
    width, (batch, length) = config["head_dim"], ids.shape
    half = width // 2
    at = start + jnp.arange(length)
    angles = at[:, None] * config["rope_theta"] ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    x, new = weights["embed"][ids], []

    def norm(x: jax.Array, w: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(
            x.dtype
        ) * w

    def turned(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    for w, (keys, values) in zip(weights["layers"], cache, strict=True):
        h = norm(x, w["norm1"])
        q, k, v = ((h @ w[name]).reshape(batch, length, -1, width) for name in "qkv")
        q, k = turned(q), turned(k)
        keys = jax.lax.dynamic_update_slice(keys, k, (0, start, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v, (0, start, 0, 0))
        if causal:
            fast = "cudnn" if jax.devices()[0].platform == "gpu" else None
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=fast)
        else:
            seen = jnp.full(batch, start + length, jnp.int32)
            y = jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=seen)
        x = x + y.reshape(batch, length, -1) @ w["o"]
        h = norm(x, w["norm2"])
        x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        new.append((keys, values))
    return norm(x[:, -1], weights["norm"]) @ weights["head"], new


def jobs_by_hand(
    config: dict[str, Any],
    rows: list[tuple[int, int]],
    prompts: list[int],
    steps: int,
    profile: bool,
) -> dict[Any, Job]:
    """Seconds of a decode step, by (batch, context), and of a prompt, by its length."""
    weights, found = weights_by_hand(config), {}
    layers = config["num_hidden_layers"]

    def empty(batch: int, slots: int) -> Any:
        shape = (batch, slots, config["num_key_value_heads"], config["head_dim"])
        return [
            (jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16)) for _ in range(layers)
        ]

    def decoding(batch: int, context: int) -> Job:
        slots = -(-(context + 1) // 256) * 256
        call = jax.jit(functools.partial(by_hand, config=config, causal=False), donate_argnums=2)
        ids, start = jnp.zeros((batch, 1), jnp.int32), jnp.int32(context)

        def run(program: jax.stages.Compiled) -> float:
            one = lambda cache: program(weights, ids, cache, start)
            return repeated(one, empty(batch, slots), steps, profile)

        cache = jax.eval_shape(lambda: empty(batch, slots))
        return call.lower(weights, ids, cache, start), run

    def prompt(length: int) -> Job:
        call = jax.jit(functools.partial(by_hand, config=config, causal=True))
        ids, start = jnp.zeros((1, length), jnp.int32), jnp.int32(0)

        def run(program: jax.stages.Compiled) -> float:
            cache = empty(1, length)
            return median(lambda: program(weights, ids, cache, start), 3)

        return call.lower(weights, ids, jax.eval_shape(lambda: empty(1, length)), start), run

    for batch, context in rows:
        found[batch, context] = decoding(batch, context)
    for length in prompts:
        found[length] = prompt(length)
    return found


# --- the rows


def measure(name: str, config: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints the rows of a model."""
    quick, profile = options.quick, options.profile
    steps = 2 if quick else 32
    probe = lambda: bandwidth((1 << 22) if quick else (4 << 30), 3 if quick else 10)
    contexts = [128] if quick else options.context
    rows = [(batch, context) for batch in (1, 8) for context in contexts]
    prompts = [CHUNK] if quick else options.prompt
    hand = compiled(jobs_by_hand(config, rows, prompts, steps, profile))
    model = init(Llama(LlamaConfig.from_dict(config), "bfloat16"), jax.random.key(0))
    model.stack_for()  # as maxjax.load does
    tokens = jnp.zeros((1, 1), jnp.int32)
    program = step.lower(model, tokens, paged(model, 1, 2048, "bfloat16")).compile()
    least = config["hidden_size"] * config["num_key_value_heads"] * config["head_dim"]
    print(f"{name}: copies in a decode step: {copied(program, least):,} bytes  wanted 0")
    floats: dict[Any, float] = {}
    for kind, cache in (
        ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("q8_0", "bfloat16"), ("q4_k", "bfloat16"),
    ):  # fmt: skip
        used = model if kind == "bfloat16" else maxjax.quantize(model, kind).model
        jobs = {row: decode(used, *row, steps, cache, profile) for row in rows}
        for (batch, context), (seconds, read) in compiled(jobs).items():
            there, of_floats = probe(), floats.setdefault((batch, context), seconds)
            ratio = hand[batch, context] / seconds
            print(
                f"{name}: weights {kind:8} cache {cache:8} batch {batch} at {context:4}: "
                f"{seconds * 1e3:7.2f} ms a step, {batch / seconds:7.1f} tok/s, "
                f"{read / seconds / 1e9:5.0f} of {there / 1e9:5.0f} GB/s, "
                f"{read / seconds / there:.0%}  wanted 80 %; by hand {ratio:.2f}; "
                f"bfloat16 {of_floats / seconds:.2f}",
                flush=True,
            )
    jobs = {length: prefill(model, length, 3, profile) for length in prompts}
    for length, seconds in compiled(jobs).items():
        ratio = hand[length] / seconds
        print(f"{name}: prefill {length:5}: {length / seconds:9.0f} tok/s; by hand {ratio:.2f}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="small models, without meaning")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="both by default")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[128, 2048], help="tokens before a step"
    )
    parser.add_argument(
        "--prompt", type=int, nargs="+", default=[2048, 32768], help="tokens of prompts"
    )
    parser.add_argument("--profile", action="store_true", help="print the kernels of each step")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform == "cpu" and not options.quick:
        print(
            "not measured: there is no accelerator here (--quick runs small models on any backend)"
        )
        return 0
    print(f"{device.device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}")
    for name, config in (SMALL if options.quick else MODELS).items():
        if options.quick or options.model is None or name in options.model:
            measure(name, config, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
