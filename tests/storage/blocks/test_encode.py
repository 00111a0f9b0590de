"""Blocks as ggml makes them: its own library's are recorded, the gguf package makes the simple ones."""

import hashlib
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from gguf import quants
from hypothesis import given
from hypothesis import strategies as st

from maxjax.storage.blocks import ENCODERS, LAYOUTS, decode, encode, encoders
from maxjax.storage.blocks.encode_native import encode_native, level
from maxjax.storage.blocks.encoders import encode_with_numpy
from maxjax.storage.blocks.search import nearest
from tests.properties import examples
from tests.storage.blocks.rows import KINDS, WIDTH, Source, importance, rows

TYPES = sorted(ENCODERS)
SIMPLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
WEIGHTED = [name for name in TYPES if name not in ("Q8_0", "MXFP4")]
# "numpy" is the definition, the others are levels of the compiled library.
IMPLEMENTATIONS = ["numpy", "portable", "avx2", "avx512"]
K_QUANTS = [name for name in TYPES if name.endswith("_K")]
GOLDEN = Path(__file__).parent / "goldens" / "blocks.npz"
# Where a negative zero is the first of a block of zeros, the package keeps the sign in the scale.
BOTH_ZEROS = {"zeros of both signs", "sparse"}
# Their scales have no finite inverse: the package converts infinities to integers.
NO_INVERSE = {"infinite inverses", "subnormal", "mixed runs of 32"}
# Below 2 ** -125 ggml's exponent of MXFP4 wraps around, and values become huge.
NO_EXPONENT = {"infinite inverses", "subnormal", "mixed runs of 32"}


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


def bell(*shape: int, seed: int = 99) -> np.ndarray:
    return Source(seed).bell(*shape)


def by_package(name: str, values: np.ndarray) -> np.ndarray:
    return quants.quantize(values, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", TYPES)
def test_the_golden_is_of_these_kinds_and_types(golden, name):
    assert golden["kinds"].tolist() == list(KINDS)
    assert golden[name].shape[0] == golden[f"{name} digests"].shape[0] == len(KINDS)


def encoded_by(
    implementation: str, name: str, values: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Blocks ``[n, nbytes]`` of rows, all of them with the importance ``weights`` of one row."""
    layout = LAYOUTS[name]
    values = np.ascontiguousarray(values).reshape(-1, layout.elements)
    blocks = np.empty((len(values), layout.nbytes), np.uint8)
    if implementation == "numpy":
        encode_with_numpy(layout, values, weights, blocks)
    else:
        done = encode_native(name, values, weights, blocks, level=implementation)
        if done is None:
            pytest.skip(f"there is no {implementation} here")
        assert done
    return blocks


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_are_those_of_ggml(golden, name, implementation):
    for number, kind in enumerate(golden["kinds"].tolist()):
        if name == "MXFP4" and kind in NO_EXPONENT:
            continue
        blocks = encoded_by(implementation, name, rows(kind))
        shown = golden[name][number]
        np.testing.assert_array_equal(blocks[: len(shown)], shown)
        digest = hashlib.sha256(blocks.tobytes()).digest()
        assert digest == golden[f"{name} digests"][number].tobytes(), kind


@pytest.mark.sampled
@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_with_an_importance_are_those_of_ggml(golden, name, implementation):
    for number, kind in enumerate(golden["kinds"].tolist()):
        blocks = encoded_by(implementation, name, rows(kind), importance())
        digest = hashlib.sha256(blocks.tobytes()).digest()
        assert digest == golden[f"{name} importance digests"][number].tobytes(), kind


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("count", [1, 3, 15, 16, 17, 33])
def test_any_number_of_blocks_on_every_level(name, count):
    elements = LAYOUTS[name].elements
    values = bell(count, elements)
    weights = importance()[:elements]
    whole = encoded_by("numpy", name, values), encoded_by("numpy", name, values, weights)
    for implementation in IMPLEMENTATIONS[1:]:
        if encode_native(name, values, None, np.empty_like(whole[0]), level=implementation):
            np.testing.assert_array_equal(encoded_by(implementation, name, values), whole[0])
            found = encoded_by(implementation, name, values, weights)
            np.testing.assert_array_equal(found, whole[1])


def test_which_encoders_are_used(monkeypatch):
    from maxjax.storage.blocks import encode_native as module

    found = level()
    monkeypatch.setenv("MAXJAX_KERNELS", "off")
    module._compiled.cache_clear()
    try:
        assert level() == "numpy"
        one = encode("Q4_K", rows("bell")[:3])
    finally:
        monkeypatch.undo()
        module._compiled.cache_clear()
    assert level() == found
    np.testing.assert_array_equal(encode("Q4_K", rows("bell")[:3]), one)


@pytest.mark.parametrize("name", WEIGHTED)
def test_what_is_important_is_more_exact(name):
    """The error of the important half of the inputs is smaller, that of the others may grow."""
    values = rows("bell")
    weights = np.where(np.arange(WIDTH) % 2, np.float32(100), np.float32(1))
    error = lambda blocks: ((decode(name, blocks) - values) ** 2 * weights).sum()
    assert error(encode(name, values, importance=weights)) < 0.9 * error(encode(name, values))


@pytest.mark.parametrize("name", WEIGHTED)
def test_importance_of_experts(name):
    values, weights = bell(3, 5, 2 * WIDTH), np.abs(bell(3, 2 * WIDTH))
    blocks = encode(name, values, importance=weights)
    for one, inputs, found in zip(values, weights, blocks, strict=True):
        np.testing.assert_array_equal(encode(name, one, importance=inputs), found)


@pytest.mark.parametrize(
    "weights, says",
    [
        (np.ones(255), "must be \\[256\\], or .*; got \\[255\\]"),
        (np.ones((2, 256)), "got \\[2, 256\\]"),
        (np.full(256, -1.0), "negative"),
        (np.full(256, np.nan), "negative values, or values that are not finite"),
    ],
)
def test_an_importance_that_does_not_fit(weights, says):
    with pytest.raises(ValueError, match=says):
        encode("Q4_K", bell(3, 256), importance=weights)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in BOTH_ZEROS | NO_INVERSE])
@pytest.mark.parametrize("name", SIMPLE)
def test_simple_blocks_are_those_of_the_gguf_package(name, kind):
    values = rows(kind)
    np.testing.assert_array_equal(encode(name, values), by_package(name, values))


@given(
    values=arrays.arrays(
        np.float32,
        (2, 64),
        elements=st.floats(-50000, 50000, width=32),
        fill=st.just(0),
    )
)
@examples(60)
def test_any_simple_blocks_are_those_of_the_gguf_package(values):
    values = np.where(np.abs(values) < 1e-30, np.float32(0), values)
    for name in SIMPLE:
        np.testing.assert_array_equal(encode(name, values), by_package(name, values), name)


@given(values=arrays.arrays(np.float32, 256, elements=st.floats(width=32)))
@examples(60)
def test_any_numbers_are_encoded_or_refused(values):
    for name in TYPES:
        assert_encoded_or_refused(name, values)


def assert_encoded_or_refused(name, values):
    try:
        blocks = encode(name, values)
    except ValueError:
        assert not np.abs(values).max() < 60000  # NaN as well
    else:
        assert np.isfinite(decode(name, blocks)).all()
        largest = np.abs(values).max()
        # A block whose scale is no number of float16 is zero; of others, the largest value stays.
        part = {"MXFP4": 4, "Q2_K": 1, "Q3_K": 2}.get(name, 6)
        assert np.abs(decode(name, blocks) - values).max() <= largest / part + 1e-4


def scalar_q4_k(x: np.ndarray) -> tuple[np.float32, np.float32]:
    """Scale and minimum of 32 values, one operation after the other."""
    f = np.float32
    magnitude = f(0)
    for v in x:
        magnitude += v * v
    root = np.sqrt(magnitude / f(32))
    weights = [root + abs(v) for v in x]
    low, high = min(f(0), x.min()), x.max()
    sum_w = sum_x = f(0)
    for w, v in zip(weights, x, strict=True):
        sum_w += w
        sum_x += w * v

    def error(q, scale, minimum):
        found = f(0)
        for w, v, k in zip(weights, x, q, strict=True):
            difference = scale * k + minimum - v
            found += w * (difference * difference)
        return found

    def integers(inverse, minimum):
        return [f(max(0, min(15, int(np.rint(inverse * (v - minimum)))))) for v in x]

    inverse = f(15) / (high - low)
    scale, minimum = f(1) / inverse, low
    best = error(integers(inverse, minimum), scale, minimum)
    for step in range(21):
        inverse = (f(-1) + f(0.1) * f(step) + f(15)) / (high - minimum)
        q = integers(inverse, minimum)
        sum_q = sum_qq = sum_qx = f(0)
        for w, v, k in zip(weights, x, q, strict=True):
            sum_q += w * k
            sum_qq += w * k * k
            sum_qx += w * k * v
        determinant = sum_w * sum_qq - sum_q * sum_q
        if determinant > 0:
            new = (sum_w * sum_qx - sum_x * sum_q) / determinant
            offset = (sum_qq * sum_x - sum_q * sum_qx) / determinant
            if offset > 0:
                offset, new = f(0), sum_qx / sum_qq
            found = error(q, new, offset)
            if found < best:
                best, scale, minimum = found, new, offset
    return scale, minimum


@pytest.mark.parametrize("kind", ["bell", "positive", "spikes", "offset"])
def test_the_search_of_q4_k_is_the_formula_in_plain_python(kind):
    values = rows(kind)[:4]
    blocks = encode("Q4_K", values)
    d, dmin, _, _ = LAYOUTS["Q4_K"].split(blocks)
    for row, values_of in enumerate(values.reshape(4, 8, 32)):
        found = [scalar_q4_k(part) for part in values_of]
        assert d[row] == np.float16(max(scale for scale, _ in found) / np.float32(63))
        assert dmin[row] == np.float16(max(-minimum for _, minimum in found) / np.float32(63))


def half_steps(name: str, values: np.ndarray) -> np.ndarray:
    """Of each block of 32 the half of a step, or a whole one where the other end is cut off."""
    blocks = values.reshape(-1, 32)
    magnitude, span = np.abs(blocks).max(1), np.ptp(blocks, axis=1)
    return {
        "Q4_0": magnitude / 8,
        "Q5_0": magnitude / 16,
        "Q4_1": span / 30,
        "Q5_1": span / 62,
        "Q8_0": magnitude / 254,
    }[name]


@pytest.mark.parametrize("kind", ["bell", "uniform", "positive", "weights", "mixed", "spikes"])
@pytest.mark.parametrize("name", SIMPLE)
def test_values_come_back_within_half_a_step(name, kind):
    values = rows(kind)
    wrong = np.abs(decode(name, encode(name, values)) - values).reshape(-1, 32).max(1)
    # d and m are rounded to 11 bits, or to multiples of 2 ** -24; d counts up to 127 times. With a
    # minimum the span may be twice the magnitude, and the minimum is rounded too.
    rounding = np.abs(values).reshape(-1, 32).max(1) * 3 * 2**-11 + 128 * 2**-25
    assert (wrong <= half_steps(name, values) + rounding).all()
    # It is a bound that is nearly reached, so less than half of it is too little.
    assert (wrong > half_steps(name, values) * 0.5).any()


@pytest.mark.parametrize("kind", ["bell", "uniform", "weights"])
def test_more_bits_lose_less_and_a_search_beats_the_extremes(kind):
    values = rows(kind)
    lost = {
        name: float(np.mean((decode(name, encode(name, values)) - values) ** 2)) for name in TYPES
    }
    assert lost["Q8_0"] < lost["Q6_K"] < lost["Q5_K"] < lost["Q4_K"] < lost["Q4_0"]
    assert lost["Q4_0"] < lost["Q3_K"] < lost["Q2_K"] and lost["Q4_0"] < lost["MXFP4"]
    assert lost["Q5_K"] < lost["Q5_1"] * 1.1 and lost["Q4_K"] < lost["Q4_1"] * 1.1
    # A bit less is a step twice as large, so about four times the mean square.
    assert 2.5 < lost["Q4_K"] / lost["Q5_K"] < 6


@pytest.mark.parametrize("name", K_QUANTS)
def test_values_of_k_quants_come_back_within_their_steps(name):
    values = rows("mixed rows")
    wrong = np.abs(decode(name, encode(name, values)) - values).max(1)
    steps = {"Q2_K": 3, "Q3_K": 7, "Q4_K": 15, "Q5_K": 31, "Q6_K": 63}[name]
    if name in ("Q2_K", "Q3_K"):
        # Few steps, rounded scales of 4 and 5 bits.
        assert (wrong <= 1.5 * np.abs(values).max(1) + 64 * 64 * 2**-25).all()
        return
    span = 2 * np.abs(values).max(1)
    # Half a step, as much again for what a rounded scale and minimum move, and float16's steps.
    assert (wrong <= span / steps + span / 63 + 64 * 64 * 2**-25).all()


@pytest.mark.parametrize("kind", ["bell", "uniform", "spikes", "mixed rows", "bfloat16"])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0"])
def test_blocks_that_were_decoded_are_encoded_to_themselves(name, kind):
    blocks = encode(name, rows(kind)).reshape(-1, LAYOUTS[name].nbytes)
    # Where the scale is 0, the values are gone.
    blocks = blocks[LAYOUTS[name].split(blocks)[0] != 0]
    assert len(blocks) > 500
    np.testing.assert_array_equal(encode(name, decode(name, blocks)), blocks)


@pytest.mark.parametrize("name", TYPES)
def test_a_block_depends_on_its_own_values_alone(name, monkeypatch):
    values = rows("mixed rows")[:40]
    whole = encode(name, values)
    for row in 0, 7, 39:
        np.testing.assert_array_equal(encode(name, values[row]), whole[row])
    np.testing.assert_array_equal(encode(name, values[::-1].copy()), whole[::-1])
    monkeypatch.setattr(encoders, "PIECE", 3 * WIDTH)
    monkeypatch.setattr(encoders, "PARALLEL", 0)
    for threads in 1, 2, 3:
        np.testing.assert_array_equal(encode(name, values, threads=threads), whole)


@pytest.mark.parametrize("name", TYPES)
def test_large_arrays_in_threads(name):
    values = bell(2 * encoders.PIECE // 512 + 3, 512)
    one = encode(name, values, threads=1)
    np.testing.assert_array_equal(encode(name, values), one)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_memory_with_gaps(name, monkeypatch):
    monkeypatch.setattr(encoders, "PIECE", 3 * WIDTH)
    values = bell(3, 4, 2 * WIDTH)
    for some in (
        values.transpose(1, 0, 2),
        values[:, ::2],
        values[..., WIDTH:],
        np.broadcast_to(values[0], (3, 4, 2 * WIDTH)),
        values[..., ::-1],
    ):
        np.testing.assert_array_equal(encode(name, some), encode(name, some.copy()))
    values.flags.writeable = False
    assert encode(name, values).any()


@pytest.mark.parametrize("name", TYPES)
def test_shapes(name):
    layout = LAYOUTS[name]
    for shape in (0,), (0, 256), (3, 0), (256,), (2, 3, 512), (1, 1, 1, 256):
        blocks = encode(name, np.ones(shape, np.float32))
        assert blocks.dtype == np.uint8 and blocks.flags.c_contiguous
        assert blocks.shape == (*shape[:-1], shape[-1] // layout.elements * layout.nbytes)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (255,), (256, 3), (2, 272)])
def test_a_last_axis_without_whole_blocks(name, shape):
    if shape and shape[-1] % LAYOUTS[name].elements == 0:
        pytest.skip("whole blocks")
    with pytest.raises(ValueError, match=f"{name} .* multiple of {LAYOUTS[name].elements}, got"):
        encode(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize("name", ["Q8_K", "IQ4_NL", "F16", "q4_k", ""])
def test_types_that_are_not_written(name):
    with pytest.raises(NotImplementedError, match=f"'{name}'; supported are Q4_0, "):
        encode(name, np.zeros(256, np.float32))


@pytest.mark.parametrize("dtype", ["f8", "f2", "i4", ">f4"])
def test_only_float32(dtype):
    with pytest.raises(TypeError, match="Q8_0.*float32"):
        encode("Q8_0", np.zeros(256, dtype))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", TYPES)
def test_the_first_value_that_is_not_finite_is_named(name, bad, threads, monkeypatch):
    monkeypatch.setattr(encoders, "PIECE", 4 * WIDTH)
    monkeypatch.setattr(encoders, "PARALLEL", 0)
    values = bell(5, 7, WIDTH)
    values[3, 2, 100] = values[3, 2, 101] = values[4, 0, 0] = bad
    with pytest.raises(ValueError, match=rf"^values\[3, 2, 100\] is {bad}: {name} .*finite"):
        encode(name, values, threads=threads)


@pytest.mark.parametrize("large", [6e8, -6e8, 1e13, 1e20, 3e38])
@pytest.mark.parametrize("name", [name for name in TYPES if name != "MXFP4"])
def test_values_too_large_for_a_scale_of_float16_are_refused(name, large):
    values = bell(3, 2 * WIDTH)
    values[1, 300] = large
    with pytest.raises(ValueError, match=rf"^values\[1, 300\] is .*too large for {name}"):
        encode(name, values)


@pytest.mark.parametrize("name", [name for name in TYPES if name != "MXFP4"])
def test_all_values_too_large(name):
    values = np.full((2, WIDTH), np.finfo(np.float32).max)
    values[:, ::2] *= -1
    for some in values, np.abs(values):
        with pytest.raises(ValueError, match="too large"):
            encode(name, some)


@pytest.mark.parametrize("power", [-149, -140, -126, -120, -60, 0, 60, 120, 127])
def test_mxfp4_of_any_power_of_two(power):
    """The numbers of E2M1 are exact, and the middles between them go towards zero."""
    scale = 2.0 ** max(power, -126 + 2 - 2)
    values = np.float32(
        [0, 0.5, 1, 1.5, 2, 3, -0.5, -1, -1.5, -2, -3, 0.25, -1.25, 1.75, 2.5, -2.5]
    )
    values = np.resize(values, 32).astype(np.float64) * scale / 2
    # The largest stays, so the exponent of the scale is that of 3 less 2, at least -127.
    out = decode("MXFP4", encode("MXFP4", values.astype(np.float32))).astype(np.float64)
    expected = np.resize([0, 0.5, 1, 1.5, 2, 3, -0.5, -1, -1.5, -2, -3, 0.25, -1, 1.5, 2, -2], 32)
    if power >= -124:
        np.testing.assert_array_equal(out, expected * scale / 2)
    else:
        assert np.abs(out - values).max() <= 2.0**-127


def test_memory_is_that_of_a_few_pieces():
    values = bell(512, 4096)
    for name in "Q8_0", "Q4_K", "Q6_K":
        tracemalloc.start()
        # A new thread has no scratch memory yet.
        with ThreadPoolExecutor(1) as pool:
            blocks = pool.submit(encode, name, values, threads=1).result()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < blocks.nbytes + 12 * 4 * encoders.PIECE


def test_nearest_is_the_trick_with_the_mantissa():
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, 4194303, -4194303], np.float32)
    np.testing.assert_array_equal(nearest(values), np.rint(values))
    special = np.array([np.nan, np.inf, -np.inf], np.float32)
    assert nearest(special).tolist() == [0, -(2**22), -(2**22)]
