"""On a GPU: products in a loop over layers, and the kernels in Triton as they are compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import kernels
from maxjax.kernels import QuantArray, StackSlice
from maxjax.kernels import attention as door
from maxjax.kernels.attention import causal_attention
from maxjax.kernels.block_matmul import block_matmul
from maxjax.kernels.blocks import DECODERS, decode
from tests.kernels.decode_reference import OPTIONS, check, check_int8, narrowed, operands
from tests.kernels.gpu.test_attention import CASES, reference, seen
from tests.kernels.gpu.test_attention import ROUNDING as ROUNDING_OF_MANY
from tests.kernels.gpu.test_attention import operands as many
from tests.kernels.packed_operands import blocks, close

pytestmark = pytest.mark.gpu

# Half of the last place of a number in [1, 2).
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# How far a product may be from the exact one, in units of the sum of the sizes of what is added.
UNITS = {"float32": 2.0**-20, "float16": 2.0**-9, "bfloat16": 2.0**-7}


@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_products_in_a_loop(tokens):
    stack = jax.random.normal(jax.random.key(0), (4, 512, 512), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (tokens, 512), jnp.bfloat16)

    def run(x, stack):
        body = lambda i, x: kernels.matmul(x, StackSlice(stack, i)) / jnp.bfloat16(16)
        return jax.lax.fori_loop(0, 4, body, x)

    program = jax.jit(run).lower(x, stack).compile()
    assert "maxjax_matmul" not in program.as_text()
    wanted = np.asarray(x, np.float64)
    for layer in np.asarray(stack, np.float64):
        wanted = wanted @ layer.T / 16
    got = np.asarray(program(x, stack), np.float64)
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [(4096, 1024), (1024, 14336), (50256, 768)])
def test_products_of_a_token(dtype, size):
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (1, 1, size[1]), dtype)
    stack = jax.random.normal(keys[1], (2, *size), dtype)
    run = jax.jit(lambda x, stack: kernels.matmul(x, StackSlice(stack, 1)))
    program = run.lower(x, stack).compile()
    assert "maxjax_matvec" in program.as_text()
    close(program(x, stack)[0], x[0], np.asarray(stack[1], np.float64), unit=UNITS[dtype] / 2)


@pytest.mark.parametrize("q", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("which", OPTIONS)
def test_attention_of_a_token(which, q):
    pairs, options = OPTIONS[which]
    lengths = (8, 3, 0, 11) if options.get("rotating") else (8, 3, 0, 9)
    given = operands(lengths, 6, 2, 20, 9, q, q, pairs)
    check(given, of_a_token(given, **options), rounding=ROUNDING[q], **options)


@pytest.mark.parametrize(("width", "group"), [(64, 1), (80, 5), (128, 4), (192, 2), (256, 16)])
@pytest.mark.parametrize("types", ["bfloat16 bfloat16", "float32 bfloat16", "float16 float32"])
def test_attention_over_several_blocks(width, group, types):
    q, cache = types.split()
    given = operands((4999, 3, 700), 2 * group, 2, width, 5000, q, cache, seed=width)
    check(given, of_a_token(given), rounding=ROUNDING[q])
    options = {"sliding_window": 1000, "rotating": True}
    given["lengths"][0] = 9000
    check(given, of_a_token(given, **options), rounding=ROUNDING[q], **options)


def test_attention_over_an_int8_cache():
    given, floats = narrowed(operands((254, 599, 255, 0), 12, 2, 80, 600))
    check_int8(given, floats, of_a_token(given, sliding_window=300), sliding_window=300)


@pytest.mark.parametrize("dtype", ROUNDING_OF_MANY)
@pytest.mark.parametrize("which", CASES)
def test_attention_of_many_tokens(which, dtype, monkeypatch):
    monkeypatch.setattr(door, "MOST_SCORES", 100)
    q, cache, positions, key_positions = many(dtype)
    options = CASES[which]
    run = jax.jit(
        lambda q, *cache: causal_attention(
            q, cache, 1, positions, key_positions, scale=0.3, **options
        )
    )
    program = run.lower(q, *cache).compile()
    assert "maxjax_attention" in program.as_text()
    sees = seen(positions, key_positions, options.get("sliding_window"))
    exact, size = reference(q, *(a[1] for a in cache), sees, 0.3, options.get("soft_cap"))
    got = np.asarray(program(q, *cache), np.float64)
    assert (np.abs(got - exact) <= 4 * ROUNDING_OF_MANY[dtype] * size).all()


@pytest.mark.parametrize("encoding", DECODERS)
@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [("float32", 1), ("float16", 3), *(("bfloat16", n) for n in (1, 4, 5, 37, 200))],
)
def test_products_with_blocks(encoding, dtype, tokens):
    run = jax.jit(lambda x, raw: kernels.matmul(x, QuantArray(StackSlice(raw, 1), encoding)))
    for rows, depth in [(24, 256), (7, 768), (65, 2304), (600, 4096)]:
        raw = np.stack([blocks(encoding, rows, depth, seed) for seed in range(2)])
        x = np.random.default_rng(1).standard_normal((tokens, depth)).astype(jnp.dtype(dtype))
        program = run.lower(x, raw).compile()
        assert "maxjax_packed_matmul" in program.as_text()
        with jax.default_device(jax.devices("cpu")[0]):
            exact = np.asarray(decode(encoding, raw[1]), np.float64)
        close(program(x, raw), x, exact, unit=UNITS[dtype])


def test_products_with_blocks_of_many_tokens_in_float32():
    raw, x = blocks("Q4_K", 65, 2304), jax.random.normal(jax.random.key(0), (37, 2304))
    with jax.default_matmul_precision("highest"):
        got = jax.jit(lambda x, raw: kernels.matmul(x, QuantArray(raw, "Q4_K")))(x, raw)
    close(got, x, np.asarray(decode("Q4_K", raw), np.float64), unit=UNITS["float32"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [16, 64])
def test_blocks_meet_their_matrices(dtype, rows):
    for out, depth in [(48, 96), (256, 640)]:
        keys = jax.random.split(jax.random.key(out))
        x = jax.random.normal(keys[0], (5, rows, depth), dtype)
        w = jax.random.normal(keys[1], (4, out, depth), dtype)
        owner = np.array([3, 0, -1, 2, 0], np.int32)
        program = jax.jit(block_matmul).lower(x, w, owner).compile()
        assert "maxjax_block_matmul" in program.as_text()
        got, used = np.asarray(program(x, w, owner), np.float64), np.flatnonzero(owner >= 0)
        for block in used:
            close(got[block], x[block], np.asarray(w[owner[block]], np.float64), unit=UNITS[dtype])


def of_a_token(given, **options):
    """The results of a program that calls the kernel."""
    run = jax.jit(functools.partial(kernels.decode_attention, **options))
    program = run.lower(**given).compile()
    assert program.as_text().count("maxjax_decode_attention") >= 1
    return jax.device_get(program(**given))
