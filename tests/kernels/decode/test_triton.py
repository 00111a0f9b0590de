"""The Triton kernel of decode attention, interpreted on a CPU, against NumPy in float64."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import decode_attention
from maxjax.kernels.decode import triton
from maxjax.kernels.decode.step import Options
from tests.kernels.decode.test_blocks import program, static_of
from tests.kernels.decode_reference import (
    NAMES,
    OPTIONS,
    TYPES,
    check,
    check_int8,
    narrowed,
    operands,
)  # fmt: skip

# Half of the last place of a number in [1, 2).
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def interpreted(static, _, *operands):
    return triton.kernel(static, *operands, interpret=True)


def result(given, **options):
    width = given["q"].shape[2]
    arrays = {name: a for name, a in given.items() if name != "layer"}
    layer = {"layer": np.int32(given["layer"])} if "layer" in given else {}
    return program(static_of(width, options), width, interpreted)(arrays | layer)


def right(given, **options):
    rounding = ROUNDING[given["q"].dtype.name]
    check(given, result(given, **options), rounding=rounding, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", OPTIONS)
@pytest.mark.parametrize("q", TYPES)
def test_options(which, q):
    pairs, options = OPTIONS[which]
    lengths = (8, 3, 0, 11) if options.get("rotating") else (8, 3, 0, 9)
    right(operands(lengths, 6, 2, 20, 9, q, q, pairs), **options)


def test_sinks():
    """Of one program, and of several for a sequence."""
    pairs, options = OPTIONS["all"]
    right(operands((8, 3, 0, 11, -1), 6, 2, 20, 9, pairs=pairs, sinks=True), **options)
    right(operands((5000, 7), 4, 2, 16, 6000, sinks=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("width", "group"), [(64, 1), (64, 8), (80, 5), (96, 3), (128, 4), (192, 2), (256, 16)]
)
@pytest.mark.parametrize("types", ["bfloat16 bfloat16", "float32 bfloat16", "float16 float32"])
def test_types_and_sizes(width, group, types):
    q, cache = types.split()
    right(operands((299, 3), 2 * group, 2, width, 300, q, cache, seed=width))


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
def test_keys_that_are_the_values(cache):
    """Of latent attention: wide heads, in two parts, and more query heads than a program has."""
    q = "float32" if cache == "int8" else cache
    given = operands(
        (299, 3, -1, 40), 20, 1, 576, 300, q, q if cache != "int8" else "float32", seed=1
    )
    given |= {"v": given["k"], "values": given["keys"]}
    assert triton.tiles(4, 20, 576, 300).parts == 2

    def shared(static, _, q, k, v, keys, values, *rest):
        nothing = jnp.zeros((), v.dtype), jnp.zeros((), values.dtype)
        out, keys, _, *scales = triton.kernel(
            static, q, k, nothing[0], keys, nothing[1], *rest[:7], interpret=True
        )
        return out, keys, keys, *scales, *scales

    if cache == "int8":
        given, floats = narrowed(given)
        found = program(static_of(576, {}), 576, shared)(given)
        check_int8(given, floats, found)
    else:
        check(given, program(static_of(576, {}), 576, shared)(given), rounding=ROUNDING[q])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rotating", [False, True])
@pytest.mark.parametrize("window", [None, 1, 255, 300])
def test_lengths_around_the_parts_of_the_work(window, rotating):
    """Blocks have 128 slots, and each of the programs of a sequence a few blocks."""
    lengths = (-1, 0, 127, 128, 255, 256, 257, 599, 600, 700, 1199, 2**31 - 1)
    given = operands(lengths, 2, 1, 20, 600, cache="float32")
    right(given, rotating=rotating, sliding_window=window)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 3000}, {"rotating": True}], ids=repr)
def test_programs_that_have_several_blocks(options):
    """One sequence is divided between many programs, many are not."""
    right(operands((5000, 7999, 9000), 2, 1, 16, 8000, seed=1), **options)
    assert triton.tiles(3, 2, 16, 8000).splits > 50
    lengths = np.random.default_rng(0).integers(0, 500, 140)
    right(operands(lengths, 8, 4, 16, 400), **options)
    assert triton.tiles(560, 2, 16, 400).splits == 1


def test_what_no_token_sees_is_not_read():
    given = operands((140, 2), slots=300)
    for name, value in (("keys", np.nan), ("values", np.inf)):
        given[name][0, :, 141:], given[name][1, :, 3:] = value, value
        given[name][0, :, :138] = value
    right(given, sliding_window=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", ["plain", "odd", "window"])
def test_int8(which):
    sizes, options = {
        "plain": ({"lengths": (5, 0, -1, 9)}, {}),
        "odd": (
            {"lengths": (254, 599, 255, 0), "slots": 600, "heads": 5, "kv_heads": 1, "width": 33},
            {"soft_cap": 3.0},
        ),
        "window": ({"lengths": (300, 17, 600, 9), "slots": 300}, {"rotating": True, "sliding_window": 200}),
    }[which]  # fmt: skip
    given, floats = narrowed(operands(**sizes))
    check_int8(given, floats, result(given, **options), **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("q", ["float16", "bfloat16"])
def test_int8_with_queries_of_16_bits(q):
    """Scales of any size: weights times scales are not rounded to float16."""
    given, floats = narrowed(operands((254, 599), 4, 2, 64, 600, q, "float32"))
    small = tuple(s * np.float32(1e-6) for s in given["scales"])
    given["scales"] = (given["scales"][0], small[1])
    new = result(given)
    numbers, scales = np.asarray(new[2])[1], np.asarray(new[4])[1]
    wide = (np.asarray(new[1])[1] * np.asarray(new[3])[1][..., None], numbers * scales[..., None])
    for b, n in enumerate((255, 600)):
        for h in range(4):
            keys, values = (a[b, h // 2, :n].astype(np.float64) for a in wide)
            scores = keys @ floats["q"][b, h].astype(np.float64) / 8
            weights = np.exp(scores - scores.max())
            exact = weights @ values / weights.sum()
            bound = 2.0**-8 * 4 * (weights @ np.abs(values)) / weights.sum() + 1e-7
            assert (np.abs(np.asarray(new[0][b, h], np.float64) - exact) <= bound).all()


def test_scores_of_no_size_at_all_count_for_nothing():
    given = operands((511,), 1, 1, 16, 512)
    given["q"][:], given["keys"][:], given["k"][:] = 1e20, 0, 0
    for rows in (slice(3, 5), slice(0, 256)):
        given["keys"][0, 0, rows] = -1e20  # each product is -1e40
        rest = np.delete(np.arange(511), rows)
        wanted = np.vstack([given["values"][0, 0, rest], given["v"][0]]).astype(np.float64).mean(0)
        np.testing.assert_allclose(result(given)[0][0, 0], wanted, rtol=1e-4, atol=1e-5)


# --- where it runs --------------------------------------------------------------------------------


def lowered(options=None, platform="cuda", **sizes):
    given = operands(**({"lengths": (5, 0)} | sizes))
    run = jax.jit(functools.partial(decode_attention, **(options or {})))
    values = [given[name] for name in NAMES]
    return run.trace(*values).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.skipif(jax.__version__ >= "0.11", reason="it lowers Triton only for devices it knows")
def test_it_is_what_programs_for_nvidia_gpus_call():
    text = lowered()
    assert text.count("xla.gpu.triton") == 1 and "maxjax_decode_attention" in text


def test_what_it_lacks_is_logged_and_runs_in_jnp(caplog):
    with caplog.at_level(logging.DEBUG, "maxjax"):
        text = lowered(width=641)
    assert "triton" not in text and "stablehlo.while" in text
    assert "heads are 641 wide, at most 640" in caplog.text


def test_addresses_in_32_bits():
    """An int8 cache of 2 to 4 GiB on a device would be read at wrong addresses."""
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    q, k = of(jnp.bfloat16, 1, 8, 4, 128), of(jnp.bfloat16, 1, 8, 128)
    static = Options(1.0, 0, 0.0, False, False)
    lacks = lambda layers, dtype: triton.lacks(
        static, q, k, k, of(dtype, layers, 1, 8, 1 << 16, 128)
    )
    assert not lacks(32, jnp.int8) and not lacks(65, jnp.int8) and not lacks(64, jnp.bfloat16)
    assert "between 2 and 4 GiB" in lacks(33, jnp.int8)
    assert "between 2 and 4 GiB" in lacks(64, jnp.int8)
