"""NumPy files against numpy itself: every case of the corpus, whole arrays, parts, mutations."""

import io
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointTruncatedError,
)
from maxjax.storage import Limits
from maxjax.storage.numpy.npy import open_npy
from maxjax.storage.numpy.npz import open_npz
from maxjax.storage.parts import Part, read_parts
from maxjax.storage.zip import deflate
from tests.storage.mutate import mutations, rewrite
from tests.storage.numpy.corpus import BASIC, NPZ, A, Case, Item, npy, one, pack, saved
from tests.storage.test_corpus import assert_refused, read_all
from tests.storage.watch import watched

MUTATIONS = 1500


def by_numpy(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def native(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(array.shape)


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert list(ours) == list(theirs)
    for name, array in theirs.items():
        wanted = native(array)
        assert (ours[name].dtype, ours[name].shape) == (wanted.dtype, wanted.shape)
        assert ours[name].tobytes() == wanted.tobytes(), name
        assert ours[name].flags.c_contiguous and ours[name].flags.writeable


# --- the corpus -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in NPZ if c.error], ids=str)
def test_bad_file_is_refused_in_little_memory(case: Case, tmp_path):
    path = case.build(tmp_path)
    tracemalloc.start()
    try:
        assert_refused(case, path, open_npz)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", [c for c in NPZ if not c.error], ids=str)
@pytest.mark.filterwarnings("ignore:Reading `.npy`")
def test_good_file_loads_bit_exact(case: Case, tmp_path):
    path = case.build(tmp_path)
    with watched() as acts:
        table, arrays = read_all(path, open_npz)
    assert not acts
    assert (table.format, list(arrays)) == ("npz", list(table.entries))
    assert_same(arrays, by_numpy(path.read_bytes()))


def test_case_names_are_unique():
    names = [case.name for case in NPZ]
    assert len(names) == len(set(names))


# --- mutations ------------------------------------------------------------------------------


def seeds() -> list[bytes]:
    mixed = {"f": np.asfortranarray(A), "e": np.zeros((0, 3), "f4"), "s": np.array(2.5),
             "swapped": A.astype(">f8"), "b": np.array([True, False])}  # fmt: skip
    return [
        BASIC,
        saved(**mixed),
        saved(np.savez_compressed, **mixed),
        saved(np.savez_compressed, w=np.arange(900, dtype="i4").reshape(30, 30)),
        pack(Item("a.npy", npy(version=(2, 0)), method=8), Item("b.npy", npy()), comment=b"text"),
    ]


def crcs_hold(content: bytes) -> bool:
    """What zipfile says of all members; an archive it does not read has nothing to compare."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.testzip() is None
    except Exception:
        return False


@pytest.mark.parametrize("part", range(len(seeds())))
def test_mutated_files_are_refused_cleanly_or_read_as_numpy_does(part, tmp_path):
    path, accepted = tmp_path / "m.npz", 0
    count = MUTATIONS // len(seeds())
    for number, content in enumerate(mutations(seeds()[part], count, seed=part)):
        rewrite(path, content)
        try:
            _, arrays = read_all(path, open_npz)
        except CheckpointError as error:
            assert str(path) in str(error), number
            continue
        accepted += 1
        assert crcs_hold(content), number
        assert_same(arrays, by_numpy(content))
    assert 0.005 * count < accepted < 0.6 * count


@pytest.mark.parametrize("version", [(1, 0), (3, 0)], ids=["1.0", "3.0"])
@pytest.mark.filterwarnings("ignore:Reading `.npy`")
def test_mutated_headers_are_refused_cleanly_or_read_as_numpy_does(version, tmp_path):
    """Where no CRC stands before the parser."""
    accepted, path = 0, tmp_path / "m.npy"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), }   \n"
    for number, damaged in enumerate(mutations(header, 1000, seed=9)):
        content = npy(header=damaged, version=version)
        rewrite(path, content)
        try:
            _, arrays = read_all(path, open_npy)
        except CheckpointError as error:
            assert str(path) in str(error), number
            continue
        accepted += 1
        assert_same(arrays, {"m": np.load(io.BytesIO(content), allow_pickle=False)})
    assert 8 < accepted < 500


# --- parts ----------------------------------------------------------------------------------

SHAPES = [(7, 5, 6), (40,), (1, 9, 1), (3, 300)]
KINDS = {
    "stored": (np.savez, lambda a: a),
    "deflated": (np.savez_compressed, lambda a: a),
    "fortran": (np.savez, np.asfortranarray),
    "fortran deflated": (np.savez_compressed, np.asfortranarray),
    "big endian": (np.savez, lambda a: a.astype(a.dtype.newbyteorder(">"))),
    "big endian deflated": (np.savez_compressed, lambda a: a.astype(a.dtype.newbyteorder(">"))),
    "both deflated": (
        np.savez_compressed,
        lambda a: np.asfortranarray(a.astype(a.dtype.newbyteorder(">"))),
    ),
}


def regions(shape: tuple[int, ...], rng: np.random.Generator) -> list[tuple]:
    found = [tuple((0, size) for size in shape)]
    for _ in range(8):
        pairs = [sorted(rng.integers(0, size + 1, 2).tolist()) for size in shape]
        found.append(tuple((a, b) for a, b in pairs))
    return found


@pytest.mark.parametrize("block", [64, 1 << 20], ids=["small blocks", "as it is"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_equal_slices(kind, block, tmp_path, monkeypatch):
    # Blocks so small that a row of a little array goes over their ends.
    monkeypatch.setattr(deflate, "DECODED_BYTES", block)
    monkeypatch.setattr(deflate, "COMPRESSED_BYTES", block)
    write, change = KINDS[kind]
    rng = np.random.default_rng(3)
    arrays = {f"a{i}": rng.normal(size=shape).astype(t) for i, (shape, t) in enumerate(
        (shape, t) for shape in SHAPES for t in ("f4", "i2", "f8"))}  # fmt: skip
    path = tmp_path / "m.npz"
    path.write_bytes(saved(write, **{name: change(array) for name, array in arrays.items()}))
    with open_npz(path) as table:
        parts = []
        for name, array in arrays.items():
            for region in regions(array.shape, rng):
                nbytes = array[tuple(slice(*span) for span in region)].nbytes
                parts.append(Part(name, region, np.full(nbytes, 0xEE, np.uint8)))
        read_parts(table, parts)
        for name, region, memory in parts:
            wanted = arrays[name][tuple(slice(*span) for span in region)]
            assert memory.tobytes() == wanted.tobytes(), (name, region)
        assert_same(table.read_many(), arrays)


def test_large_deflated_array_is_read_in_little_memory(tmp_path):
    array = np.random.default_rng(0).integers(0, 9, (1000, 2000)).astype("i4")
    path = tmp_path / "m.npz"
    path.write_bytes(saved(np.savez_compressed, w=array))
    with open_npz(path) as table:
        memory = np.zeros(10 * 2000 * 4, np.uint8)
        tracemalloc.start()
        read = read_parts(table, [Part("w", ((500, 510), (0, 2000)), memory)])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert read == table.entries["w"].nbytes < array.nbytes
    assert memory.tobytes() == array[500:510].tobytes()
    assert peak < 4 << 20


def test_part_of_damaged_array_is_refused(tmp_path):
    """Also where the damage lies in what nobody asked for."""
    for write in (np.savez, np.savez_compressed):
        content = bytearray(saved(write, w=np.random.default_rng(1).normal(size=500)))
        content[len(content) // 2] ^= 16
        path = tmp_path / "m.npz"
        path.write_bytes(content)
        with open_npz(path) as table, pytest.raises(CheckpointCorruptError, match="'w'"):
            read_parts(table, [Part("w", ((0, 1),), np.zeros(8, np.uint8))])


# --- .npy, limits, messages -----------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda a: a, np.asfortranarray, lambda a: a.astype(">f4")],
                         ids=["C", "Fortran", "big endian"])  # fmt: skip
def test_npy_file(change, tmp_path):
    path = tmp_path / "weight.npy"
    np.save(path, change(A))
    with open_npy(path) as table:
        assert (table.format, table.entries["weight"].dtype) == ("npy", DType.float32)
        assert_same(table.read_many(), {"weight": A})


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (npy()[:-1], CheckpointTruncatedError),
        (npy(shape="(100000000000,)"), CheckpointTruncatedError),
        (npy() + b"x", CheckpointFormatError),
        (BASIC, CheckpointFormatError),
        (b"", CheckpointTruncatedError),
    ],
    ids=["cut", "far cut", "rest", "npz", "empty"],
)
def test_bad_npy_file(content, error, tmp_path):
    path = tmp_path / "w.npy"
    path.write_bytes(content)
    with pytest.raises(error) as caught:
        open_npy(path)
    assert (type(caught.value), caught.value.tensor) == (error, "w")


def test_bfloat16_as_numpy_and_jax_write_it(tmp_path):
    import jax.numpy as jnp  # not in the processes of scripts/fuzz.py, which need none of it

    wanted = np.asfortranarray(A.astype(ml_dtypes.bfloat16))
    np.save(tmp_path / "a.npy", wanted)
    np.savez(tmp_path / "s.npz", a=wanted.view("V2"))
    np.savez_compressed(tmp_path / "d.npz", a=wanted)
    for table in (open_npy(tmp_path / "a.npy"), *map(open_npz, sorted(tmp_path.glob("*.npz")))):
        np.testing.assert_array_equal(table.read("a"), wanted, strict=True)
    assert jnp.load(tmp_path / "a.npy").tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("content", "option", "enough"),
    [
        (one(npy()), "npy_header_bytes", 118),
        (pack(Item("a.npy", npy()), Item("b.npy", npy())), "tensors", 2),
        (pack(Item("long-name.npy", npy())), "name_bytes", 9),
        (one(npy()), "header_bytes", 51),
        (one(npy()), "tensor_bytes", 48),
        (one(npy(np.zeros(2**20, "f4")), method=8), "member_ratio", 900),
    ],
)
def test_limit_can_be_raised(content, option, enough, tmp_path):
    path = tmp_path / "m.npz"
    path.write_bytes(content)
    tight = Limits(**{option: enough - 1 if option != "member_ratio" else 100})
    with pytest.raises(CheckpointLimitError, match=rf"limits=maxjax.Limits\({option}=N\)"):
        open_npz(path, limits=tight)
    assert open_npz(path, limits=Limits(**{option: enough})).entries


@pytest.mark.parametrize("method", [0, 8], ids=["stored", "deflated"])
def test_offset_points_at_the_field(method, tmp_path):
    content = one(npy(shape="(4, x)"), method=method)
    path = tmp_path / "m.npz"
    path.write_bytes(content)
    with pytest.raises(CheckpointFormatError) as caught:
        open_npz(path)
    wanted = content.index(b"x)") if method == 0 else 30 + len("a.npy")
    assert caught.value.offset == wanted
