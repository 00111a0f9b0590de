"""What a file really is, from its first bytes."""

import gzip
import io
import pickle
import zipfile

import numpy as np
import pytest

from maxjax.errors import CheckpointFormatError, CheckpointUnsafeError
from maxjax.storage import sniff
from maxjax.storage.sniff import foreign
from tests.storage.corpus import GGUF, GOOD, HTML, LFS, PICKLE, SAFETENSORS


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
