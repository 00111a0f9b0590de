"""Damaged and hostile orbax directories: an error of ours that says where, or the same values."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from maxjax.errors import (
    CheckpointChangedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointMissingError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
)
from maxjax.storage import Limits, open_checkpoint
from maxjax.storage.digests import NAME
from maxjax.storage.orbax.reader import open_orbax, orbax_tree
from maxjax.storage.orbax.store import MANIFEST, Database, Store
from tests.storage.orbax import corpus as orbax_corpus
from tests.storage.orbax.corpus import build, copied, edit_json, files, sharded, tensors
from tests.storage.orbax.test_reader import assert_same, seal

DAMAGED = ["pytree", "zarr3", "files", "files_zarr3", "plain", "v1_save"]
# What nothing is read from; a flip in it changes nothing.
UNREAD = {"_sharding", "commit_success.txt", "orbax.checkpoint"}


@pytest.fixture(scope="session")
def sealed(tmp_path_factory):
    """kind → its checkpoint with sums of the values, made once."""
    root = tmp_path_factory.mktemp("sealed")

    def of(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            build(kind, path)
            seal(path, "state" if kind == "v1_save" else "")
        return path

    return of


def attempt(path: Path, **options) -> CheckpointError | None:
    """Reads all: the error, or None and the values are right."""
    try:
        with open_orbax(path, verify=True, **options) as table:
            arrays = table.read_many()
        orbax_tree(path, **options)
    except CheckpointError as error:
        message = str(error)
        assert "\n" not in message and str(path) in message, message
        return error
    assert_same(arrays, tensors())
    return None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [50, pytest.param(150, marks=pytest.mark.extra)])
@pytest.mark.parametrize("kind", DAMAGED)
def test_one_bit(kind, count, sealed, tmp_path):
    path = copied(sealed(kind), tmp_path / "c")
    rng, refused, classes = random.Random(kind), 0, set()
    listed = [file for file in files(path) if file.name != NAME]
    for number in range(count):
        file = listed[number % len(listed)]
        data = file.read_bytes()
        if not data:
            continue
        at, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
        file.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        error = attempt(path)
        file.write_bytes(data)
        if error:
            refused += 1
            classes.add(type(error).__name__)
            assert file.name not in UNREAD
    assert attempt(path) is None
    assert refused > count // 5, (refused, classes)


@pytest.mark.parametrize("kind", DAMAGED)
def test_every_file_removed_emptied_or_halved(kind, sealed, tmp_path):
    path = copied(sealed(kind), tmp_path / "c")
    for file in files(path):
        data = file.read_bytes()
        for left in (None, b"", data[: len(data) // 2]):
            if left is None:
                file.unlink()
            else:
                file.write_bytes(left)
            error = attempt(path)
            file.write_bytes(data)
            if not error and left != data:
                # Of what one process wrote the values are read, not its own list of them.
                process = (
                    file.parent.parent.name == "ocdbt.process_0"
                    or file.parent.name == "ocdbt.process_0"
                )
                optional = left is None and file.name in ("process_0", "_CHECKPOINT_METADATA", NAME)
                assert file.name in UNREAD or process or optional, (file, left)


def test_a_missing_chunk_is_never_zeros(sealed, tmp_path):
    path = copied(sealed("files"), tmp_path / "c")
    (path / NAME).unlink()
    (path / "sh" / "1.0").unlink()
    with pytest.raises(CheckpointMissingError, match=r"1 of the 8 chunks.*chunk 1\.0") as caught:
        open_orbax(path)
    assert caught.value.tensor == "sh"


def test_a_chunk_too_many(sealed, tmp_path):
    path = copied(sealed("files_zarr3"), tmp_path / "c")
    shutil.copy(path / "sh" / "c" / "1" / "0", path / "sh" / "c" / "1" / "2")
    with pytest.raises(CheckpointCorruptError, match="outside.*c/1/2") as caught:
        open_orbax(path)
    assert caught.value.tensor == "sh"


def test_old_checkpoints_leave_zeros_out(sealed, tmp_path):
    path = copied(sealed("files"), tmp_path / "c")
    edit_json(path / "_METADATA", lambda v: v.pop("store_array_data_equal_to_fill_value") and None)
    edit_json(path / "sh" / ".zarray", lambda v: v.update(fill_value=0.0))
    (path / NAME).unlink()
    (path / "sh" / "0.0").unlink()
    with open_orbax(path) as table:
        found = table.read("sh")
    assert not found[:8, :12].any() and np.array_equal(found[8:], sharded()[8:])


def test_without_checksums_compressed_flips_are_errors_or_other_values(sealed, tmp_path):
    """Nothing else may come of them: this is what the sums are for."""
    path = copied(sealed("files"), tmp_path / "c")
    (path / NAME).unlink()
    chunk, rng = path / "sh" / "0.0", random.Random(0)
    data = chunk.read_bytes()
    for _ in range(60):
        at = rng.randrange(len(data))
        chunk.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        with open_orbax(path) as table:
            try:
                assert table.read("sh").shape == (32, 24)
            except CheckpointError as error:
                assert error.tensor == "sh" and type(error) in (
                    CheckpointCorruptError, CheckpointFormatError)  # fmt: skip
                assert error.path == str(chunk) or error.path == str(path)


# --- the metadata -----------------------------------------------------------------------------


def entry(*keys: str, kind: str = "jax.Array", **more) -> dict:
    names = [{"key": key, "key_type": 2} for key in keys]
    value = {"value_type": kind, "skip_deserialize": False, **more}
    return {str(tuple(keys)): {"key_metadata": names, "value_metadata": value}}


def renamed(old: str, *keys: str):
    def change(value: dict) -> None:
        tree = value["tree_metadata"]
        del tree[f"('{old}',)"]
        tree.update(entry(*keys))

    return change


def value_of(**more):
    return lambda value: value["tree_metadata"]["('a',)"]["value_metadata"].update(more)


def key_of(**more):
    return lambda value: value["tree_metadata"]["('a',)"]["key_metadata"][0].update(more)


def drop_keys(value: dict) -> None:
    del value["tree_metadata"]["('a',)"]["key_metadata"]


def retitle(value: dict) -> None:
    value["tree_metadata"]["('z',)"] = value["tree_metadata"].pop("('a',)")


METADATA = {
    "no object": (lambda v: [], CheckpointFormatError, None),
    "no tree": (lambda v: {}, CheckpointFormatError, None),
    "tree is a list": (lambda v: {"tree_metadata": []}, CheckpointFormatError, None),
    "leaf is text": (lambda v: v["tree_metadata"].update({"('a',)": "x"}), CheckpointFormatError, "('a',)"),
    "no keys": (drop_keys, CheckpointFormatError, "('a',)"),
    "key is a number": (key_of(key=3), CheckpointFormatError, "('a',)"),
    "kind of key": (key_of(key_type=True), CheckpointFormatError, "('a',)"),
    "key is no index": (key_of(key_type=1), CheckpointFormatError, "('a',)"),
    "title is another": (retitle, CheckpointFormatError, "a"),
    "kind of value": (value_of(value_type=3), CheckpointFormatError, "a"),
    "skipped array": (value_of(skip_deserialize=True), CheckpointFormatError, "a"),
    "skip is text": (value_of(skip_deserialize="no"), CheckpointFormatError, "a"),
    "write shape": (value_of(write_shape=[-1]), CheckpointFormatError, "a"),
    "write shape of other rank": (value_of(write_shape=[3]), CheckpointFormatError, "a"),
    "write shape of zero": (value_of(write_shape=[3, 0]), CheckpointFormatError, "a"),
    "write shape does not divide": (value_of(write_shape=[2, 4]), CheckpointFormatError, "a"),
    "text without text": (value_of(value_type="string"), CheckpointFormatError, "a"),
    "twice": (lambda v: v["tree_metadata"].update(entry("n", "c", "d")), CheckpointFormatError, "n.c.d"),
    "not there": (lambda v: v["tree_metadata"].update(entry("zz")), CheckpointMissingError, "zz"),
    "outside": (renamed("a", "..", "a"), CheckpointMissingError, "...a"),
    "above": (renamed("a", "../c/a"), CheckpointUnsafeError, "../c/a"),
    "absolute": (renamed("a", "/etc"), CheckpointUnsafeError, "/etc"),
    "dot": (renamed("a", "./a"), CheckpointUnsafeError, "./a"),
    "long name": (renamed("a", "x" * 70_000), CheckpointLimitError, "x" * 70_000),
}  # fmt: skip


@pytest.mark.parametrize("case", METADATA)
def test_bad_metadata(case, sealed, tmp_path):
    change, error, tensor = METADATA[case]
    path = copied(sealed("files"), tmp_path / "c")
    edit_json(path / "_METADATA", change)
    with pytest.raises(error) as caught:
        open_orbax(path)
    assert type(caught.value) is error and caught.value.tensor == tensor, caught.value
    assert str(path) in caught.value.path


def test_metadata_is_strict_json(sealed, tmp_path):
    path = copied(sealed("files"), tmp_path / "c")
    (path / "_METADATA").write_text('{"tree_metadata": {}, "tree_metadata": {}}')
    with pytest.raises(CheckpointFormatError, match="twice"):
        open_orbax(path)
    (path / "_METADATA").write_text("[" * 5000)
    with pytest.raises(CheckpointLimitError, match="json_depth"):
        open_orbax(path)
    with pytest.raises(CheckpointLimitError, match="tensors"):
        open_orbax(sealed("zarr3"), limits=Limits(tensors=3))


ZARR2 = {
    "no object": (lambda v: [], CheckpointFormatError),
    "format": (lambda v: v.update(zarr_format=3), CheckpointFormatError),
    "filters": (lambda v: v.update(filters=[{"id": "delta"}]), CheckpointFormatError),
    "negative": (lambda v: v.update(shape=[-8, 24]), CheckpointFormatError),
    "no whole number": (lambda v: v.update(shape=[8.0, 24]), CheckpointFormatError),
    "true": (lambda v: v.update(shape=[True, 24]), CheckpointFormatError),
    "many axes": (lambda v: v.update(shape=[1] * 33, chunks=[1] * 33), CheckpointFormatError),
    "rank": (lambda v: v.update(chunks=[8]), CheckpointFormatError),
    "chunk of zero": (lambda v: v.update(chunks=[0, 12]), CheckpointFormatError),
    "huge chunk": (lambda v: v.update(chunks=[2**50, 12]), CheckpointFormatError),
    "huge": (lambda v: v.update(shape=[2**61, 24]), CheckpointLimitError),
    "many chunks": (lambda v: v.update(shape=[2**50, 24]), CheckpointMissingError),
    "shorter": (lambda v: v.update(shape=[24, 24]), CheckpointCorruptError),
    "cut": (lambda v: v.update(shape=[28, 24]), CheckpointFormatError),
    "empty": (lambda v: v.update(shape=[0, 24]), CheckpointFormatError),
    "separator": (lambda v: v.update(dimension_separator="-"), CheckpointFormatError),
    "other separator": (lambda v: v.update(dimension_separator="/"), CheckpointMissingError),
    "complex": (lambda v: v.update(dtype="<c8"), CheckpointCorruptError),
    "unknown": (lambda v: v.update(dtype="<c32"), CheckpointFormatError),
    "object": (lambda v: v.update(dtype="|O"), CheckpointFormatError),
    "fields": (lambda v: v.update(dtype=[["a", "<f4"]]), CheckpointFormatError),
    "text type": (lambda v: v.update(dtype="<U4"), CheckpointFormatError),
    "compressor": (lambda v: v.update(compressor={"id": "pickle"}), CheckpointFormatError),
    "other width": (lambda v: v.update(dtype="<f8"), CheckpointCorruptError),
}


@pytest.mark.parametrize("case", ZARR2)
def test_bad_array_description(case, sealed, tmp_path):
    change, error = ZARR2[case]
    path = copied(sealed("files"), tmp_path / "c")
    edit_json(path / "sh" / ".zarray", change)
    began = time.perf_counter()
    found = attempt(path)
    assert found is not None and time.perf_counter() - began < 5
    assert type(found) is error and found.tensor == "sh", found


def transpose(order) -> dict:
    return {"name": "transpose", "configuration": {"order": order}}


ZARR3 = {
    "format": lambda v: v.update(zarr_format=2),
    "node": lambda v: v.update(node_type="group"),
    "grid": lambda v: v["chunk_grid"].update(name="rectangular"),
    "grid is a number": lambda v: v.update(chunk_grid=3),
    "grid without a shape": lambda v: v["chunk_grid"].update(configuration={}),
    "configuration": lambda v: v["chunk_grid"].update(configuration=[]),
    "keys": lambda v: v["chunk_key_encoding"].update(name="fancy"),
    "separator": lambda v: v["chunk_key_encoding"].update(configuration={"separator": "+"}),
    "codecs": lambda v: v.update(codecs={}),
    "codec": lambda v: v.update(codecs=[{"name": "pickle"}]),
    "codec without a name": lambda v: v.update(codecs=[{}]),
    "inner chunk": lambda v: v["codecs"][0]["configuration"].update(chunk_shape=[3, 12]),
    "huge inner chunk": lambda v: v["codecs"][0]["configuration"].update(chunk_shape=[2**40, 12]),
    "nested shards": lambda v: v["codecs"][0]["configuration"].update(codecs=v["codecs"][:]),
    "a transpose of one axis twice": lambda v: v["codecs"].insert(0, transpose([0, 0])),
    "a transpose of too few axes": lambda v: v["codecs"].insert(0, transpose([0])),
    "a transpose of an axis that is not there": lambda v: v["codecs"].insert(0, transpose([1, 2])),
    "a transpose by a letter": lambda v: v["codecs"].insert(0, transpose("F")),
    "type": lambda v: v.update(data_type="string"),
    "type of a kind": lambda v: v.update(data_type={"name": "float32"}),
    "fill": lambda v: v.update(fill_value={"a": 1}),
}


@pytest.mark.parametrize("case", ZARR3)
def test_bad_array_description_of_zarr3(case, sealed, tmp_path):
    path = copied(sealed("files_zarr3"), tmp_path / "c")
    description = path / "sh" / "zarr.json"
    value = json.loads(description.read_text())
    if case == "nested shards":
        value["codecs"][0]["configuration"]["codecs"] = json.loads(json.dumps(value["codecs"]))
    else:
        ZARR3[case](value)
    description.write_text(json.dumps(value))
    found = attempt(path)
    assert isinstance(found, CheckpointFormatError) and found.tensor == "sh", found


@pytest.mark.parametrize("kind", ["files", "files_zarr3", "zarr3"])
def test_sizes_beyond_what_the_shape_needs(kind, sealed, tmp_path):
    """tensorstore reads a chunk, a description and the manifest completely: a terabyte ends the process."""
    names = {
        "files": ["a/0.0", "a/.zarray"],
        "files_zarr3": ["sh/c/0/0", "sh/zarr.json"],
        "zarr3": [MANIFEST],
    }
    for number, name in enumerate(names[kind]):
        path = copied(sealed(kind), tmp_path / f"{number}")
        os.truncate(path / name, 1 << 40)
        with pytest.raises(CheckpointLimitError) as caught:
            open_orbax(path)
        assert "at most" in str(caught.value.expected) and str(1 << 40) in str(caught.value.found)


def test_a_chunk_may_be_twice_as_long_as_its_values_and_a_megabyte(sealed, tmp_path):
    path = copied(sealed("files"), tmp_path / "c")
    chunk = next(path.glob("sh/0.*"))
    assert attempt(path) is None
    os.truncate(chunk, (1 << 20) + 200_000_000)
    assert isinstance(attempt(path), CheckpointLimitError)


def test_codecs_are_few(sealed, tmp_path):
    path = copied(sealed("files_zarr3"), tmp_path / "c")
    for count in (17, 1_000_000):
        listed = [{"name": "bytes"}] * count
        edit_json(path / "sh" / "zarr.json", lambda v, listed=listed: v.update(codecs=listed))
        assert isinstance(attempt(path), CheckpointLimitError)


def test_more_than_the_files_could_hold(sealed, tmp_path):
    path = copied(sealed("files"), tmp_path / "c")
    for name in ("_METADATA", "a/.zarray"):
        assert (path / name).exists()
    edit_json(path / "_METADATA", lambda v: v["tree_metadata"].update(entry("a")))
    edit_json(
        path / "a" / ".zarray", lambda v: v.update(shape=[2**30, 2**20], chunks=[2**30, 2**20])
    )
    began = time.perf_counter()
    with pytest.raises(CheckpointFormatError, match="larger than anything"):
        open_orbax(path)
    assert time.perf_counter() - began < 5


# --- the files --------------------------------------------------------------------------------


def test_what_is_no_file_is_not_waited_for(sealed, tmp_path):
    for name in ("sh/0.0", "_METADATA", "a/.zarray"):
        path = copied(sealed("files"), tmp_path / name.replace("/", "_"))
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(CheckpointFormatError, match="not a regular file") as caught:
            open_orbax(path)
        assert caught.value.path == str(path / name)


def test_links_in_circles(sealed, tmp_path):
    path = copied(sealed("zarr3"), tmp_path / "c")
    (path / "again").symlink_to(path)
    assert attempt(path) is None
    (path / "nowhere").symlink_to(path / "nowhere")
    with pytest.raises(CheckpointMissingError):
        open_orbax(path)


def test_what_may_not_be_read_is_not_called_missing(sealed, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("becomes another user for it, which only root can")
    path = copied(sealed("files"), tmp_path / "c")
    program = f"""
import os
from pathlib import Path
from maxjax.storage import open_checkpoint
from maxjax.errors import CheckpointError
import tensorstore
os.setegid(65534)
for name in ("sh/0.0", "sh/.zarray", "_METADATA", "sh", ""):
    os.seteuid(0)
    place = Path({str(path)!r}) / name
    place.chmod(0)
    os.seteuid(65534)
    try:
        open_checkpoint({str(path)!r}).read_many()
    except CheckpointError as error:
        print(type(error).__name__, error.path)
    os.seteuid(0)
    place.chmod(0o755)
"""
    parents = [parent for parent in path.parents if parent.is_relative_to("/tmp")]
    modes = {parent: parent.stat().st_mode for parent in parents}
    try:
        for parent in parents:
            parent.chmod(modes[parent] | 0o055)
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        told = ran.stdout.splitlines()
        assert len(told) == 5, (told, ran.stderr)
        for line in told:
            assert line.startswith("CheckpointAccessError ") and str(path) in line, told
    finally:
        for parent in parents:
            parent.chmod(modes[parent])


@pytest.mark.parametrize("kind", ["zarr3", "files"])
def test_deleted_or_changed_while_open(kind, sealed, tmp_path):
    path = copied(sealed(kind), tmp_path / "c")
    data = max(
        files(path), key=lambda f: (f.parent.name == "d", f.name == "0.0", f.parent.name == "sh")
    )
    with open_orbax(path) as table:
        content = data.read_bytes()
        data.write_bytes(content[:-1] + b"x")
        with pytest.raises(CheckpointChangedError) as caught:
            table.read("sh")
        assert caught.value.path == str(data)
    data.write_bytes(content)
    with open_orbax(path) as table:
        shutil.rmtree(path)
        with pytest.raises(CheckpointChangedError, match="or it was deleted") as caught:
            table.read("sh")
        assert caught.value.replaced and str(path) in caught.value.path
        assert caught.value.__cause__.tensor == "sh"


def test_the_part_of_a_process_is_missing(tmp_path):
    arrays = {"w": np.random.default_rng(0).random(500)}
    path = orbax_corpus.save(tmp_path / "c", arrays) / "state"
    shutil.rmtree(path / "ocdbt.process_0")
    with pytest.raises(CheckpointMissingError, match="the part that process 0 wrote") as caught:
        open_orbax(path)
    assert caught.value.tensor == "w" and str(path / "ocdbt.process_0") in caught.value.path


def test_a_cut_data_file(tmp_path):
    path = orbax_corpus.save(tmp_path / "c", {"w": np.random.default_rng(0).random(5000)})
    data = max(files(path), key=lambda file: file.stat().st_size)
    with open(data, "r+b") as file:
        file.truncate(data.stat().st_size // 2)
    with pytest.raises(CheckpointTruncatedError) as caught:
        open_orbax(path)
    assert caught.value.path == str(data) and caught.value.tensor == "w"


def test_a_name_that_is_no_text(sealed, tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff"
    shutil.copytree(os.fsencode(sealed("zarr3")), path)
    with pytest.raises(CheckpointError):
        with open_checkpoint(os.fsdecode(path)) as table:
            table.read_many()


# --- the database -----------------------------------------------------------------------------


LIMITS = Limits()


def database(root: dict | None, nodes: dict, sizes: dict, limits: Limits = LIMITS) -> Database:
    manifest = {"versions": [] if root is None else [{"root": root, "root_height": 1}]}
    return Database("/c", sizes, lambda node: manifest if node is None else nodes[node], limits)


TOP = "btreenode::d/n:0:10"
LOW = "btreenode:p/:d/n:10:10"


def tree_with(leaf: list, *, height: int = 0) -> dict:
    above = {"key": b"w/c/0", "location": LOW, "subtree_common_prefix": b"w/"}
    return {TOP: {"height": 1, "entries": [above]}, LOW: {"height": height, "entries": leaf}}


def test_keys_and_values_of_a_database():
    leaf = [
        {"key": b"c/0", "indirect_value": "value:p/:d%2Fv:5:5"},
        {"key": b"zarr.json", "inline_value": b"x"},
    ]
    found = database({"location": TOP}, tree_with(leaf), {"d/n": 10, "p/d/n": 20, "p/d/v": 10})
    assert found.values() == {"w/c/0": 5, "w/zarr.json": b"x"}
    assert database({}, {}, {}).values() == {}


@pytest.mark.parametrize(
    ("reference", "error", "tensor"),
    [
        ("value:../:d/v:0:5", CheckpointUnsafeError, "w"),
        ("value::%2Fetc%2Fpasswd:0:5", CheckpointUnsafeError, "w"),
        ("value:p/:d/..%2F..%2Fv:0:5", CheckpointUnsafeError, "w"),
        ("value:p/:d/v%00:0:5", CheckpointUnsafeError, "w"),
        ("value:ocdbt.process_3/:d/v:0:5", CheckpointMissingError, "w"),
        ("value:p/:d/v:8:5", CheckpointTruncatedError, "w"),
        ("value:p/:d/v:9223372036854775807:9223372036854775807", CheckpointTruncatedError, "w"),
        ("value:d/v:8:5", CheckpointFormatError, None),
    ],
)
def test_references_are_held_against_the_files(reference, error, tensor):
    nodes = tree_with([{"key": b"c/0", "indirect_value": reference}])
    with pytest.raises(error) as caught:
        database({"location": TOP}, nodes, {"d/n": 10, "p/d/n": 20, "p/d/v": 10}).values()
    assert type(caught.value) is error and caught.value.tensor == tensor


def test_a_tree_that_is_none():
    sizes = {"d/n": 10, "p/d/n": 20}
    with pytest.raises(CheckpointFormatError, match="no version"):
        database(None, {}, sizes).values()
    with pytest.raises(CheckpointFormatError, match="occurs twice"):
        nodes = tree_with([])
        nodes[TOP]["entries"] *= 2
        database({"location": TOP}, nodes, sizes).values()
    with pytest.raises(CheckpointFormatError, match="height"):
        database({"location": TOP}, tree_with([], height=1), sizes).values()
    with pytest.raises(CheckpointFormatError, match="UTF-8"):
        database(
            {"location": TOP}, tree_with([{"key": b"\xff", "inline_value": b""}]), sizes
        ).values()
    many = [{"key": b"%d" % i, "inline_value": b""} for i in range(51)]
    with pytest.raises(CheckpointLimitError, match="tensors"):
        database({"location": TOP}, tree_with(many), sizes, Limits(tensors=1)).values()


def test_a_deep_database(tmp_path):
    """The nodes leave out what their keys have in common."""
    import tensorstore

    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/"},
            "config": {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 5}}  # fmt: skip
    kvs = tensorstore.KvStore.open(spec).result()
    wanted = {f"layers.{i // 7}.w:%{i}/c/0": b"x" * (i % 10) for i in range(60)}
    for key, value in wanted.items():
        kvs[key] = value
    found = Store(str(tmp_path), Limits())._values
    assert found == {key: value if len(value) <= 5 else len(value) for key, value in wanted.items()}
    assert sorted(found) == sorted(key.decode() for key in kvs.list().result())
