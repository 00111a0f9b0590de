"""The tables of docs/kernels.md: which attention kernel programs for each platform contain."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxjax.kernels import decode_attention
from maxjax.kernels.attention import attention, causal_attention

PLATFORMS = {"CPU": "cpu", "NVIDIA GPU": "cuda", "TPU": "tpu", "AMD GPU": "rocm"}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def of_a_token(
    heads=8, kv_heads=2, width=64, cache="bfloat16", q="bfloat16", slots=512, layers=2, shared=False,
    **options,
):  # fmt: skip
    """A decode step over a cache of layers, and its operands."""
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    keys = of(cache, layers, 1, kv_heads, slots, width)
    new = of(q, 1, kv_heads, width)
    given = [of(q, 1, heads, width), new, new, keys, keys, of("int32", 1)]
    scales = (of("float32", *keys.shape[:-1]),) * (1 if shared else 2) if cache == "int8" else None

    def run(*arrays, scales):
        if shared:
            arrays = (*arrays[:2], None, arrays[3], None, arrays[5])
        return decode_attention(*arrays, layer=1, scales=scales, **options)

    return run, given, scales


def batched(of):
    run, given, scales = of
    return lambda *a, scales: jax.vmap(run)(*(x[None] for x in a), scales=scales), given, scales


# Rows of the table, by their first cell.
CASES = {
    "float32, float16, bfloat16": [
        functools.partial(of_a_token, cache=cache, q=q)
        for cache, q in (("float32", "float32"), ("float16", "bfloat16"), ("bfloat16", "bfloat16"))
    ],
    "int8 with scales": [functools.partial(of_a_token, cache="int8")],
    "window, rotating cache, soft cap, sinks": [
        lambda: of_a_token(sinks=jnp.zeros(8)),
        functools.partial(of_a_token, sliding_window=100),
        functools.partial(of_a_token, sliding_window=100, rotating=True),
        functools.partial(of_a_token, soft_cap=30.0),
    ],
    "slopes (ALiBi)": [lambda: of_a_token(slopes=jnp.zeros(8))],
    "heads 64 to 640 wide, any number of query heads for a KV head": [
        *(functools.partial(of_a_token, width=width) for width in (64, 80, 256, 320, 576)),
        functools.partial(of_a_token, heads=264, kv_heads=1, width=64),
    ],
    "keys that are the values too (latent attention)": [
        functools.partial(of_a_token, heads=128, kv_heads=1, width=576, shared=True),
        functools.partial(of_a_token, cache="int8", kv_heads=1, width=288, shared=True),
    ],
    "a cache in pages, heads of a multiple of 128": [
        lambda: of_a_token(table=jnp.zeros((1, 1), jnp.int32), width=128),
        lambda: of_a_token(table=jnp.zeros((1, 1), jnp.int32), width=128, cache="int8"),
    ],
    "a cache in pages, other heads": [lambda: of_a_token(table=jnp.zeros((1, 1), jnp.int32))],
    "heads wider than 640": [functools.partial(of_a_token, width=656)],
    "int8, keys of all layers 2 to 4 GiB on one device": [
        functools.partial(of_a_token, cache="int8", kv_heads=8, width=128, slots=1 << 16, layers=33)
    ],
    "other types": [functools.partial(of_a_token, cache="float8_e4m3fn")],
    "`vmap`": [lambda: batched(of_a_token())],
}  # fmt: skip


def of_tokens(tokens=4096, width=64, q="bfloat16", cache="bfloat16", how="value", **options):
    """Tokens of two sequences after those of a cache, and its operands."""
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    keys = of(cache, 2, 2, 2, tokens, width)
    scales = (of("float32", *keys.shape[:-1]),) * 2 if cache == "int8" else ()

    def run(q, keys, starts, *, scales):
        positions = starts[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        cache = [keys, keys, *scales]
        key_positions = jnp.arange(tokens, dtype=jnp.int32)[None]
        return causal_attention(q, cache, 1, positions, key_positions, **options)

    def loss(q, *rest, scales):
        return jnp.sum(run(q, *rest, scales=scales), dtype=jnp.float32)

    found = (run if how == "value" else jax.value_and_grad(loss)), [
        of(q, 2, tokens, 4, width), keys, of("int32", 2)
    ], scales  # fmt: skip
    return batched(found) if how == "vmap" else found


def of_an_encoder(tokens=2048):
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    x = of("bfloat16", 2, tokens, 4, 64)
    run = lambda x, mask, *, scales: attention(x, x, x, mask)
    return run, [x, of("bool", 2, tokens)], None


CASES |= {
    "few scores (2²³ at most, and up to 256 keys or as many as queries)": [
        functools.partial(of_tokens, tokens=256),
        functools.partial(of_an_encoder, tokens=512),
    ],
    "float32, bfloat16; an int8 cache": [
        functools.partial(of_tokens, q=q, cache=cache)
        for q, cache in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "int8"))
    ],
    "float16": [functools.partial(of_tokens, q="float16", cache="bfloat16")],
    "windows, soft caps, sinks, starts of each sequence, keys that are padding": [
        lambda: of_tokens(sinks=jnp.zeros(4)),
        functools.partial(of_tokens, sliding_window=100, soft_cap=30.0),
        of_an_encoder,
    ],
    "heads of 64 to 256": [
        functools.partial(of_tokens, width=width) for width in (64, 80, 96, 128, 192, 256)
    ],
    "derivatives: the value": [functools.partial(of_tokens, how="derivative")],
    "heads wider than 256; scores not in float32": [
        functools.partial(of_tokens, width=320),
        functools.partial(of_tokens, softmax_dtype="bfloat16"),
    ],
    "KV heads repeated to divide a mesh axis; slopes (ALiBi)": [
        functools.partial(of_tokens, repeats=2),
        lambda: of_tokens(slopes=jnp.zeros(4)),
    ],
    "`vmap`, `jax.export`": [functools.partial(of_tokens, how="vmap")],
}


def traced(case):
    run, given, scales = case
    return jax.jit(run).trace(*given, scales=scales)


def kernel(platform, of):
    """What the program for a platform runs."""
    text = of.lower(lowering_platforms=(platform,)).as_text()
    if "xla.gpu.triton" in text:
        return "Triton"
    if "maxjax_attention" in text:
        return "Mosaic"
    if "@maxjax_decode_attention" in text:
        return "C++"
    return "blocks" if "stablehlo.while" in text else "definition"


def table():
    """The rows of the tables, as {first cell: {platform: kernel}}."""
    section = DOCUMENT.read_text().partition("## Which attention kernel runs where")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [row for row in cells if row[1] not in PLATFORMS and row[1] != "---"]
    return {row[0]: dict(zip(PLATFORMS, row[1:], strict=True)) for row in rows}


def test_every_row_has_a_case():
    assert list(table()) == list(CASES)


@pytest.mark.sampled(8)
@pytest.mark.skipif(jax.__version__ >= "0.11", reason="it lowers Triton only for devices it knows")
@pytest.mark.parametrize("row", CASES)
def test_programs_contain_what_the_table_says(row):
    """Where a platform has no kernel for a row, its first case shows it."""
    expected = table()[row]
    kernels = {n: what for n, what in expected.items() if what not in ("blocks", "definition")}
    for number, case in enumerate(CASES[row]):
        wanted = expected if number == 0 else kernels
        of = traced(case())
        assert {name: kernel(PLATFORMS[name], of) for name in wanted} == wanted
