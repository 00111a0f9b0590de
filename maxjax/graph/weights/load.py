"""Load_weights: a path → Weights."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...storage import TensorTable, open_checkpoint
from ...storage.limits import Limits, allowing
from ...storage.table import Verify
from ..device import DeviceRef
from ..quantization import QuantizationEncoding
from ..weight.weight import Weight
from .cursor import SafetensorWeights, Weights, _Family
from .weight_data import WeightData, as_leaf


class GGUFWeights(Weights):
    """Weights of a GGUF file, or of a split set by any of its parts.

    Args:
        source: The file; or an open ``gguf.GGUFReader``, whose file is opened again.
        tensors: MAX's own bookkeeping; not looked at.
        prefix: The place to start at.
        allocated: A dict to enter allocated data in.

    :attr:`metadata` has the file's keys and values. ``allocate`` takes shapes counted in
    weights; a Weight of packed blocks has MAX's byte view, and ``logical_shape`` beside it.

    Raises:
        CheckpointError: As for :func:`load_weights`.
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
        self._family = _Family(open_checkpoint(path), path, allocated)
        self._prefix = prefix

    @property
    def metadata(self) -> dict[str, Any]:
        """Keys and values of the file's header."""
        return self._family.open_table().metadata

    @property
    def _alignment(self) -> int:  # type: ignore[override]
        return int(self.metadata.get("general.alignment", 32))

    def keys(self) -> list[str]:
        """Full names of the tensors at or below this place, in the file's order."""
        below = {str(name): name for name in super().keys()}
        return [below[name] for name in self._family.open_table().entries if name in below]

    def allocate(
        self,
        dtype: Any = None,
        shape: Any = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef | None = None,
    ) -> Weight:
        """A new Weight of this full name, whose value is read when it is first used.

        Args:
            dtype: Another float width to convert to; packed blocks are decoded for it. None
                keeps the file's.
            shape: Checked against the file's, counted in weights.
            quantization_encoding: Which blocks are expected; any, for a tensor of blocks.
            device: Where it is declared to live; the CPU by default.

        Raises:
            KeyError: No such tensor.
            ValueError: Another shape, a dtype that is no float width, or an encoding for a
                tensor that is not packed.
        """
        # As in MAX, the data is entered even if it is refused below.
        self._family.allocated[self.name] = self.data()
        return super().allocate(dtype, shape, quantization_encoding, device)

    def _check_encoding(self, data: WeightData, encoding: QuantizationEncoding) -> None:
        if data.quantization_encoding is None:
            raise ValueError(
                f"'{self.name}' is unquantized ({data.dtype}), not {encoding.value}: "
                "leave quantization_encoding away"
            )


as_leaf(GGUFWeights)

PathLike = str | bytes | os.PathLike[Any]
# Renames and converts what a file holds for a model: f(weights, …) → state dict.
WeightsAdapter = Callable[..., dict[str, WeightData]]


class WeightsFormat(enum.StrEnum):
    """The file formats MAX knows."""

    gguf = "gguf"
    safetensors = "safetensors"


def weights_format(weight_paths: Sequence[Any]) -> WeightsFormat:
    """The format a list of paths has by its suffixes; the files are not touched.

    Raises:
        ValueError: The list is empty, or the suffixes are mixed or unknown.
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
) -> Weights:
    """Opens a checkpoint and reads its headers.

    Args:
        paths: A file (safetensors, GGUF, PyTorch, npz, npy), a directory (a single file, a
            sharded set with its index, or several files), an index file, or a list of files,
            which is MAX's: safetensors, or one GGUF file.
        verify: When checksums are compared with what is read: ``"auto"`` when all of a tensor
            is read at once, which costs next to nothing; True always; False never.
        limits: What the files may ask of this process, where one says that it needs more than
            usual; they count for the configuration that ``build`` reads beside them too.

    Raises:
        CheckpointError: The path is missing, unreadable, damaged or of a format that is
            not supported; the class says which.
        ValueError: As MAX: a list that is empty, has files that do not exist, or mixes formats.

    Example:
        >>> load_weights("nowhere.safetensors")
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointMissingError: nowhere.safetensors: no such file
    """
    with allowing(limits):
        return _load(paths, verify)


def _load(paths: Any, verify: Verify) -> Weights:
    if isinstance(paths, str | bytes | os.PathLike):
        path = os.fsdecode(paths)
        return _cursor(open_checkpoint(path, verify=verify), path)
    files = [Path(os.fsdecode(path)) for path in paths]
    if not files:
        raise ValueError("no paths provided, cannot load weights.")
    for file in files:
        if not file.exists():
            raise ValueError(f"file path ({file}) does not exist, cannot load weights.")
    if weights_format(files) is WeightsFormat.gguf:
        if len(files) > 1:
            raise ValueError("loading multiple gguf files is not supported.")
        return GGUFWeights._of(open_checkpoint(files[0], verify=verify), str(files[0]))
    return SafetensorWeights._of(open_checkpoint(files, verify=verify), str(files[0]))


def _cursor(table: TensorTable, path: str) -> Weights:
    """The cursor for a format; those that MAX does not have need no class of their own."""
    kinds = {"safetensors": SafetensorWeights, "gguf": GGUFWeights}
    return kinds.get(table.format, Weights)._of(table, path)
