"""Checks of a conversion's destination, before anything is written.

A destination that exists is refused unless ``overwrite`` is set, and always where replacing it
would lose values of the source.
"""

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
    """Refuse a destination that exists, and one that is the source if that would lose values.

    A step of orbax replaces nothing: it is added to the steps that are there.

    Args:
        found: the source.
        target: the destination.
        kind: format of the destination, "safetensors", "gguf" or "orbax".
        others: names of the files that will be written beside the weights.
        dtype, encoding: dtype or encoding that weights are converted to.
        overwrite: whether an existing checkpoint may be replaced.

    Raises:
        UserInputError: the destination is refused; the message says how to proceed.
    """
    source = [file.path for file in found.weights._family.open_table().files]
    part = _is_source(source, found.path, target)
    lost = _lost(found, target, source, dtype, encoding) if part else None
    if lost is not None:
        raise UserInputError(
            f"{target} is the checkpoint that is converted ({found.path}), and {lost}: "
            "name another destination"
        )
    there = _replaced_files(target, kind, others)
    if there and not overwrite:
        raise UserInputError(
            f"{target}: there is {some(there, 3)} already: name another destination, or pass "
            "overwrite=True (--overwrite) to replace it"
        )


def _replaced_files(target: Path, kind: str, others: Iterable[str]) -> list[str]:
    """The files at the destination that would be replaced, or no longer be what is opened there."""
    if kind == "orbax" or not os.path.lexists(target):
        return []
    if not target.is_dir():
        return [f"'{target.name}'"]
    names = sorted(entry.name for entry in target.iterdir() if not entry.name.startswith("."))
    weights = [n for n in names if Path(n).suffix.lower() in SUFFIXES or n.endswith(".index.json")]
    replaced = [name for name in others if os.path.lexists(target / name)]
    return [f"'{name}'" for name in dict.fromkeys([*weights, *replaced])]


def _is_source(source: list[str], path: Path, target: Path) -> bool:
    """Whether the destination is the source, one of its files, or the directory that holds it."""
    if not target.exists():
        return False
    if not target.is_dir():
        return any(os.path.samefile(file, target) for file in source if os.path.exists(file))
    place = os.path.realpath(target)
    places = [os.path.realpath(name) for name in (path, *source)]
    # Only the directory itself counts: what lies deeper in it is not replaced.
    return any(place in (one, os.path.dirname(one)) for one in places)


def _lost(
    found: Opened, target: Path, source: list[str], dtype: DType | None, encoding: str | None
) -> str | None:
    """What would be lost of the source if it were replaced, as a clause; None for nothing."""
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
    """Whether a dtype can hold every value of a tensor; only floats are converted."""
    if data.is_packed:
        return False
    if not data.dtype.is_float() or data.dtype is dtype:
        return True
    return np.promote_types(data.dtype.np, dtype.np) == dtype.np
