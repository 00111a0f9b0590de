"""What a conversion would replace: refused unless it was asked for, and where it loses the source."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ...dtype import DType
from ...errors import UserInputError, some
from ...graph.weights import WeightData
from ...storage.formats import SUFFIXES
from .source import Opened


def check_destination(
    found: Opened,
    target: Path,
    kind: str,
    others: Iterable[str],
    *,
    dtype: DType | None,
    encoding: str | None,
    overwrite: bool,
) -> None:
    """Refuses a destination that is there, and one that is the source where that would lose values.

    A step of orbax is put beside those that are there.

    Args:
        kind: "safetensors", "gguf" or "orbax".
        others: Names of what will be written beside the weights.
        dtype, encoding: What the weights become.

    Raises:
        UserInputError: It is refused; the message says by what line it is not.
    """
    source = [file.path for file in found.weights._family.open_table().files]
    part = _is_of(source, found.path, target)
    lost = _lost(found, target, source, dtype, encoding) if part else None
    if lost is not None:
        raise UserInputError(
            f"{target} is the checkpoint that is converted ({found.path}), and {lost}: "
            "name another destination"
        )
    there = _there(target, kind, others)
    if there and not overwrite:
        raise UserInputError(
            f"{target}: there is {some(there, 3)} already: name another destination, or pass "
            "overwrite=True (--overwrite) to replace it"
        )


def _there(target: Path, kind: str, others: Iterable[str]) -> list[str]:
    """What would be replaced, or no longer be what the destination opens as."""
    if kind == "orbax" or not os.path.lexists(target):
        return []
    if not target.is_dir():
        return [f"'{target.name}'"]
    names = sorted(entry.name for entry in target.iterdir() if not entry.name.startswith("."))
    weights = [n for n in names if Path(n).suffix.lower() in SUFFIXES or n.endswith(".index.json")]
    replaced = [name for name in others if os.path.lexists(target / name)]
    return [f"'{name}'" for name in dict.fromkeys([*weights, *replaced])]


def _is_of(source: list[str], path: Path, target: Path) -> bool:
    """Whether the destination is the source, one of its files by whatever name, or holds it."""
    if not target.exists():
        return False
    if not target.is_dir():
        return any(os.path.samefile(file, target) for file in source if os.path.exists(file))
    place = os.path.realpath(target)
    places = [os.path.realpath(name) for name in (path, *source)]
    # What is below it is its own, as a step of orbax; other directories in it are none of it.
    return any(place in (one, os.path.dirname(one)) for one in places)


def _lost(
    found: Opened, target: Path, source: list[str], dtype: DType | None, encoding: str | None
) -> str | None:
    """What of the source would be lost if it were replaced, as a clause; None: nothing."""
    if not target.is_dir() and len(source) > 1:
        return "is made of several files, of which this is one"
    if encoding is not None:
        return f"quantize={encoding.lower()!r} would lose bits of its values"
    if dtype is not None and not all(_holds(dtype, data) for data in _data(found).values()):
        return f"dtype={dtype.name!r} would lose bits of its values"
    return None


def _data(found: Opened) -> Mapping[str, WeightData]:
    return found.tensors or {name: place.data() for name, place in found.weights.items()}


def _holds(dtype: DType, data: WeightData) -> bool:
    """Whether a type has every value of a tensor; that of what is no float is left."""
    if data._is_packed:
        return False
    if not data.dtype.is_float() or data.dtype is dtype:
        return True
    return np.promote_types(data.dtype.np, dtype.np) == dtype.np
