"""What a file really is, from its first bytes."""

import gzip
import io
import pickle
import zipfile

import numpy as np
import pytest

from maxjax.errors import CheckpointFormatError, CheckpointUnsafeError
from maxjax.storage import open_checkpoint, sniff
from maxjax.storage.signatures import foreign
from tests.storage.corpus import GGUF, GOOD, HTML, LFS, PICKLE, SAFETENSORS
from tests.storage.pytorch import corpus as pytorch_corpus


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(2))
    return buffer.getvalue()


def _zip(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, b"x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (LFS, "git-lfs pointer"),
        (HTML, "HTML page"),
        (b"\n <html>", "HTML page"),
        (b"\xef\xbb\xbf<!doctype html>", "HTML page"),
        (b"<?xml version='1.0'?><Error>", "XML document"),
        (GGUF, "GGUF"),
        (PICKLE, "pickle"),
        (_npz(), "zip archive"),
        (gzip.compress(b"x", mtime=0), "gzip"),
        (GOOD, None),
        (b"", None),
        (b"{}", None),
        *((pickle.dumps([{}, 1, "x"], protocol), "pickle") for protocol in range(2, 6)),
    ],
)
def test_sniff(content, what):
    assert sniff(content) == what


@pytest.mark.parametrize("case", [c for c in SAFETENSORS if not c.error], ids=str)
def test_no_safetensors_file_looks_like_something_else(case, tmp_path):
    assert sniff(case.build(tmp_path).read_bytes()) is None


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (_npz(), "NumPy"),
        (_zip("archive/data.pkl"), "PyTorch"),
        (_zip("readme.txt"), "zip archive"),
    ],
)
def test_zip_by_its_first_member(content, kind):
    error = foreign("m", content, "a safetensors file")
    assert type(error) is CheckpointFormatError
    assert kind in error.found


ONES = {"w": np.ones(2, np.float32)}
SAVED = {"zip": pytorch_corpus.saved(ONES), "legacy": pytorch_corpus.saved(ONES, is_legacy=True)}


def _npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(2))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "end"),
    [
        ("gguf", GGUF, ".gguf"),
        ("npz", _npz(), ".npz"),
        ("npy", _npy(), ".npy"),
        ("zip", SAVED["zip"], ".pt"),
        ("legacy", SAVED["legacy"], ".pt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_name_it_should_have(name, content, end, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises((CheckpointFormatError, CheckpointUnsafeError)) as caught:
        open_checkpoint(path)
    assert (type(caught.value) is CheckpointUnsafeError) == (name == "legacy")
    assert f"Rename it so that its name ends in {end}." in str(caught.value)
    renamed = path.rename(tmp_path / f"model{end}")
    with open_checkpoint(renamed) as table:
        assert len(table.entries) == (name != "gguf")


@pytest.mark.parametrize("saved", SAVED)
def test_a_name_that_says_nothing(saved, tmp_path):
    path = tmp_path / ("0" * 64)
    path.write_bytes(SAVED[saved])
    with open_checkpoint(path) as table:
        assert table.read("w").tolist() == [1.0, 1.0]


class _Payload:
    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
def test_pickle_names_what_it_would_call(protocol, capsys):
    error = foreign("m", pickle.dumps(_Payload(), protocol), "a safetensors file")
    assert type(error) is CheckpointUnsafeError
    assert "builtins.print" in str(error) or "__builtin__.print" in str(error)
    assert capsys.readouterr().out == ""


def test_nothing_foreign_gives_none():
    assert foreign("m", GOOD, "a safetensors file") is None
