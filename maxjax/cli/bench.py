"""``maxjax bench``: measures loading, compilation and generation, against the memory bandwidth.

Prompts are random token ids, sampling is greedy, and no answer ends early.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ..columns import Table
from ..errors import UserInputError
from .model import LoadedModel, model_arguments, open_model, server_arguments
from .options import positive

_PROBE_BYTES = 256 << 20


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    model_arguments(parser)
    parser.add_argument("--batch", type=_counts, default=[1], metavar="B,…",
                        help="batch sizes, such as 1,8 (default 1)")  # fmt: skip
    parser.add_argument("--prompt", type=positive, default=128, metavar="N",
                        help="tokens of each prompt (default 128)")  # fmt: skip
    parser.add_argument("--new", type=positive, default=64, metavar="N",
                        help="tokens generated for each prompt (default 64)")  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=5, metavar="N",
                        help="number of runs; medians are shown (default 5)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON document")
    server_arguments(parser)
    parser.add_argument("--requests", type=positive, default=64, metavar="N",
                        help="with --url: number of requests (default 64)")  # fmt: skip
    parser.add_argument("--concurrency", type=positive, default=16, metavar="N",
                        help="with --url: requests at once (default 16)")  # fmt: skip


def _counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def bench(options: argparse.Namespace) -> Iterable[str | Table]:
    """Measures a model with random token ids: load, compile, prefill, decode.

    compile is the additional time of a first call; JAX's cache of compiled programs is off unless
    MAXJAX_COMPILE_CACHE is set. decode generates up to 32 tokens per dispatch, like maxjax.generate;
    stream generates one, as maxjax.stream does at first. The limit assumes that each step reads the
    weights and the used part of the KV cache once, at the bandwidth at which all threads read a
    large array, measured between the repeats.

    With --url it measures a server with random texts: the time to the first token, the time for each later one, and
    tokens a second, as vLLM's bench serve does.
    """
    if options.url is not None:
        from .bench_server import bench_server

        return bench_server(options)
    if options.api_key is not None or options.served_name is not None:
        options.error("--api-key and --served-name are for --url")
    if options.new < 2:
        options.error("--new must be at least 2: the first token comes from prefill")
    os.environ.setdefault("MAXJAX_COMPILE_CACHE", "0")
    opened = open_model(options, tokenizer=False)
    longest, needed = opened.model.max_length, options.prompt + options.new
    if needed > longest:
        raise UserInputError(
            f"--prompt {options.prompt} and --new {options.new} are {needed} tokens, and the"
            f" model's context is {longest}: lower one of them"
        )
    probe = Bandwidth(opened.model)
    rows = [_row(options, opened.model, batch, probe) for batch in options.batch]
    document = _about(options, opened) | {"bandwidth": _median(probe.found), "rows": rows}
    return [json.dumps(document, indent=1)] if options.json else _table(document)


def _about(options: argparse.Namespace, opened: LoadedModel) -> dict[str, Any]:
    from ..kernels import native

    devices = _devices(opened.model)
    return {
        "model": str(options.model), "class": type(opened.model).__name__,
        "load_s": opened.seconds, "weight_bytes": weight_bytes(opened.model),
        "dtype": opened.model.dtype.name, "mesh": options.mesh, "devices": len(devices),
        "platform": devices[0].platform, "kernels": native.status(), "repeats": options.repeats,
    }  # fmt: skip


# --- measuring ------------------------------------------------------------------------------


class Run(NamedTuple):
    """Seconds of one run: of the prefill, and of each decode dispatch; and its KV cache in bytes."""

    prefill: float
    steps: list[float]
    cache_bytes: int


def _row(options: argparse.Namespace, model: Any, batch: int, probe: Bandwidth) -> dict[str, Any]:
    """The measurements for one batch size."""
    first = _run(options, model, batch, most=1, only=2)
    full, single, limits = [], [], []
    for _ in range(options.repeats):
        bandwidth = probe()
        full.append(_run(options, model, batch))
        single.append(_run(options, model, batch, most=1))
        used = weight_bytes(model, batch) + full[-1].cache_bytes
        limits.append(used / ((bandwidth + probe()) / 2))
    new = options.new - 1
    prefill = _median([run.prefill for run in (*full, *single)])
    decode = _median([sum(run.steps) / new for run in full])
    stream = _median([sum(run.steps) / new for run in single])
    shares = [limit * new / sum(run.steps) for limit, run in zip(limits, full, strict=True)]
    return {
        "batch": batch, "prompt": options.prompt, "new": options.new,
        "compile_prefill_s": max(0.0, first.prefill - prefill),
        "compile_decode_s": max(0.0, first.steps[0] - stream),
        "prefill_s": prefill, "prefill_tokens_s": batch * options.prompt / prefill,
        "decode_s": decode, "decode_tokens_s": batch / decode,
        "stream_s": stream, "stream_tokens_s": batch / stream,
        "limit_s": _median(limits), "of_limit": _median(shares),
        "cache_bytes_read": full[0].cache_bytes,
    }  # fmt: skip


def _run(
    options: argparse.Namespace, model: Any, batch: int, *, most: int = 0, only: int = 0
) -> Run:
    """Generates after random prompts, up to ``most`` tokens per dispatch (0: ``MAX_STEPS``).

    With ``only``, it generates at most ``only`` tokens for each prompt.
    """
    import numpy as np

    from ..engine.batching.dispatch import MAX_STEPS
    from ..engine.batching.running import Stage, running_text
    from ..engine.generate.request import Prompt, Request
    from ..engine.generate.stream import scheduler_for
    from ..engine.sampling.settings import GREEDY
    from ..lockstep import Lockstep

    size, prompt = model.config.vocab_size, options.prompt
    rows = np.random.default_rng(0).integers(0, size, (batch, prompt)).tolist()
    request = Request(model, None, options.new, None, (), GREEDY, {})
    prompts = [Prompt(ids, None, False) for ids in rows]
    scheduler = scheduler_for(
        request, prompts, batch, chunk=options.chunk, cache_dtype=options.cache_dtype,
        together=Lockstep("bench", ()),
    )  # fmt: skip
    texts = [running_text(request, one, None, i, number=i) for i, one in enumerate(prompts)]

    def read() -> None:
        while any(text.stage is not Stage.WRITING for text in texts):
            scheduler.read()

    def write(count: int) -> None:
        scheduler.dispatch(count)
        scheduler.receive()

    try:
        for text in texts:
            scheduler.add(text)
        times = [_seconds(read)]
        left = (only or options.new) - 1
        while left > 0:
            count = min(left, most or MAX_STEPS)
            times.append(_seconds(lambda n=count: write(n)))
            left -= count
        used = _cache_bytes(model, scheduler.memory.arrays.pool, batch, prompt + options.new // 2)
        return Run(times[0], times[1:], used)
    finally:
        scheduler.close()


def _seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Bandwidth:
    """Measures the bandwidth, in bytes per second, at which a model's devices read a large array."""

    def __init__(self, model: Any):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.found: list[float] = []
        mesh = Mesh(np.array(_devices(model)), ("all",))
        count = _PROBE_BYTES // 4 // mesh.size * mesh.size
        place = NamedSharding(mesh, PartitionSpec("all"))
        self._data = jax.jit(lambda: jnp.ones(count, jnp.float32), out_shardings=place)()
        self._read = jax.jit(jnp.sum)
        self._read(self._data).block_until_ready()

    def __call__(self) -> float:
        times = [_seconds(lambda: self._read(self._data).block_until_ready()) for _ in range(3)]
        self.found.append(self._data.nbytes / _median(times))
        return self.found[-1]


def weight_bytes(model: Any, batch: int | None = None) -> int:
    """Bytes of a model's weights, summed over all devices.

    With ``batch``, the bytes that one decode step for that many sequences reads: one row for each
    from an embedding table that is not the output head, and the mean number of experts that are chosen.
    """
    from ..engine.plan.footprint import Reading
    from ..models.name_rules import HEADS, layer_of

    reading, total = Reading.of(model.config), 0
    weights = model.raw_state_dict()
    tied = not any(layer_of(name) in HEADS for name in weights)
    for name, weight in weights.items():
        share = 1 if batch is None else reading.share(name, batch, tied)
        total += int(_on_devices(weight.value) * share)
    return total


def _on_devices(value: Any) -> int:
    import jax

    shards = (s for leaf in jax.tree.leaves(value) for s in getattr(leaf, "addressable_shards", ()))
    return sum(shard.data.nbytes for shard in shards)


def _cache_bytes(model: Any, pool: Any, batch: int, tokens: int) -> int:
    """Bytes that a decode step reads of the KV cache after ``tokens`` tokens of each text, on all devices."""
    from ..models.parts.config import groups_of_config
    from ..nn.kv_cache.kinds import KeysValues

    total = 0
    for name, group in groups_of_config(model.config).items():
        size, kind = _on_devices(pool.states[name]), group.kind
        if isinstance(kind, KeysValues):
            seen = min(tokens, kind.window or tokens)
            total += size * batch * seen // (pool.states[name].keys.shape[1] * pool.page_size)
        else:  # a state that does not grow with a text is read whole
            total += size
    return total


def _devices(model: Any) -> list[Any]:
    import jax

    found = {d for leaf in jax.tree.leaves(model) for d in leaf.sharding.device_set}
    return sorted(found, key=lambda device: device.id)


def _median(values: list[float]) -> float:
    from statistics import median

    return median(values)


# --- the table ------------------------------------------------------------------------------


def _table(found: dict[str, Any]) -> Iterator[str | Table]:
    devices = f"{found['devices']} x {found['platform']}"
    mesh = f", mesh {found['mesh']}" if found["mesh"] else ""
    kernels = f", kernels {found['kernels']}" if found["platform"] == "cpu" else ""
    weights, rate = found["weight_bytes"], found["bandwidth"] / 1e9
    yield Table(
        [
            ["model", f"{found['model']}: {found['class']}, {found['dtype']}, {weights:,} bytes"],
            ["devices", devices + mesh + kernels],
            ["load", f"{found['load_s']:.2f} s, {weights / found['load_s'] / 1e9:.2g} GB/s"],
            ["memory", f"{rate:.1f} GB/s, a large array read by all threads"],
        ],
        titles=0,
    )
    yield ""
    titles = [["batch", "prompt", "new", "compile", "compile", "prefill", "decode", "decode",
               "stream", "stream", "limit", "decode"],
              ["", "tokens", "tokens", "prefill s", "decode s", "tok/s", "ms", "tok/s",
               "ms", "tok/s", "tok/s", "of limit"]]  # fmt: skip
    rows = [_cells(row) for row in found["rows"]]
    yield Table([*titles, *rows], right=set(range(len(titles[0]))), titles=2)
    yield ""
    yield (f"Medians of {found['repeats']}. ms: one token of every row. tok/s: all rows together.")  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["batch"]), str(row["prompt"]), str(row["new"]),
        f"{row['compile_prefill_s']:.2f}", f"{row['compile_decode_s']:.2f}",
        f"{row['prefill_tokens_s']:,.0f}",
        f"{row['decode_s'] * 1e3:.2f}", f"{row['decode_tokens_s']:,.1f}",
        f"{row['stream_s'] * 1e3:.2f}", f"{row['stream_tokens_s']:,.1f}",
        f"{row['batch'] / row['limit_s']:,.1f}", f"{row['of_limit']:.0%}",
    ]  # fmt: skip
