"""Orbax directories are checkpoints: every kind orbax writes, and what a path into one means."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from maxjax.errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointIncompleteError,
    CheckpointMissingError,
)
from maxjax.storage import open_checkpoint
from maxjax.storage.boxes import whole
from maxjax.storage.crc32 import crc32
from maxjax.storage.digests import DIRECTORY, NAME, Record, to_bytes
from maxjax.storage.files import aligned_empty
from maxjax.storage.orbax import reader as orbax_reader
from maxjax.storage.orbax.reader import is_orbax, open_orbax, orbax_items, orbax_tree, steps
from maxjax.storage.parts import Part, read_parts
from tests.storage.orbax import corpus as orbax_corpus
from tests.storage.orbax.corpus import KINDS, quiet, sharded, tensors


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """kind → the checkpoint of it, made once."""
    root = tmp_path_factory.mktemp("orbax")

    def of(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else orbax_corpus.build(kind, path)

    return of


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def seal(path: Path, item: str = "") -> None:
    """Writes the sums of a checkpoint's arrays beside it, as maxjax does."""
    with open_orbax(path, item=item or None) as table:
        arrays = table.read_many()
    prefix = f"{item}/" if item else ""
    sums = {prefix + name: crc32(np.ascontiguousarray(array)) for name, array in arrays.items()}
    (path / NAME).write_bytes(to_bytes({DIRECTORY: [Record(0, sums)]}))


# --- every kind -------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("opening", [open_orbax, open_checkpoint], ids=["orbax", "any"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_bit_exact(kind, opening, made):
    with opening(made(kind)) as table:
        assert table.format == "orbax"
        arrays = table.read_many()
        assert_same(arrays, tensors())
        for name, entry in table.entries.items():
            assert entry.dtype.np == arrays[name].dtype and entry.nbytes == arrays[name].nbytes
        assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays.values())
        assert table.read("sh").ctypes.data % 64 == 0


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_without_tensors_are_in_the_tree(kind, made):
    tree = orbax_tree(made(kind))
    kinds = {leaf.name: leaf.kind for leaf in tree.leaves}
    texts = {"text": "hello"} if "text" in kinds else {}
    assert tree.strings == texts
    assert {name: kinds[name] for name in ("empty", "none", "no list", "i", "f", "a")} == {
        "empty": "dict", "none": "none", "no list": "list", "i": "scalar", "f": "scalar",
        "a": "array"}  # fmt: skip
    keys = {leaf.name: leaf.keys for leaf in tree.leaves}
    assert keys["n.c.d"] == (("n", "dict"), ("c.d", "dict"))
    assert keys["l.1.x"] == (("l", "dict"), ("1", "sequence"), ("x", "dict"))


def test_float4(tmp_path):
    array = jax.numpy.asarray(np.arange(6).astype(ml_dtypes.float4_e2m1fn))
    orbax_corpus.save(tmp_path / "c", {"w": array})
    with open_orbax(tmp_path / "c") as table:
        assert np.array_equal(table.read("w").astype(np.float32), np.asarray(array, np.float32))


def test_what_orbax_restores_is_what_is_read(made):
    import orbax.checkpoint as ocp

    with quiet(), ocp.StandardCheckpointer() as checkpointer:
        theirs = checkpointer.restore(made("standard"))
    flat, _ = jax.tree_util.tree_flatten_with_path(theirs)
    named = {".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in p): v for p, v in flat}
    with open_orbax(made("standard")) as table:
        ours = table.read_many()
    assert ours.keys() == named.keys()
    for name, array in ours.items():
        assert np.array_equal(array, np.asarray(named[name])), name


def test_nothing_of_orbax_or_jax_is_imported(made):
    program = (
        "import sys; from maxjax.storage import open_checkpoint; early = 'tensorstore' in sys.modules\n"
        f"n = len(open_checkpoint({str(made('v1_save'))!r}).read_many())\n"
        "print(n, early, [m for m in ('jax', 'orbax', 'flax') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == f"{len(tensors())} False []", ran.stderr
    assert not ran.stderr


def test_flax_and_optax_states(tmp_path):
    import optax
    from flax import nnx
    from flax.training import train_state

    with quiet():
        state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        training = train_state.TrainState.create(
            apply_fn=len, params={"w": jax.numpy.ones((3, 2))}, tx=optax.adam(1e-3)
        )
    orbax_corpus.save(tmp_path / "nnx", state)
    orbax_corpus.save(tmp_path / "training", training)
    with open_orbax(tmp_path / "nnx") as table:
        kernel = table.read("kernel.value")
    assert np.array_equal(kernel, np.asarray(state["kernel"][...]))
    with open_orbax(tmp_path / "training") as table:
        assert sorted(table.entries) == [
            "opt_state.0.count", "opt_state.0.mu.w", "opt_state.0.nu.w", "params.w", "step"
        ]  # fmt: skip
        assert np.array_equal(table.read("params.w"), np.ones((3, 2), np.float32))


def test_a_random_key_is_its_data_and_how_it_is_made(tmp_path):
    key = jax.random.key(3)
    orbax_corpus.save(tmp_path / "c", {"key": key, "w": jax.numpy.ones(2)})
    leaves = {leaf.name: leaf for leaf in orbax_tree(tmp_path / "c").leaves}
    assert leaves["key"].random_key == "threefry2x32" and leaves["w"].random_key is None
    with open_orbax(tmp_path / "c") as table:
        assert np.array_equal(table.read("key"), jax.random.key_data(key))


def test_a_single_array_has_no_name(tmp_path):
    orbax_corpus.save(tmp_path / "c", jax.numpy.arange(5))
    with open_orbax(tmp_path / "c") as table:
        assert list(table.entries) == [""]
        assert np.array_equal(table.read(""), np.arange(5, dtype=np.int32))


# --- parts ------------------------------------------------------------------------------------


def read(table, name: str, boxes: list) -> list[np.ndarray]:
    entry = table.entries[name]
    itemsize = entry.dtype.np.itemsize
    sizes = [[stop - start for start, stop in box] for box in boxes]
    memories = [aligned_empty(int(np.prod(size)) * itemsize) for size in sizes]
    read_parts(table, [Part(name, box, m) for box, m in zip(boxes, memories, strict=True)])
    pairs = zip(memories, sizes, strict=True)
    return [memory.view(entry.dtype.np).reshape(size) for memory, size in pairs]


@pytest.mark.parametrize("block", [1, 200, 1 << 20])
@pytest.mark.parametrize("kind", ["zarr3", "files", "plain"])
def test_any_parts(kind, block, made, monkeypatch):
    monkeypatch.setattr(orbax_reader, "BLOCK_BYTES", block)
    rng, array = np.random.default_rng(1), sharded()
    with open_orbax(made(kind)) as table:
        assert table.entries["sh"].coding.chunk == (8, 12)
        for _ in range(20):
            boxes = []
            for _ in range(rng.integers(1, 5)):
                spans = [sorted(rng.integers(0, size + 1, 2)) for size in array.shape]
                boxes.append(tuple((int(a), int(b)) for a, b in spans))
            for box, found in zip(boxes, read(table, "sh", boxes), strict=True):
                assert np.array_equal(found, array[tuple(slice(a, b) for a, b in box)])


def test_a_chunk_that_several_parts_need_is_read_once(made, monkeypatch):
    asked = []
    start = orbax_reader.Store.start
    monkeypatch.setattr(
        orbax_reader.Store,
        "start",
        lambda self, array, box, *more: asked.append(box) or start(self, array, box, *more),
    )
    monkeypatch.setattr(orbax_reader, "BLOCK_BYTES", 1)
    with open_orbax(made("zarr3")) as table:
        rows = [((i, i + 1), (0, 24)) for i in range(4)]
        found = read(table, "sh", [*rows, rows[0]])
    assert asked == [((0, 4), (0, 12)), ((0, 4), (12, 24))]
    assert all(np.array_equal(one[0], sharded()[i]) for i, one in enumerate(found[:4]))


def test_little_is_under_way_at_a_time(tmp_path, monkeypatch):
    array = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    orbax_corpus.save(tmp_path / "c", {f"w{i}": jax.device_put(array, spread) for i in range(4)})
    flight = orbax_reader._Flight(80_000, 2)
    most, take = [], flight.try_take

    def watching(nbytes, *, wait):
        taken = take(nbytes, wait=wait)
        most.append((flight.nbytes, flight.count))
        return taken

    flight.try_take = watching
    monkeypatch.setattr(orbax_reader, "_FLIGHT", flight)
    monkeypatch.setattr(orbax_reader, "BLOCK_BYTES", 1)
    with open_orbax(tmp_path / "c") as table:
        for name in table.entries:
            assert np.array_equal(table.read(name), array)
        parts = [Part(n, whole((64, 1024)), aligned_empty(array.nbytes)) for n in table.entries]
        read_parts(table, parts, threads=4)
    assert max(nbytes for nbytes, _ in most) <= 80_000 and max(count for _, count in most) == 2
    assert (flight.nbytes, flight.count) == (0, 0)


# --- what a path means ------------------------------------------------------------------------


def test_steps_items_and_newest(made):
    root = made("composite")
    assert steps(root) == [7]
    assert sorted(orbax_items(root)) == ["model", "opt_state"]
    assert orbax_items(root) == orbax_items(root / "7")
    for path in (root, root / "7", root / "7" / "model"):
        with open_orbax(path) as table:
            assert len(table.entries) == len(tensors())
            assert table.metadata == {"who": "me", "n": "[1]"}
    with open_orbax(root, item="opt_state") as table:
        assert list(table.entries) == ["mu"]
    with pytest.raises(CheckpointMissingError, match="opt_states.*found model, opt_state"):
        open_orbax(root, item="opt_states")
    assert steps(made("manager")) == [3, 20]
    with open_orbax(made("manager")) as table:
        assert "/20/" in table.files[0].path
    with open_orbax(made("v1_training")) as table:
        assert "/6/" in table.files[0].path
    with open_orbax(made("v1_training") / "5") as table:
        assert list(table.entries) == ["old"]
    assert orbax_items(made("standard")) == {"": str(made("standard"))}


def test_steps_with_a_prefix(made, tmp_path):
    for name in ("run_00000009", "run_00000010"):
        orbax_corpus.copied(made("v1_save"), tmp_path / name)
    assert steps(tmp_path) == [9, 10]
    with open_orbax(tmp_path) as table:
        assert "run_00000010" in table.files[0].path
    orbax_corpus.copied(made("v1_save"), tmp_path / "other_3")
    with pytest.raises(CheckpointFormatError, match="several runs.*other_3"):
        open_orbax(tmp_path)


def test_several_trees_without_a_usual_name(tmp_path):
    with quiet():
        orbax_corpus.v1().save_checkpointables(
            tmp_path / "c", {"left": {"w": np.ones(2)}, "right": {"w": np.zeros(2)}}
        )
    with pytest.raises(
        CheckpointFormatError, match="several trees.*found left, right.*such as .*c/left"
    ):
        open_orbax(tmp_path / "c")
    with open_orbax(tmp_path / "c", item="right") as table:
        assert table.read("w").tolist() == [0, 0]
    with open_checkpoint(tmp_path / "c" / "left") as table:
        assert table.read("w").tolist() == [1, 1]


def test_unfinished_checkpoints(made, tmp_path):
    root = tmp_path / "root"
    orbax_corpus.copied(made("manager"), root)
    broken = root / "30.orbax-checkpoint-tmp-17"
    orbax_corpus.copied(root / "20", broken)
    assert steps(root) == [3, 20]
    with open_checkpoint(root) as table:
        assert "/20/" in table.files[0].path
    for path in (broken, broken / "default"):
        with pytest.raises(CheckpointIncompleteError) as caught:
            open_checkpoint(path)
        assert str(root / "20") in str(caught.value) and caught.value.path == str(broken)
    for step in ("3", "20"):
        os.rename(root / step, tmp_path / step)
    with pytest.raises(CheckpointIncompleteError, match="no complete step"):
        open_checkpoint(root)
    assert is_orbax(root) and not is_orbax(tmp_path / "none")


def test_a_replacement_that_was_broken_off(made, tmp_path):
    orbax_corpus.copied(made("v1_save"), tmp_path / "c")
    orbax_corpus.copied(made("v1_save"), tmp_path / "c.orbax-checkpoint-tmp")
    with pytest.raises(CheckpointIncompleteError, match=f"complete: {tmp_path / 'c'}"):
        open_orbax(tmp_path / "c.orbax-checkpoint-tmp")


def test_never_committed(made, tmp_path):
    path = orbax_corpus.copied(made("manager"), tmp_path / "root")
    orbax_corpus.edit_json(
        path / "20" / "_CHECKPOINT_METADATA",
        lambda value: value.pop("commit_timestamp_nsecs") and None,
    )
    with pytest.raises(CheckpointIncompleteError, match="never committed") as caught:
        open_orbax(path / "20")
    assert str(path / "3") in str(caught.value)


def test_a_directory_of_something_else(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "7").mkdir()
    assert not is_orbax(tmp_path / "d")
    with pytest.raises(CheckpointMissingError, match="no orbax checkpoint"):
        open_orbax(tmp_path / "d")
    (tmp_path / "d" / "checkpoint").write_bytes(b"\x81")
    with pytest.raises(CheckpointFormatError, match="msgpack"):
        open_orbax(tmp_path / "d")


# --- what maxjax adds -------------------------------------------------------------------------


def test_checksums_find_every_change_of_values(made, tmp_path):
    path = orbax_corpus.copied(made("v1_checkpointables"), tmp_path / "c")
    seal(path, "model")
    with open_orbax(path) as table:
        assert all(entry.checksum for entry in table.entries.values())
        assert_same(table.read_many(), tensors())
    content = (path / NAME).read_text()
    wrong = content.replace('"model/sh":"', '"model/sh":"0', 1)
    wrong = wrong.replace(wrong.split('"model/sh":"')[1][:9], "00000001", 1)
    (path / NAME).write_text(wrong)
    for opening in (open_orbax, open_checkpoint):
        with opening(path, verify=True) as table:
            with pytest.raises(CheckpointCorruptError) as caught:
                table.read_many()
            assert caught.value.tensor == "sh" and str(path) in str(caught.value)
        with opening(path, verify=False) as table:
            assert_same(table.read_many(), tensors())
    (path / NAME).write_text("{")
    with open_checkpoint(path, verify=False) as table:
        assert len(table.entries) == len(tensors())


def test_bytes_that_are_blocks(tmp_path):
    stored = np.arange(2 * 144 * 2, dtype=np.uint8).reshape(2, 288)
    tiny = np.arange(8, dtype=np.uint8)
    # "dtypes" is in files of the first versions alone, and always empty.
    own = {"version": 1, "encodings": {"state": {"w": "Q4_K"}, "other": {"g": "Q9"}}, "dtypes": {}}
    arrays = {"w": stored, "b": tiny}
    path = orbax_corpus.save(tmp_path / "c", arrays, custom_metadata={"maxjax": own})
    with open_orbax(path) as table:
        assert [table.entries[n].encoding for n in "wb"] == ["Q4_K", None]
        assert np.array_equal(table.read("b"), tiny)
        assert np.array_equal(table.read("w"), stored)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"version": 2}, "version"),
        ({"version": 1, "encodings": {"state": {"w": "Q9"}}}, "Q9"),
        ({"version": 1, "encodings": {"state": {"w": "Q4_K"}}}, "blocks of 144"),
        ({"version": 1, "encodings": {"state": {"no": "Q8_0"}}}, "'no'"),
        ({"version": 1, "encodings": {"state": {"f": "Q8_0"}}}, "blocks of 34"),
        ({"version": 1, "encodings": {"state": {"b": "Q8_0"}}}, "uint8"),
        ({"version": 1, "encodings": {"state": {"w": 3}}}, "text"),
        ({"version": 1, "encodings": {"state": []}}, "object"),
        ({"version": 1, "encodings": 3}, "object"),
        ({"version": 1, "keys": {"state": {"w": 3}}}, "text"),
        ({"version": 1, "plain": 3}, "object"),
        ({"version": 1, "items": 3}, "list"),
        ([], "object"),
    ],
)
def test_what_maxjax_adds_is_checked(own, says, tmp_path):
    arrays = {"w": np.zeros((2, 8), np.uint8), "f": np.zeros(2, np.float32), "b": np.zeros(34, "b")}
    path = orbax_corpus.save(tmp_path / "c", arrays, custom_metadata={"maxjax": own})
    with pytest.raises(CheckpointFormatError, match=says) as caught:
        open_orbax(path)
    assert caught.value.path == str(path / "_CHECKPOINT_METADATA")


def test_the_sum_of_what_maxjax_adds(tmp_path):
    own = {"version": 1, "encodings": {}}
    own["crc32"] = f"{zlib.crc32(json.dumps(own, sort_keys=True).encode()):08x}"
    arrays = {"w": np.zeros(3, np.float32)}
    path = orbax_corpus.save(tmp_path / "c", arrays, custom_metadata={"maxjax": own})
    with open_orbax(path) as table:
        assert json.loads(table.metadata["maxjax"]) == own
    file = path / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text().replace("encodings", "encodingr"))
    with pytest.raises(CheckpointCorruptError, match="CRC-32"):
        open_orbax(path)
