"""The supported formats: the names and first bytes that identify each, and the function that opens it.

A format is a folder of this package and one record here. Readers use the records to say what a file of
another format is. To avoid circular imports, a record names its functions as text, and they are
imported when a file is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """One format, and how it is recognised.

    Attributes:
        name: value of ``TensorTable.format``.
        opens: "module:function" that opens a path.
        suffixes: suffixes of its files.
        stem: stem of Hugging Face's file name for a model, which has the first of the suffixes;
            such files may form sets with an index.
        reads: "module:function" that reads one open file of a set.
        single: suffixes of which a directory may hold one file, or one set that needs no index.
        marks: names, any one of which makes a directory a checkpoint of this format.
        signs: name of a kind of file → pattern of its first bytes.
        members: name of a kind of zip archive → suffixes of its first member's name.
    """

    name: str
    opens: str
    suffixes: tuple[str, ...] = ()
    stem: str = ""
    reads: str = ""
    single: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    signs: dict[str, bytes] = field(default_factory=dict)
    members: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def open(self) -> Callable[..., Any]:
        """The function that opens a path and returns a TensorTable."""
        return _function(self.opens)

    @property
    def read(self) -> Callable[..., Any]:
        """The function that reads (entries, metadata) of an open file, its number in a set and Limits."""
        return _function(self.reads)

    @property
    def suffix(self) -> str:
        """The suffix that a single file should have."""
        return (self.single or self.suffixes)[0]

    def claims(self, names: Sequence[str]) -> bool:
        """Whether a directory with files of these names is a checkpoint of this format."""
        return any(mark in names for mark in self.marks)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), function)


SAFETENSORS = Format(
    "safetensors",
    "safetensors.reader:open_safetensors",
    (".safetensors",),
    stem="model",
    reads="safetensors.reader:read_header",
)
GGUF = Format(
    "gguf",
    "gguf.reader:open_gguf",
    (".gguf",),
    single=(".gguf",),
    signs={"GGUF": rb"GGUF|FUGG"},
)
PYTORCH = Format(
    "pytorch",
    "pytorch.reader:open_pytorch",
    (".bin", ".pt", ".pth", ".ckpt"),
    stem="pytorch_model",
    reads="pytorch.reader:read_pytorch",
    single=(".pt", ".pth", ".ckpt"),
    signs={"pickle": rb"\x80[\x02-\x05]|c[a-z_][\w.]*\n\w+\n|\(lp\d|\(dp\d"},
    members={"PyTorch checkpoint": (".pkl", ".format_version", ".storage_alignment", "version")},
)
NPZ = Format(
    "npz",
    "numpy.npz:open_npz",
    (".npz",),
    single=(".npz",),
    members={"NumPy .npz": (".npy",)},
)
NPY = Format(
    "npy",
    "numpy.npy:open_npy",
    (".npy",),
    signs={"NumPy array (.npy)": rb"\x93NUMPY"},
)
ORBAX = Format(
    "orbax",
    "orbax.reader:open_orbax",
    marks=("_METADATA", "_CHECKPOINT_METADATA", "orbax.checkpoint"),
)

FORMATS = (SAFETENSORS, GGUF, PYTORCH, NPZ, NPY, ORBAX)
"""Every format, in the order in which a directory is searched for it."""

SUFFIXES = {suffix: format for format in FORMATS for suffix in format.suffixes}
"""Suffix → the format that a file with it is read as."""

UNREADABLE = {
    ".h5": "HDF5",
    ".msgpack": "flax msgpack",
    ".onnx": "ONNX",
    ".distcp": "torch.distributed.checkpoint",
    ".pkl": "a pickle",
    ".pickle": "a pickle",
}
"""Suffix → name of an unsupported format; such files are refused whatever their content."""
