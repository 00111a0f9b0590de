"""The formats that are read: by which names and bytes each is recognised, and what opens it.

A format is a folder of this package and one record here. The records lie below the readers, which say
by them what a file of another format is; so a record names its functions as text, and they are
imported when a file is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """One format, and what recognises it.

    Attributes:
        name: What ``TensorTable.format`` says.
        opens: "module:function" that opens a path.
        suffixes: What the names of its files end with.
        stem: What Hugging Face calls the file of a model, which has the first of the suffixes;
            there may be sets of such files, with an index.
        reads: "module:function" that reads one open file of a set.
        single: The suffixes of files of which a directory holds one, or one set that knows itself.
        marks: Names of which any in a directory makes it a checkpoint of this format.
        signs: What a file may be called → the pattern that its first bytes match.
        members: What a zip archive may be called → how the name of its first member ends.
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
        """Opens a path and gives a TensorTable."""
        return _function(self.opens)

    @property
    def read(self) -> Callable[..., Any]:
        """Reads (entries, metadata) of an open file, given its number in a set and Limits."""
        return _function(self.reads)

    @property
    def suffix(self) -> str:
        """What a single file's name should end with."""
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
"""What a file's name ends with → the format it is read as."""

UNREADABLE = {
    ".h5": "HDF5",
    ".msgpack": "flax msgpack",
    ".onnx": "ONNX",
    ".pkl": "a pickle",
    ".pickle": "a pickle",
}
"""What a file's name ends with → a format that is not read, whatever the content."""
