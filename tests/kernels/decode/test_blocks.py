"""Decode attention in blocks, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels.decode import blocks
from maxjax.kernels.decode.step import Options
from tests.kernels.decode_reference import (
    NAMES,
    OPTIONS,
    by_head,
    check,
    check_int8,
    narrowed,
    operands,
)  # fmt: skip

# Of so many devices, one has blocks of the least number of slots.
MANY = 1 << 30


@functools.lru_cache
def program(static, width, form=blocks.in_blocks, devices=MANY):
    """A jitted form that takes what ``decode_attention`` does."""

    @jax.jit
    def run(given):
        q, k, v, keys, values, lengths = (jnp.asarray(given[name]) for name in NAMES)
        batch, heads, _ = q.shape
        cos, sin = given.get("rope") or (jnp.zeros((batch, 0)),) * 2
        grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], width)
        layered = [a if keys.ndim == 5 else a[None] for a in (keys, values)]
        out, *caches = form(
            static, devices, grouped, k, v, *layered, jnp.int32(given.get("layer", 0)), lengths,
            cos, sin, *by_head(given), *given.get("scales", ()),
        )  # fmt: skip
        caches = caches if keys.ndim == 5 else [a[0] for a in caches]
        return out.reshape(q.shape), *caches

    return run


def static_of(width, options):
    scale = options.get("scale", 1 / np.sqrt(width))
    return Options(
        float(scale), options.get("sliding_window") or 0, options.get("soft_cap") or 0.0,
        options.get("interleaved", False), options.get("rotating", False),
    )  # fmt: skip


def result(given, **options):
    width = given["q"].shape[2]
    arrays = {name: a for name, a in given.items() if name != "layer"}
    layer = {"layer": np.int32(given["layer"])} if "layer" in given else {}
    return program(static_of(width, options), width)(arrays | layer)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("which", OPTIONS)
def test_options(which):
    pairs, options = OPTIONS[which]
    given = operands((8, 3, 0, 9), 6, 2, 20, 9, "bfloat16", "bfloat16", pairs)
    check(given, result(given, **options), **options)


def test_sinks():
    pairs, options = OPTIONS["all"]
    given = operands((8, 3, 0, 11, -1), 6, 2, 20, 9, "bfloat16", "bfloat16", pairs, sinks=True)
    check(given, result(given, **options), **options)


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("options", [{}, {"rotating": True, "sliding_window": 300}], ids=repr)
def test_several_blocks(options, slopes):
    """The last block has slots of the one before; some rows see nothing of some blocks."""
    lengths = (127, 128, -1, 0, 299, 300, 431, 2**31 - 1)
    given = operands(lengths, 4, 2, 16, 300, cache="bfloat16", seed=3, slopes=slopes)
    check(given, result(given, **options), **options)


@pytest.mark.sampled
@pytest.mark.parametrize("rotating", [False, True])
@pytest.mark.parametrize("window", [None, 1, 100, 257])
def test_windows_over_several_blocks(window, rotating):
    given = operands((254, 255, 256, 599, 600, 700, 1199, 5), 2, 1, 16, 600)
    options = {"sliding_window": window, "rotating": rotating}
    check(given, result(given, **options), **options)


def test_int8():
    given, floats = narrowed(operands((254, 599, 255, 0), 12, 2, 80, 600))
    check_int8(given, floats, result(given, sliding_window=300), sliding_window=300)


def test_what_no_token_sees_does_not_matter():
    given = operands((140, 2), slots=300)
    for name, value in (("keys", np.nan), ("values", np.inf)):
        given[name][0, :, 141:], given[name][1, :, 3:] = value, value
        given[name][0, :, :138] = value
    check(given, result(given, sliding_window=3), sliding_window=3)


def test_slots_that_no_sequence_has_filled_are_not_read():
    """The number of turns of the loop is that of the longest sequence."""
    run = lambda *lengths: blocks._range(
        Options(1.0, 0, 0.0, False, False), jnp.array(lengths), jnp.array(lengths) >= 0, 600
    )
    assert list(map(int, run(5, 130, -1))) == [0, 131]
    assert list(map(int, run(-1, -1))) == [600, 0]
    window = Options(1.0, 10, 0.0, False, True)
    run = lambda *lengths: blocks._range(window, jnp.array(lengths), jnp.array(lengths) >= 0, 600)
    assert list(map(int, run(400, 420))) == [391, 421]
    assert list(map(int, run(400, 604))) == [0, 600]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_it_is_what_platforms_without_a_kernel_run(platform):
    from maxjax.kernels import decode_attention

    given = operands((5, 0))
    values = [given[name] for name in NAMES]
    text = jax.jit(decode_attention).trace(*values).lower(lowering_platforms=(platform,)).as_text()
    # On TPUs the token is written by one, see tests/kernels/tpu/test_cache_write.py.
    assert "stablehlo.while" in text and text.count("@tpu_custom_call") == (platform == "tpu")
