"""Prefill and decode steps of text generation on a CPU, against llama.cpp and the memory bandwidth.

decode    one token of every sequence: a random Llama, written by this script as a Hugging Face
          directory and as a GGUF file, is run by the programs of maxjax.generate and by a running
          llama.cpp on the same weights, in turns, with a measurement of the memory bandwidth in
          every pair. Printed: the median ratio of llama.cpp's time to maxjax's (above 1: maxjax is
          faster), its quartiles, and the share of the measured bandwidth that maxjax's step
          reaches, counting the bytes of the weights and of the part of the cache that is read.
prefill   prompts of 128 and 512 tokens, measured in the same way.
others    where they are installed: hand-written JAX (unrolled, einsum), transformers on torch,
          and Modular MAX (float32) where MAX_COMMAND names its program, `max`.
generate  time per token of maxjax.generate and maxjax.stream, over a step's; eight texts over one.
stack     the same model as one loop over stacked layers and unrolled.
accuracy  quantised weights: logits of maxjax and of llama.cpp, with int8 activations, against those
          with float32 activations.
memory    resident memory of a process after loading quantised weights, over the size of the file.
parts     one matmul, and attention over one layer's cache: the jnp form's time over the kernel's.

llama.cpp is used where LLAMA_CPP_PYTHON names a Python that has llama-cpp-python, built for this
processor; without it its columns are empty. --only a,b chooses rows by a part of their name.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MAXJAX_COMPILE_CACHE", "0")

import jax
import jax.numpy as jnp
import llama_cpp_peer
import numpy as np
import random_llama
import tokenizers
from peers import installed

import maxjax
from maxjax import checkpoint
from maxjax.cli.bench import weight_bytes
from maxjax.engine.batching.dispatch import MAX_STEPS
from maxjax.engine.batching.running import Stage, running_text
from maxjax.engine.bucket import bucket
from maxjax.engine.generate.request import Prompt, Request
from maxjax.engine.generate.stream import scheduler_for
from maxjax.engine.sampling.settings import GREEDY
from maxjax.kernels import QuantArray, StackSlice, decode_attention, matmul, native, product
from maxjax.kernels.encode import encode
from maxjax.lockstep import Lockstep

attention_module = sys.modules["maxjax.kernels.decode_attention"]

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PACKED = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
# The dtype of maxjax's cache for each type of weights; llama.cpp's cache is float16.
CACHES = {"F32": "float16", "F16": "float16", "BF16": "bfloat16"} | dict.fromkeys(PACKED, "float16")


@dataclass(frozen=True)
class Row:
    """One line of the result; `prompt` is 0 for decode steps after `context` tokens."""

    size: str
    kind: str
    batch: int
    context: int
    prompt: int = 0
    wanted: str = ""

    def __str__(self) -> str:
        what = f"prefill {self.prompt}" if self.prompt else f"decode  at {self.context}"
        return f"{self.size} {self.kind:4} batch {self.batch} {what}"


ROWS = [
    *(Row("135m", kind, 1, n, wanted=">= 1.1, 80 %")
      for kind in ("F32", "BF16", "F16") for n in (128, 2048)),
    *(Row("1b", kind, 1, n, wanted=">= 1.0, 90 %") for kind in ("F32", "BF16") for n in (128, 2048)),
    *(Row(size, "BF16", 8, 128, wanted=">= 1.0") for size in ("135m", "1b")),
    *(Row(size, kind, 1, 0, n, wanted=">= 1.0")
      for size in ("135m", "1b") for kind in ("BF16", "F32") for n in (128, 512)),
]  # fmt: skip
# For quantised weights: the wanted ratio, and the wanted share of the bandwidth in percent.
_WANTED = {
    ("135m", "Q8_0"): (1.1, 60), ("135m", "Q4_0"): (1.1, 60), ("1b", "Q8_0"): (1.1, 80),
    ("1b", "Q4_K"): (1.1, 65), ("1b", "Q6_K"): (1.1, 70), ("1b", "Q5_K"): (1.0, 60),
    ("1b", "MXFP4"): (1.0, 60),
}  # fmt: skip
ROWS += [
    *(Row(size, kind, 1, 128, wanted=f">= {ratio}, {part} %")
      for (size, kind), (ratio, part) in _WANTED.items()),
    Row("1b", "Q4_K", 1, 2048, wanted=">= 1.2"),
    *(Row("1b", kind, 8, 128, wanted=">= 1.1") for kind in ("Q4_K", "Q8_0")),
    *(Row(size, kind, 1, 0, n, wanted=">= 1.0") for (size, kind) in _WANTED for n in (128, 512)),
]  # fmt: skip
QUICK = [Row("tiny", "BF16", 2, 64), Row("tiny", "F32", 1, 0, 64), Row("tiny", "Q4_K", 1, 64)]


class Ours:
    """maxjax on one row: what ``maxjax.generate`` dispatches, with a text of `context` tokens before."""

    def __init__(self, model: Any, row: Row):
        self.model, self.row = model, row
        length = row.prompt or row.context
        rows = np.random.default_rng(0).integers(3, 1000, (row.batch, length)).tolist()
        request = Request(model, None, 64, None, (), GREEDY, {})
        prompts = [Prompt(ids, None, False) for ids in rows]
        self.scheduler = scheduler_for(
            request, prompts, row.batch,
            chunk=bucket(row.prompt or 8), cache_dtype=CACHES[row.kind], together=Lockstep("bench", ()),
        )  # fmt: skip
        self.texts = [running_text(request, one, None, i) for i, one in enumerate(prompts)]
        for text in self.texts:
            self.scheduler.add(text)
        self.scheduler._start()
        self.step(1)

    def step(self, count: int) -> list[float]:
        """Seconds of each of `count` decode steps; for a prompt, of each of `count` prefills."""
        if self.row.prompt:
            return [self._read() for _ in range(count)]
        self._at(self.row.context, Stage.WRITING)
        start, left = time.perf_counter(), count
        while left:
            self.scheduler.dispatch(min(left, MAX_STEPS))
            self.scheduler.receive()
            left -= min(left, MAX_STEPS)
        return [(time.perf_counter() - start) / count] * count

    def _read(self) -> float:
        self._at(0, Stage.READING)
        start = time.perf_counter()
        while any(text.stage is Stage.READING for text in self.texts):
            self.scheduler.read()
        return time.perf_counter() - start

    def _at(self, stored: int, stage: Stage) -> None:
        """Sets each text back to so many tokens in the cache, and one that is not if it writes."""
        for text in self.texts:
            text.tokens = text.tokens[: text.prompt_length] + [3] * (stage is Stage.WRITING)
            text.stored, text.stage, text.has_last_token = stored, stage, False
            text.keys = []  # it shares no page with what it was
            text.received.clear()

    def bytes_read(self) -> int:
        """The bytes of all weights, and of the keys and values of the tokens so far."""
        pool = self.scheduler.memory.arrays.pool
        token = sum(a.nbytes for a in jax.tree.leaves(pool)) // (pool.pages * pool.page_size)
        used = self.row.batch * self.row.context * token
        return weight_bytes(self.model, self.row.batch) + used


def load(directory: Path, stacked: bool = True) -> Any:
    """The model in a directory."""
    model, _ = maxjax.load(directory, tokenizer=False)
    return model if stacked else model.unstack()


class Theirs:
    """llama.cpp on one row."""

    def __init__(self, gguf: Path, row: Row):
        self.row = row
        self.peer = llama_cpp_peer.Peer(gguf, context=max(row.prompt, row.context + 64, 256))
        rng = np.random.default_rng(0)
        length = row.prompt or row.context
        self.prompts = rng.integers(3, 1000, (row.batch, length)).tolist()
        self.peer.prefill(self.prompts)
        self.step(1)

    def step(self, count: int) -> list[float]:
        """Seconds of each of `count` steps."""
        if self.row.prompt:
            return [self.peer.prefill(self.prompts) for _ in range(count)]
        first = [prompt[0] for prompt in self.prompts]
        return self.peer.decode(first, count, self.row.context)


class Bandwidth:
    """Measures the memory bandwidth: reads of a large array by all threads, in bytes a second."""

    def __init__(self, size: int = 400 << 20):
        self.data = jnp.ones((size // 4,), jnp.float32)
        self.read = jax.jit(lambda a: a.sum())
        self.read(self.data).block_until_ready()

    def __call__(self) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            self.read(self.data).block_until_ready()
            times.append(time.perf_counter() - start)
        return self.data.nbytes / statistics.median(times)


def measure(row: Row, folder: Path, pairs: int, bandwidth: Any) -> str:
    """The line of one row."""
    directory, gguf = files(folder, row.size, row.kind)
    ours = Ours(load(directory), row)
    theirs = Theirs(gguf, row) if llama_cpp_peer.available() else None
    count = 2 if row.prompt else 8 if row.size == "135m" else 4
    if row.prompt >= 512 or (row.prompt and row.size == "1b"):
        count = 1
    ratios, part, mine, its, probes = [], [], [], [], []
    their_part = []
    for i in range(pairs):
        order = [ours, theirs] if i % 2 else [theirs, ours]
        found: dict[Any, float] = {}
        probe = [bandwidth()]
        for side in order:
            if side is not None:
                time.sleep(0.05)  # the other program's threads spin a little longer
                found[side] = statistics.median(side.step(count))
        probe.append(bandwidth())
        probes.append(statistics.mean(probe))
        mine.append(found[ours])
        part.append(ours.bytes_read() / found[ours] / probes[-1])
        if theirs is not None:
            its.append(found[theirs])
            ratios.append(found[theirs] / found[ours])
            their_part.append(ours.bytes_read() / found[theirs] / probes[-1])
    if theirs is not None:
        theirs.peer.close()
    tokens = row.batch * (row.prompt or 1)
    line = f"{row!s:32} ours {statistics.median(mine) * 1e3:8.2f} ms {tokens / statistics.median(mine):7.1f} tok/s"
    if not row.prompt:
        line += f"  {statistics.median(part):4.0%} of {statistics.median(probes) / 1e9:4.1f} GB/s"
    if ratios:
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        line += f"  llama.cpp {statistics.median(its) * 1e3:8.2f} ms"
        line += "" if row.prompt else f" {statistics.median(their_part):4.0%}"
        line += f"  ratio {middle:.2f} [{low:.2f}, {high:.2f}]"
    return line + (f"  wanted {row.wanted}" if row.wanted else "")


def files(folder: Path, size: str, kind: str) -> tuple[Path, Path]:
    """The paths of what maxjax loads and of the GGUF file; missing files are written.

    maxjax loads a Hugging Face directory of floats, and the GGUF file of quantised weights.
    """
    place = folder / f"{size}-{kind}"
    directory, gguf = place / "hf", place / "model.gguf"
    if kind in PACKED:
        if not gguf.exists():
            place.mkdir(parents=True, exist_ok=True)
            checkpoint.convert(files(folder, size, "F16")[1], gguf, quantize=kind)
        return gguf, gguf
    if not gguf.exists():
        place.mkdir(parents=True, exist_ok=True)
        random_llama.write_hf(directory, random_llama.SIZES[size], kind)
        random_llama.write_gguf(gguf, random_llama.SIZES[size], kind)
    return directory, gguf


def check(folder: Path, size: str, kind: str) -> str:
    """How far our logits are from llama.cpp's, in their standard deviations."""
    directory, gguf = files(folder, size, kind)
    tokens = np.random.default_rng(1).integers(3, 1000, 40).tolist()
    model = load(directory)
    run = jax.jit(lambda m, ids, cache: m(ids, cache, last=True))
    cache = model.cache(1, 256, CACHES[kind])
    logits, cache = run(model, jnp.asarray([tokens[:-1]], jnp.int32), cache)
    logits, cache = run(model, jnp.asarray([tokens[-1:]], jnp.int32), cache)
    with llama_cpp_peer.Peer(gguf, context=256) as peer:
        theirs = np.asarray(peer.logits(tokens))
    worst = np.abs(np.asarray(logits)[0] - theirs).max() / theirs.std()
    assert worst < 0.1, worst
    return f"{size} {kind:4} logits after prefill and a step differ by at most {worst:.4f} of their deviation"


def accuracy(folder: Path, size: str, kind: str, count: int) -> str:
    """How far logits with quantised activations are from the definition's, for maxjax and llama.cpp.

    The definition keeps the activations in float32; all three have a float32 cache. Errors are in
    standard deviations of the logits.
    """
    _, gguf = files(folder, size, kind)
    prompts = np.random.default_rng(2).integers(3, 1000, (count, 24)).tolist()
    run = jax.jit(lambda m, ids: m(ids, m.cache(1, 32, "float32"), last=True)[0])
    mine = {}
    for how in ("float", "int8"):
        model, _ = maxjax.load(gguf, tokenizer=False, activations=how)
        mine[how] = np.stack(
            [np.asarray(run(model, jnp.asarray([p], jnp.int32)))[0] for p in prompts]
        )
        del model
    with llama_cpp_peer.Peer(gguf, context=256, cache="F32", flash="off") as peer:
        theirs = np.stack([np.asarray(peer.logits(p)) for p in prompts])
    exact = mine["float"]
    errors = [np.abs(found - exact) / exact.std() for found in (mine["int8"], theirs)]
    means, tails = [e.mean() for e in errors], [np.quantile(e, 0.999) for e in errors]
    return (
        f"{size} {kind:5} error of the logits: mean {means[0]:.4f}, llama.cpp {means[1]:.4f}, "
        f"ratio {means[0] / means[1]:.2f} wanted <= 1.1; 99.9 % {tails[0]:.4f}, {tails[1]:.4f}, "
        f"ratio {tails[0] / tails[1]:.2f} wanted <= 1.25"
    )


def memory(folder: Path, size: str, kind: str) -> str:
    """Memory of a process that has loaded a model, less that of importing maxjax, over the file's size."""
    _, gguf = files(folder, size, kind)
    code = f"""
import jax.numpy, maxjax
def held():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024
jax.numpy.ones(3).block_until_ready()
before = held()
model, _ = maxjax.load({str(gguf)!r}, tokenizer=False)
print(held() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ratio = int(done.stdout) / gguf.stat().st_size
    return f"{size} {kind:5} memory after load over the file: {ratio:.3f}  wanted <= 1.10"


def stacked(folder: Path, pairs: int, size: str = "135m", kind: str = "BF16") -> str:
    """One loop over stacked layers against the same layers unrolled."""
    directory, _ = files(folder, size, kind)
    row = Row(size, kind, 1, 128)
    sides = [Ours(load(directory, stacked=flag), row) for flag in (True, False)]
    ratios = []
    for i in range(pairs):
        found = {}
        for side in sides if i % 2 else sides[::-1]:
            found[side] = statistics.median(side.step(8))
        ratios.append(found[sides[1]] / found[sides[0]])
    return f"{size} {kind} unrolled / stacked, time of a decode step: {statistics.median(ratios):.3f}  wanted >= 0.98"


def through(folder: Path, pairs: int, size: str, kind: str) -> list[str]:
    """Times of maxjax.generate and maxjax.stream, over those of the steps they dispatch."""
    model = load(files(folder, size, kind)[0])
    prompt = np.random.default_rng(0).integers(3, 1000, 128).tolist()
    count = 128
    row = Row(size, kind, 1, 128)
    steps = Ours(model, row)

    def per_token(write: Any) -> float:
        """Seconds of a token: those of 1 + count tokens less those of 1, over count."""
        times = []
        for new in (1, 1 + count):
            start = time.perf_counter()
            text = write(
                model, None, prompt, max_new_tokens=new, eos_ids=(), cache_dtype=CACHES[kind]
            )
            times.append(time.perf_counter() - start)
            assert len(text.tokens) == new
        return (times[1] - times[0]) / count

    def streamed(*arguments: Any, **options: Any) -> Any:
        pieces = maxjax.stream(*arguments, **options)
        for _ in pieces:
            pass
        return pieces.completion

    def plain() -> float:
        return statistics.mean(statistics.median(steps.step(32)) for _ in range(4))

    ways = {"generate": maxjax.generate, "stream": streamed}
    for write in ways.values():
        per_token(write)
    ratios: dict[str, list[float]] = {"generate": [], "stream": []}
    more: dict[str, list[float]] = {"generate": [], "stream": []}
    for _ in range(pairs):
        base = plain()
        for name, write in ways.items():
            found = per_token(write)
            ratios[name].append(found / base)
            more[name].append((found - base) * 1e3)
    return [
        f"{size} {kind:4} maxjax.{name}, time of a token over that of a step: {statistics.median(ratios[name]):.3f}, "
        f"{statistics.median(more[name]):+.3f} ms  wanted <= 0.3 ms more"
        for name in ratios
    ]


def batches(folder: Path, pairs: int, size: str, kind: str) -> str:
    """Tokens a second of eight texts at once, over those of one text."""
    model = load(files(folder, size, kind)[0])
    one, eight = (Ours(model, Row(size, kind, batch, 128)) for batch in (1, 8))
    ratios = [
        8 * statistics.median(one.step(8)) / statistics.median(eight.step(8)) for _ in range(pairs)
    ]
    return f"{size} {kind:4} batch 8 / batch 1, tokens a second: {statistics.median(ratios):.2f}  wanted >= 4"


def parts(pairs: int) -> list[str]:
    """The two kernels alone against their jnp forms, each inside one jitted function."""
    lines = []
    for dtype in ("float32", "bfloat16"):
        for tokens in (1, 8, 128):
            x, w = jnp.ones((tokens, 2048), dtype), jnp.ones((8192, 2048), dtype)
            ours = jax.jit(lambda x, w: matmul(x, w))
            jnp_form = jax.jit(lambda x, w: product.definition(x, [w], [x.dtype])[0])
            ratio = against(jnp_form, ours, (x, w), pairs)
            lines.append(
                f"{dtype} product of {tokens} x 2048 with 8192 x 2048: jnp form / kernel {ratio:.1f}"
            )
    for context in (128, 2048):
        make = lambda *shape: jnp.ones(shape, jnp.bfloat16)
        q, new, cache = make(1, 9, 64), make(1, 3, 64), make(30, 1, 3, 2304, 64)
        arguments = (q, new, cache, jnp.full(1, context, jnp.int32))
        ratio = against(jax.jit(_attention_in_jnp), jax.jit(_attention), arguments, pairs)
        lines.append(
            f"bfloat16 attention of 30 layers over {context} tokens: jnp form / kernel {ratio:.1f}"
        )
    return lines + (tiles(pairs) if native.status() == "amx" else [])


def tiles(pairs: int) -> list[str]:
    """Matmuls of many tokens by the kernels for AVX-512 and for AMX, with weights in a stack."""
    lines = []
    x, w = jnp.ones((512, 2048)), jax.random.normal(jax.random.key(0), (2048, 2048))
    first = jnp.int32(0)
    dense = jax.jit(lambda x, w: matmul(x, StackSlice(w, first)))
    bits = x.astype("bfloat16"), w.astype("bfloat16")[None]
    rows = {"bfloat16": (dense, bits)}
    for kind in ("Q8_0", "Q4_K", "Q6_K"):
        quantised = lambda x, w, kind=kind: matmul(
            x, QuantArray(StackSlice(w, first), kind, "int8")
        )
        rows[kind] = jax.jit(quantised), (x, encode(kind, w)[None])
    for kind, (run, operands) in rows.items():
        levels = [functools.partial(_at_level, name, run) for name in ("avx512bf16", "amx")]
        ratio = against(*levels, operands, pairs)
        lines.append(f"{kind} product of 512 x 2048 with 2048 x 2048: avx512bf16 / amx {ratio:.1f}")
    return lines


def _at_level(name: str, run: Any, *operands: Any) -> Any:
    with native.level(name):
        return jax.block_until_ready(run(*operands))


def _attention(q: Any, new: Any, cache: Any, lengths: Any) -> Any:
    def layer(i: Any, state: Any) -> Any:
        q, keys, values = state
        return decode_attention(q, new, new, keys, values, lengths, layer=i)

    return jax.lax.fori_loop(0, cache.shape[0], layer, (q, cache, cache))[0]


def _attention_in_jnp(q: Any, new: Any, cache: Any, lengths: Any) -> Any:
    static = attention_module.Options(0.125, 0, 0.0, False, False)
    none = jnp.zeros((1, 0))  # no rotation, no sinks and no slopes

    def layer(i: Any, state: Any) -> Any:
        q, keys, values = state
        return tuple(attention_module.definition(
            static, q, new, new, keys, values, i, lengths, *[none] * 4
        ))  # fmt: skip

    grouped = q.reshape(1, new.shape[1], -1, q.shape[2])
    return jax.lax.fori_loop(0, cache.shape[0], layer, (grouped, cache, cache))[0]


def against(theirs: Any, ours: Any, arguments: Any, pairs: int) -> float:
    """The median ratio of two functions' times, measured in turns."""
    ratios = []
    for f in (theirs, ours):
        jax.block_until_ready(f(*arguments))
    for _ in range(pairs):
        times = []
        for f in (theirs, ours):
            start = time.perf_counter()
            jax.block_until_ready(f(*arguments))
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


# --- others ----------------------------------------------------------------------------------


def by_hand(model: Any, row: Row) -> Any:
    """Plain JAX as it is usually written: layers unrolled, einsum, a cache in float32 or bfloat16."""
    config, weights = model.hf_config, dict(model.state_dict())
    heads, kv, width = (
        config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    slots = 256

    def norm(x: jax.Array, w: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt((wide * wide).mean() + config["rms_norm_eps"])
        return y.astype(x.dtype) * w

    def turn(x: jax.Array, position: jax.Array) -> jax.Array:
        angle = position * config["rope_theta"] ** (-jnp.arange(0, width, 2) / width)
        a, b = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def run(
        w: dict[str, jax.Array], token: jax.Array, cache: list[Any], position: jax.Array
    ) -> Any:
        x, new = w["model.embed_tokens.weight"][token], []
        product = lambda x, name: jnp.einsum("i,oi->o", x, w[name])
        for i in range(config["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = norm(x, w[p + "input_layernorm.weight"])
            q, k, v = (
                product(h, f"{p}self_attn.{n}_proj.weight").reshape(-1, width) for n in "qkv"
            )
            keys, values = cache[i]
            keys = keys.at[:, position].set(turn(k, position))
            values = values.at[:, position].set(v)
            new.append((keys, values))
            grouped = turn(q, position).reshape(kv, heads // kv, width)
            scores = jnp.einsum("kgd,ksd->kgs", grouped, keys).astype(jnp.float32) / width**0.5
            scores = jnp.where(jnp.arange(slots) <= position, scores, -jnp.inf)
            shares = jax.nn.softmax(scores, -1).astype(x.dtype)
            y = jnp.einsum("kgs,ksd->kgd", shares, values).reshape(-1)
            x = x + product(y, p + "self_attn.o_proj.weight")
            h = norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = (product(h, f"{p}mlp.{n}_proj.weight") for n in ("gate", "up"))
            x = x + product(jax.nn.silu(gate) * up, p + "mlp.down_proj.weight")
        return product(norm(x, w["model.norm.weight"]), "model.embed_tokens.weight"), new

    dtype = DTYPES[row.kind]
    cache = [
        tuple(jnp.zeros((kv, slots, width), dtype) for _ in range(2))
        for _ in range(config["num_hidden_layers"])
    ]
    step = jax.jit(run, donate_argnums=2)
    state = [cache]

    def once() -> None:
        logits, state[0] = step(weights, jnp.int32(5), state[0], jnp.int32(row.context))
        logits.block_until_ready()

    return once


def by_torch(directory: Path, row: Row) -> Any:
    """transformers on torch, with its own cache."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, DTYPES[row.kind]))
    ids = torch.randint(3, 1000, (1, row.context))
    state = [model(ids, use_cache=True).past_key_values]

    def once() -> None:
        with torch.no_grad():
            state[0] = model(ids[:, :1], past_key_values=state[0], use_cache=True).past_key_values

    return once


def by_max(folder: Path, size: str) -> float:
    """Seconds per token of `max generate` with a float32 model, by its own figure."""
    directory, _ = files(folder, size, "F32")
    count = json.loads((directory / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for name in ("config.json", "model.safetensors"):
            (place / name).symlink_to((directory / name).resolve())
        words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, count)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(place / "tokenizer.json"))
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        settings = special | {"tokenizer_class": "PreTrainedTokenizerFast"}
        (place / "tokenizer_config.json").write_text(json.dumps(settings))
        done = subprocess.run(
            [os.environ["MAX_COMMAND"], "generate", "--model-path", temporary, "--devices", "cpu",
             "--quantization-encoding", "float32", "--prompt", "w5 w6 w7 w8", "--ignore-eos",
             "--max-new-tokens", "200", "--max-length", "512"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = re.search(r"Time per Output Token: ([0-9.]+) ms", done.stdout + done.stderr)
    assert found, done.stderr[-2000:]
    return float(found[1]) / 1e3


def others(folder: Path, pairs: int, size: str, kind: str) -> list[str]:
    """Decode steps of other programs, as ratios to maxjax's time, measured in turns."""
    row = Row(size, kind, 1, 128)
    directory, _ = files(folder, size, kind)
    model = load(directory)
    ours, lines = Ours(model, row), []
    peers = {"hand-written JAX": lambda: by_hand(load(directory, stacked=False), row)}
    if installed("torch", "transformers"):
        peers["transformers on torch"] = lambda: by_torch(directory, row)
    for name, make in peers.items():
        once = make()
        once()
        ratios = []
        for _ in range(pairs):
            mine = statistics.median(ours.step(4))
            start = time.perf_counter()
            once()
            ratios.append((time.perf_counter() - start) / mine)
        lines.append(f"{size} {kind:4} {name}, time over ours: {statistics.median(ratios):.1f}")
    if kind == "F32" and "MAX_COMMAND" in os.environ:
        by_max(folder, size)  # fills MAX's compile cache
        ratios = []
        for _ in range(3):
            its = by_max(folder, size)
            ratios.append(its / statistics.median(ours.step(64)))
        lines.append(
            f"{size} {kind:4} MAX, time over ours: {statistics.median(ratios):.1f}  wanted >= 2"
        )
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one small model, without meaning")
    parser.add_argument("--pairs", type=int, default=15, help="how many of each row")
    parser.add_argument("--models", type=Path, help="where the models are kept from run to run")
    parser.add_argument("--only", help="parts of the names of rows, with commas")
    options = parser.parse_args()
    rows = QUICK if options.quick else ROWS
    pairs = 2 if options.quick else options.pairs
    wants = lambda name: not options.only or any(p in name for p in options.only.split(","))
    print(
        f"kernels: {native.status()}; llama.cpp: {'yes' if llama_cpp_peer.available() else 'not installed'}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.models or Path(temporary)
        bandwidth = Bandwidth((8 << 20) if options.quick else (400 << 20))
        kinds = {(row.size, row.kind) for row in rows}
        if llama_cpp_peer.available() and wants("check"):
            for size, kind in sorted(kinds):
                print(check(folder, size, kind), flush=True)
        for row in rows:
            if wants(str(row)):
                print(measure(row, folder, pairs, bandwidth), flush=True)
        small = "tiny" if options.quick else "135m"
        packed = [kind for kind in PACKED if (("tiny" if options.quick else "1b"), kind) in kinds]
        if wants("accuracy") and llama_cpp_peer.available():
            for kind in packed:
                line = accuracy(
                    folder, "tiny" if options.quick else "1b", kind, 2 if options.quick else 16
                )
                print(line, flush=True)
        if wants("memory") and Path("/proc/self/status").exists():
            for kind in packed:
                print(memory(folder, "tiny" if options.quick else "1b", kind), flush=True)
        if wants("generate"):
            for kind in ("BF16",) if options.quick else ("F32", "BF16"):
                print(*through(folder, pairs, small, kind), sep="\n", flush=True)
                print(batches(folder, pairs, small, kind), flush=True)
        if wants("stack"):
            print(stacked(folder, pairs, small), flush=True)
        if wants("parts"):
            print(*parts(pairs), sep="\n", flush=True)
        if wants("others"):
            for kind in ("BF16",) if options.quick else ("F32", "BF16"):
                print(*others(folder, pairs, small, kind), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
