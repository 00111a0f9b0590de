"""Every case of the corpus: the right class, the file and the tensor named, nothing else done."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors

from maxjax.errors import CheckpointError
from maxjax.storage import TensorTable, open_checkpoint, open_index, open_safetensors
from tests.storage.corpus import SAFETENSORS, Case
from tests.storage.index_corpus import INDEX
from tests.storage.watch import watched


def raw_bytes(array: np.ndarray) -> bytes:
    """An array as a safetensors file holds it."""
    if array.dtype == ml_dtypes.float4_e2m1fn:
        nibbles = array.reshape(-1).view(np.uint8)
        array = nibbles[0::2] | nibbles[1::2] << 4
    return array.tobytes()


def assert_equals_library(table: TensorTable, arrays: dict[str, np.ndarray], number: int) -> None:
    """One file of an open checkpoint, bit for bit what the safetensors package reads."""
    theirs = dict(safetensors.deserialize(Path(table.files[number].path).read_bytes()))
    ours = {name for name, entry in table.entries.items() if entry.file == number}
    assert ours <= theirs.keys()
    for name in ours:
        array = arrays[name]
        assert (table.entries[name].dtype.safetensors, list(array.shape)) == (
            theirs[name]["dtype"], theirs[name]["shape"])  # fmt: skip
        assert raw_bytes(array) == bytes(theirs[name]["data"])
        assert array.dtype == table.entries[name].dtype.np
        assert array.flags.c_contiguous and (not array.size or array.ctypes.data % 64 == 0)


def read_all(path: Path, opening=open_checkpoint) -> tuple[TensorTable, dict[str, np.ndarray]]:
    table = opening(path)
    try:
        return table, table.read_many()
    finally:
        table.close()


def assert_refused(case: Case, path: Path, opening) -> None:
    files_before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
    with watched() as acts, pytest.raises(CheckpointError) as caught:
        read_all(path, opening)
    error, message = caught.value, str(caught.value)
    assert not acts
    assert type(error) is case.error, message
    assert "\n" not in message and str(path.parent) in message
    assert error.path and str(path.parent) in error.path
    for name in case.names:
        assert getattr(error, name) is not None, f"{name} is missing: {message}"
    if case.tensor:
        assert error.tensor == case.tensor, message
        assert f"tensor '{case.tensor}'" in message
    for word in case.says:
        assert word in message
    if "offset" in case.names and error.path and os.path.isfile(error.path):
        assert 0 <= error.offset <= os.path.getsize(error.path)
    if files_before is not None:
        assert set(os.listdir("/proc/self/fd")) <= files_before, "a file was left open"


@pytest.mark.parametrize("opening", [open_safetensors, open_checkpoint], ids=["file", "any"])
@pytest.mark.parametrize("case", [c for c in SAFETENSORS if c.error], ids=str)
def test_bad_file_is_refused(case, opening, tmp_path):
    path = case.build(tmp_path)
    if case.name == "is_directory" and opening is open_checkpoint:
        pytest.skip("a directory is a checkpoint to open_checkpoint: see test_index.py")
    assert_refused(case, path, opening)


@pytest.mark.parametrize("case", [c for c in SAFETENSORS if not c.error], ids=str)
def test_good_file_loads_bit_exact(case, tmp_path):
    path = case.build(tmp_path)
    with watched() as acts:
        table, arrays = read_all(path)
    assert not acts
    assert list(arrays) == list(table.entries)
    assert len(arrays) == len(dict(safetensors.deserialize(path.read_bytes())))
    assert_equals_library(table, arrays, 0)
    assert all(array.flags.writeable for array in arrays.values())


@pytest.mark.parametrize("opening", [open_index, lambda path: open_checkpoint(path.parent)],
                         ids=["index", "directory"])  # fmt: skip
@pytest.mark.parametrize("case", [c for c in INDEX if c.error], ids=str)
def test_bad_set_is_refused(case, opening, tmp_path):
    assert_refused(case, case.build(tmp_path), opening)


@pytest.mark.parametrize("case", [c for c in INDEX if not c.error], ids=str)
def test_good_set_loads_bit_exact(case, tmp_path):
    path = case.build(tmp_path)
    with watched() as acts:
        table, arrays = read_all(path)
    assert not acts
    assert sorted(arrays) == ["a", "b"]
    assert arrays["a"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert arrays["b"].tolist() == [10.0, 11.0, 12.0, 13.0]
    for number in range(len(table.files)):
        assert_equals_library(table, arrays, number)


def test_case_names_are_unique():
    for cases in (SAFETENSORS, INDEX):
        names = [case.name for case in cases]
        assert len(names) == len(set(names))


def test_every_error_names_what_it_must():
    """A case that asks for nothing would pass on any message."""
    silent = [c.name for c in [*SAFETENSORS, *INDEX] if c.error and not (c.names or c.says)]
    assert set(silent) <= {"is_symlink_loop", "is_symlink_dangling"}
