"""Reads the objects of a ``quantization_config``, and checks the types of their values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CheckpointFormatError, UnsupportedModelError, shown

KEY = "quantization_config"
"""The key of ``config.json`` that describes how a checkpoint is quantised."""


class QuantSettings:
    """An object of ``quantization_config``; each value is checked when it is read.

    Args:
        raw: the object.
        where: path of keys to the object in the file, for messages.
        path: path of the file, for messages.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = KEY, path: Any = None):
        self.raw, self.where, self.path = raw, where, path

    def get(self, key: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key; the default if it is absent or null.

        Raises:
            CheckpointFormatError: the value has another type.
        """
        value = self.raw.get(key)
        if value is None:
            return default
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if type(value) not in kinds:
            names = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointFormatError(
                f"'{key}' of '{self.where}' has the wrong type", path=self.path,
                expected=names, found=shown(value),
            )  # fmt: skip
        return value

    def only(self, key: str, *known: Any, default: Any = None) -> Any:
        """The value of a key, which must be one of ``known``; if it is absent or null, ``default`` or the first.

        Raises:
            UnsupportedModelError: the value is another one.
        """
        value = self.raw.get(key)
        value = (known[0] if default is None else default) if value is None else value
        if not any(value == one and type(value) is type(one) for one in known):
            raise self.refused(f"{key} {shown(value)}", known)
        return value

    def changed(self, **values: Any) -> QuantSettings:
        """These settings with other values of some keys."""
        return QuantSettings({**self.raw, **values}, self.where, self.path)

    def refused(self, what: str, known: Sequence[Any] = ()) -> UnsupportedModelError:
        """The error for a setting that is not supported."""
        where = f"{os.fspath(self.path)}: " if self.path is not None else ""
        hint = f" (supported: {', '.join(map(str, known))})" if known else ""
        method = shown(self.raw.get("quant_method", ""))
        of = f"quant_method {method}" if "quant_method" in self.raw else self.where
        return UnsupportedModelError(f"{where}'{KEY}' ({of}) with {what}{hint}")

    def part(self, key: str) -> QuantSettings | None:
        """The object under a key; None if it is absent or null."""
        value = self.get(key, dict)
        return None if value is None else QuantSettings(value, f"{self.where}.{key}", self.path)

    def parts(self, key: str) -> dict[str, QuantSettings | None]:
        """The objects in the object under a key, by their keys; None for one that is null."""
        found = self.part(key)
        return {} if found is None else {one: found.part(one) for one in found.raw}

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two positive integers under a key, as a list or as "2x4"; None if it is absent or null."""
        value: Any = self.get(key, (list, str))
        if value is None:
            return None
        if isinstance(value, str):
            value = [int(n) if n.isdecimal() and len(n) < 10 else n for n in value.split("x")]
        if len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
            raise CheckpointFormatError(
                f"'{key}' of '{self.where}' is not two positive integers", path=self.path
            )
        return value[0], value[1]

    def positive(self, key: str, default: int | None = None) -> int:
        """A positive integer under a key.

        Raises:
            CheckpointFormatError: the value is not a positive integer, or is absent without a default.
        """
        value = self.get(key, int, default)
        if value is None or value < 1:
            raise CheckpointFormatError(
                f"'{key}' of '{self.where}' is not a positive integer", path=self.path,
                found=shown(value) if value is not None else "none",
            )  # fmt: skip
        return value
