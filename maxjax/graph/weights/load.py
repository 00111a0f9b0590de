"""``load_weights`` opens a checkpoint at a path as Weights."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...paths import local_path
from ...storage import TensorTable, open_checkpoint
from ...storage.hub import checkpoint_path
from ...storage.limits import Limits, allowing
from ...storage.table import Verify
from ..device import DeviceRef
from ..quantization import QuantizationEncoding
from ..weight.weight import Weight
from .cursor import FileWeights, SafetensorWeights
from .weight_data import WeightData, as_leaf


class GGUFWeights(FileWeights):
    """Weights of a GGUF file, or of a split set, of which any file may be named.

    Args:
        source: file; or an open ``gguf.GGUFReader``, whose file is opened again.
        tensors: MAX's own bookkeeping; ignored.
        prefix: name of the position to start at.
        allocated: dict that the data of allocated Weights is added to.

    :attr:`metadata` has the file's keys and values. ``allocate`` takes the shape of the values; a
    quantised Weight has the shape of its bytes, as in MAX, and a ``logical_shape``.

    Raises:
        CheckpointError: as for :func:`load_weights`.
    """

    def __init__(
        self,
        source: Any,
        tensors: Any = None,
        prefix: str = "",
        allocated: dict[str, Any] | None = None,
    ):
        del tensors
        reader = getattr(getattr(source, "data", None), "filename", None)
        path = os.fsdecode(source if reader is None else reader)
        self._open(open_checkpoint(path), path, prefix, allocated)

    @property
    def metadata(self) -> dict[str, Any]:
        """Keys and values of the file's header."""
        return self._family.open_table().metadata

    @property
    def _mmproj(self) -> GGUFWeights | None:
        """The file of the vision part of the model; None: only the text half is used, or there is no other."""
        found = self._family.mmproj
        assert found is None or isinstance(found, GGUFWeights)
        return found

    @property
    def _alignment(self) -> int:  # type: ignore[override]
        return int(self.metadata.get("general.alignment", 32))

    def keys(self) -> list[str]:
        """Full names of the tensors at or below this position, in the file's order."""
        below = {str(name): name for name in super().keys()}
        return [below[name] for name in self._family.entries if name in below]

    def allocate(
        self,
        dtype: Any = None,
        shape: Any = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef | None = None,
    ) -> Weight:
        """A new Weight of this full name, whose value is read at its first use.

        Args:
            dtype: float type of another width to convert to, which dequantises blocks. None
                keeps the file's.
            shape: expected shape of the values, checked against the file's.
            quantization_encoding: any encoding requires a quantised tensor; which one is not compared, as in MAX.
            device: device that it is declared on; the CPU by default.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the shape differs, the dtype is not a float, or an encoding is given for a
                tensor that is not quantised.
        """
        # As in MAX, the data is entered even if the call fails below.
        self._family.allocated[self.name] = self.data()
        return super().allocate(dtype, shape, quantization_encoding, device)

    def _check_encoding(self, data: WeightData, encoding: QuantizationEncoding) -> None:
        if data.quantization_encoding is None:
            raise ValueError(
                f"'{self.name}' is unquantized ({data.dtype}), not {encoding.value}: "
                "leave out quantization_encoding"
            )


as_leaf(GGUFWeights)

PathLike = str | bytes | os.PathLike[Any]
# Renames and converts the tensors of a file for a model: f(weights, …) → state dict.
WeightsAdapter = Callable[..., dict[str, WeightData]]
"""Type of a function from a checkpoint's weights to the names and values that a model of MAX expects."""


class WeightsFormat(enum.StrEnum):
    """The file formats MAX knows."""

    gguf = "gguf"
    safetensors = "safetensors"

    # Its text is `WeightsFormat.gguf`, as in MAX, although it equals "gguf".
    __str__ = enum.Enum.__str__

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def weights_format(weight_paths: Sequence[Any]) -> WeightsFormat:
    """The format of a list of paths, judged by their suffixes; files are not touched.

    Raises:
        ValueError: the list is empty, or the suffixes are mixed or unknown.
    """
    paths = [Path(os.fsdecode(path)) for path in weight_paths]
    if not paths:
        raise ValueError("no weight_paths provided cannot infer weights format.")
    for known in WeightsFormat:
        if all(path.suffix == f".{known.value}" for path in paths):
            return known
    raise ValueError(f"weights type cannot be inferred from {paths}")


def load_weights(
    paths: PathLike | Sequence[PathLike],
    *,
    verify: Verify = "auto",
    limits: Limits | None = None,
) -> FileWeights:
    """Opens a checkpoint and reads its headers.

    Args:
        paths: file (safetensors, GGUF, PyTorch, npz, npy), a directory (a single file, a
            sharded set with its index, or several files), an index file, or a list of files
            as in MAX: safetensors, one GGUF file, or one directory. A name as for
            :func:`maxjax.load` (``org/name``, ``"tiny"``) is found in the same way.
        verify: when to verify checksums: ``"auto"`` when a complete tensor is read, which
            costs almost nothing; True always; False never.
        limits: limits on the content of files, for files that need more than the defaults; they
            also apply to the configuration that ``build`` reads.

    Raises:
        CheckpointError: the path is missing, unreadable, corrupt or of an unsupported format;
            the subclass says which.
        ValueError: as in MAX, a list is empty, names files that do not exist, or mixes formats.
        TypeError: ``paths`` is an open file.

    Example:
        >>> load_weights("nowhere.safetensors")
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointMissingError: nowhere.safetensors: no such file. Check the path.
    """
    with allowing(limits):
        return _load(paths, verify)


def _load(paths: Any, verify: Verify) -> FileWeights:
    if isinstance(paths, str | bytes | os.PathLike | FileWeights):
        path = checkpoint_path(paths)
        return _cursor(open_checkpoint(path, verify=verify), path)
    if hasattr(paths, "read"):  # its lines would be taken for names
        kind = type(paths).__name__
        raise TypeError(f"paths must be a path or a list of paths, not {kind}: name the file")
    files = [Path(local_path(path)) for path in paths]
    if not files:
        raise ValueError("no paths provided, cannot load weights.")
    for file in files:
        if not file.exists():
            raise ValueError(f"file path ({file}) does not exist, cannot load weights.")
    if len(files) == 1 and files[0].is_dir():
        return _cursor(open_checkpoint(files[0], verify=verify), str(files[0]))
    if weights_format(files) is WeightsFormat.gguf:
        if len(files) > 1:
            raise ValueError("loading multiple gguf files is not supported.")
        return GGUFWeights._of(open_checkpoint(files[0], verify=verify), str(files[0]))
    return SafetensorWeights._of(open_checkpoint(files, verify=verify), str(files[0]))


def _cursor(table: TensorTable, path: str) -> FileWeights:
    """The cursor for a format; formats that MAX does not have use plain Weights."""
    kinds = {"safetensors": SafetensorWeights, "gguf": GGUFWeights}
    return kinds.get(table.format, FileWeights)._of(table, path)
