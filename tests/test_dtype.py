"""DType against MAX's recorded table, NumPy, ml_dtypes and JAX."""

import copy
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxjax.dtype import DType, finfo, promote
from tests.oracles.recorded import torch

# As MAX 26.7 prints them: name, value, bytes, bits, short name.
MAX_TABLE = """
bool 1 1 8 i1 | int8 135 1 8 si8 | int16 137 2 16 si16 | int32 139 4 32 si32
int64 141 8 64 si64 | uint8 134 1 8 ui8 | uint16 136 2 16 ui16 | uint32 138 4 32 ui32
uint64 140 8 64 ui64 | float16 79 2 16 f16 | float32 81 4 32 f32 | float64 82 8 64 f64
bfloat16 80 2 16 bf16 | float4_e2m1fn 64 1 4 f4e2m1fn | float6_e2m3fn 65 1 6 f6e2m3fn
float6_e3m2fn 66 1 6 f6e3m2fn | float8_e8m0fnu 73 1 8 f8e8m0fnu
float8_e4m3fn 75 1 8 f8e4m3fn | float8_e4m3fnuz 76 1 8 f8e4m3fnuz
float8_e5m2 77 1 8 f8e5m2 | float8_e5m2fnuz 78 1 8 f8e5m2fnuz
"""
ROWS = [row.split() for row in MAX_TABLE.replace("\n", " | ").split("|") if row.strip()]
ALL = list(DType.__members__.values())


def test_iteration_is_the_table_of_max():
    assert [d.name for d in DType] == [row[0] for row in ROWS]
    assert len(DType) == 21


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row(row):
    name, value, size, bits, short = row
    d = DType[name]
    assert (d.name, d.value) == (name, int(value))
    assert (d.size_in_bytes, d.align, d.size_in_bits) == (int(size), int(size), int(bits))
    assert (repr(d), str(d), f"{d}") == (name, f"DType.{name}", f"DType.{name}")
    assert DType(short) is d
    assert DType(int(value)) is d


def test_kinds():
    def names(test):
        return {d.name for d in ALL if test(d)}

    signed = {"int4", "int8", "int16", "int32", "int64"}
    unsigned = {"uint4", "uint8", "uint16", "uint32", "uint64"}
    float8 = {f"float8_{t}" for t in ("e8m0fnu", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}
    small = {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}
    wide = {"float16", "bfloat16", "float32", "float64"}
    assert names(DType.is_signed_integral) == signed
    assert names(DType.is_unsigned_integral) == unsigned
    assert names(DType.is_integral) == signed | unsigned
    assert names(DType.is_float8) == float8
    assert names(DType.is_float) == float8 | small | wide
    assert names(DType.is_half) == {"float16", "bfloat16"}


def test_unknown_values():
    with pytest.raises(KeyError, match="float32"):
        DType("float32")  # only the short names, as in MAX
    for bad in (999, None, 1.5, np.float32):
        with pytest.raises(ValueError, match="is not a valid DType"):
            DType(bad)
    with pytest.raises(KeyError):
        DType["nope"]


@pytest.mark.parametrize("d", ALL, ids=repr)
def test_identity_survives(d):
    assert pickle.loads(pickle.dumps(d)) is d
    assert copy.deepcopy(d) is d
    assert DType[d.name] is d
    assert {d: 1}[d] == 1


def test_four_bit_integers_are_members_apart():
    assert DType.int4 not in list(DType)
    assert (DType.int4.value, DType.uint4.value) == (133, 132)
    assert DType("si4") is DType.int4
    assert DType("ui4") is DType(132)
    assert (DType.int4.size_in_bits, DType.int4.size_in_bytes) == (4, 1)
    assert DType.uint4.np == np.dtype(ml_dtypes.uint4)


# --- NumPy and JAX ---


@pytest.mark.parametrize("d", ALL, ids=repr)
def test_numpy_and_back(d):
    assert d.np.name == d.name
    assert np.dtype(d) == d.np
    assert np.zeros(2, d).dtype == d.np
    if not d.is_complex():
        assert DType.from_numpy(d.np) is d
        assert DType.from_numpy(d.np.type) is d
    assert DType.of(d.np) is d


@pytest.mark.parametrize("d", [d for d in ALL if not d.name.startswith("float6")], ids=repr)
def test_jax_takes_it_as_a_dtype(d):
    with jax.enable_x64(True):
        assert jnp.zeros(2, d).dtype == d.np
        assert jax.ShapeDtypeStruct((2,), d).dtype == d.np
        assert jnp.ones(2, jnp.int8).astype(d).dtype == d.np


def test_equal_to_what_numpy_and_jax_call_it():
    """``model.norm.weight.dtype == jnp.bfloat16`` works for an array, and so it must for a Weight."""
    for d in ALL:
        for other in (d.np, d.np.type, d.name):
            assert d == other and other == d and not d != other
        for other in (np.dtype(object), np.timedelta64, "f32", "nope", None, 3, d.value, list):
            assert d != other and other != d
    assert DType.bfloat16 == jnp.bfloat16 and jnp.bfloat16 == DType.bfloat16
    assert DType.float16 != jnp.bfloat16 and DType.int8 != DType.uint8 and DType.int8 != "uint8"


def test_to_numpy_is_max_s_mapping():
    for d in ALL:
        if d.is_float8():
            assert d.to_numpy() == np.dtype("uint8")
        elif d.name in ("bfloat16", "int4", "uint4") or d.size_in_bits in (4, 6):
            with pytest.raises(ValueError, match=f"unsupported DType .*DType.{d.name}"):
                d.to_numpy()
        else:
            assert d.to_numpy() == np.dtype(d.name)


def test_from_numpy_ignores_byte_order_and_refuses_the_rest():
    assert DType.from_numpy(np.dtype(">f4")) is DType.float32
    for bad in (
        "float32",
        np.clongdouble,
        np.complex64,
        np.dtype("complex128"),
        np.dtype("longdouble"),
        np.dtype("S3"),
        float,
        None,
        3,
    ):
        with pytest.raises(ValueError, match="unsupported NumPy dtype"):
            DType.from_numpy(bad)


def test_of_takes_every_spelling():
    same = ["float32", "f32", "torch.float32", "DType.float32", np.float32, np.dtype("<f4")]
    same += [jnp.float32, DType.float32, np.zeros(1, "f4"), jnp.zeros(1), np.float32(1)]
    assert {DType.of(x) for x in same} == {DType.float32}
    same16 = ["fp16", "FP16", "half", "F16", "torch.half", "Float16"]
    assert {DType.of(x) for x in same16} == {DType.float16}
    assert DType.of("BF16") is DType.bfloat16 and DType.of("fp32") is DType.float32
    assert DType.of(bool) is DType.of("bool") is DType.bool
    assert DType.of(ml_dtypes.float8_e4m3fn) is DType.float8_e4m3fn

    class Holder:
        dtype = DType.int4

    assert DType.of(Holder()) is DType.int4


@pytest.mark.oracle
def test_of_takes_torch_dtypes():
    assert DType.of(torch.half) is DType.float16
    assert DType.of(torch.float8_e5m2) is DType.float8_e5m2
    assert DType.of(torch.complex64) is DType.complex64
    with pytest.raises(ValueError, match="qint8"):
        DType.of(torch.qint8)


def test_of_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"unknown dtype 'flaot32'. Did you mean 'float32'\?"):
        DType.of("flaot32")
    with pytest.raises(ValueError, match="unsupported NumPy dtype: longdouble|float128"):
        DType.of(np.longdouble)
    for bad in (int, float, None, 3):
        with pytest.raises(TypeError):
            DType.of(bad)


# --- safetensors ---


def test_safetensors_names_round_trip():
    named = {d.safetensors: d for d in ALL if d.safetensors}
    assert len(named) == 22
    assert all(DType.from_safetensors(name) is d for name, d in named.items())
    assert {"BOOL", "U8", "I64", "F32", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"} <= set(named)
    assert named["F8_E4M3"] is DType.float8_e4m3fn
    assert DType.int4.safetensors is None
    with pytest.raises(KeyError):
        DType.from_safetensors("C128")


def test_safetensors_library_agrees():
    from safetensors.numpy import load, save

    for d in (DType.bool, DType.int16, DType.uint64, DType.float16, DType.float64):
        header = save({"x": np.zeros(1, d)})
        assert f'"dtype":"{d.safetensors}"'.encode() in header
        assert load(header)["x"].dtype == d.np


# --- finfo ---


@pytest.mark.parametrize("d", [d for d in ALL if d.is_float()], ids=repr)
def test_finfo_is_ml_dtypes(d):
    ours, theirs = finfo(d), ml_dtypes.finfo(d.np)
    assert ours.bits == d.size_in_bits
    assert ours.dtype is d
    for name in ("eps", "max", "min", "tiny", "smallest_normal"):
        assert getattr(ours, name) == float(getattr(theirs, name))
        assert type(getattr(ours, name)) is float


def test_finfo_surface():
    assert DType.finfo is finfo
    assert finfo("f32").dtype is DType.float32
    assert repr(finfo(DType.float8_e4m3fn)) == (
        "finfo(dtype=float8_e4m3fn, bits=8, eps=0.125, max=448.0, min=-448.0, tiny=0.015625)"
    )
    for d in (DType.int32, DType.bool):
        with pytest.raises(TypeError, match=f"only supports floating-point types, got {d!r}"):
            finfo(d)


# --- promote ---

SAME_AS_MAX = """
bool int32 int32 | bool bfloat16 bfloat16 | int8 int64 int64 | uint8 int16 int16
uint16 uint32 uint32 | uint32 int64 int64 | float32 float64 float64 | float32 bfloat16 float32
float16 float32 float32 | float64 bfloat16 float64 | float8_e4m3fn bfloat16 bfloat16
float8_e4m3fn float8_e5m2 float16 | float4_e2m1fn float32 float32 | int8 float16 float16
uint8 bfloat16 bfloat16 | int8 float8_e5m2 float16 | int16 float32 float32 | int32 float64 float64
"""


@pytest.mark.parametrize(
    "row", [r.split() for r in SAME_AS_MAX.replace("\n", " | ").split("|") if r.strip()]
)
def test_promote(row):
    a, b, result = row
    assert promote(a, b) is promote(b, a) is DType[result]


def test_promote_the_same_is_the_same():
    assert all(promote(d, d) is d for d in ALL)


def test_promote_half_types_meet_in_float32():
    assert promote(DType.float16, DType.bfloat16) is DType.float32


@pytest.mark.parametrize(
    "pair",
    ["int32 float32", "int64 float64", "int16 float16", "int16 bfloat16", "int8 uint8"]
    + ["uint32 int32", "uint64 int64", "int16 float8_e4m3fn", "int16 uint16"],
)
def test_promote_refuses_what_would_lose(pair):
    a, b = pair.split()
    for one, two in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=f"unsafe cast: {one} and {two}"):
            promote(one, two)


def test_promote_keeps_every_integer():
    """Where an integer and a float have a common type, it holds the integer's extremes."""
    for i in (d for d in ALL if d.is_integral()):
        for f in (d for d in ALL if d.is_float()):
            try:
                common = promote(i, f)
            except ValueError:
                continue
            limits = ml_dtypes.iinfo(i.np)
            for value in (int(limits.min), int(limits.max), int(limits.max) - 1):
                assert int(np.array(value).astype(common.np)) == value
