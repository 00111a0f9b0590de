"""Reads a GGUF file's metadata strictly: checks the type and the range of each value.

Values are Python's (int, float, bool, str, lists of these) or NumPy's.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import CheckpointFormatError, CheckpointLimitError, UnsupportedModelError, shown
from ..config import MAX_SIZE

# Upper bounds, as in the model families, because names and lists are made for each layer and expert.
MAX_LAYERS = 1000
MAX_EXPERTS = 1024
# The largest published vocabulary has 901,629 tokens (XLM-V), the most merges are 580,604 (Gemma 3).
MAX_TOKENS = 1 << 20
MAX_ADDED = 1 << 17
# Published tables that normalise text have up to 240 thousand bytes.
MAX_CHARSMAP = 1 << 20
# Numbers that a file has once for the model, and never in a list with one for each layer.
_OF_THE_MODEL = frozenset(
    """vocab_size context_length embedding_length block_count expert_count expert_used_count file_type
    pooling_type rope.scaling.original_context_length""".split()
)
_NO_TOKEN = (1 << 32) - 1


@dataclass(frozen=True)
class Settings:
    """Metadata below the prefix of an architecture: ``count("block_count")`` reads ``llama.block_count``.

    Where a method takes a ``default``, it is returned if the key is missing. Without it the key is required:
    a missing key raises CheckpointFormatError, as a value of the wrong type or out of range does.

    Attributes:
        metadata: values by key.
        prefix: prefix of each key, including its dot; it may be empty.
        path: path of the file, for messages.

    Example:
        >>> settings = Settings({"llama.block_count": 2}, "llama.")
        >>> settings.count("block_count"), settings.number("rope.freq_base", 1e4)
        (2, 10000.0)
        >>> settings.count("embedding_length")
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointFormatError: metadata key 'llama.embedding_length' is missing.
        Download the file again, or convert the model again.
    """

    metadata: Mapping[str, Any]
    prefix: str = ""
    path: str | os.PathLike[str] | None = None

    def has(self, key: str) -> bool:
        """Whether the metadata has the key."""
        return self.prefix + key in self.metadata

    def count(
        self, key: str, default: Any = ..., *, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> Any:
        """An integer in a range. A list of equal integers, one for each layer, is read as one integer.

        Raises:
            UnsupportedModelError: a list has different integers.
        """
        value = self._value(key, default)
        if value is default:
            return value
        if isinstance(value, list) and key not in _OF_THE_MODEL:
            value = self._same(key, value)
        if type(value) is not int:
            raise self.wrong(key, "a whole number", value)
        if not minimum <= value <= maximum:
            raise self.wrong(key, f"{minimum} to {maximum}", value, "is out of range")
        return value

    def some(self, key: str, default: Any = ...) -> Any:
        """An integer; or in a list with one for each layer, the one that all layers share that do not have 0.

        The default is also returned for a list of zeros.
        """
        value = self.any(key, None)
        if not isinstance(value, list) or not value:
            return self.count(key, default)
        counts = [count for count in self.items(key, int) if count]
        given = Settings({self.prefix + key: counts} if counts else {}, self.prefix, self.path)
        return given.count(key, default)

    def number(self, key: str, default: Any = ..., *, positive: bool = True) -> Any:
        """A finite number as a float; it must be positive, or with ``positive=False`` not negative."""
        value = self._value(key, default)
        if value is default:
            return value
        if type(value) not in (int, float):
            raise self.wrong(key, "a number", value)
        value = float(value)  # GGUF's integers have at most 64 bits
        if not 0 <= value < float("inf") or (positive and not value):
            least = "more than 0" if positive else "0 or more"
            raise self.wrong(key, f"a finite number, {least}", value, "is out of range")
        return value

    def flag(self, key: str, default: Any = ...) -> Any:
        """A bool."""
        return self._typed(key, default, bool, "a bool")

    def text(self, key: str, default: Any = ...) -> Any:
        """A str."""
        return self._typed(key, default, str, "a string")

    def items(self, key: str, kind: type, default: Any = ..., count: int | None = None) -> Any:
        """A list of values that are all ``kind``, as many as ``count``; None: of any length."""
        value = self._typed(key, default, list, f"a list of {kind.__name__}")
        if value is not default:
            odd = next((i for i, item in enumerate(value) if type(item) is not kind), None)
            if odd is not None:
                found = f"{shown(value[odd])} at {odd}"
                raise self.wrong(key, f"a list of {kind.__name__}", found, is_text=True)
            if count is not None and len(value) != count:
                problem = "is of another length"
                raise self.wrong(key, f"{count} values", len(value), problem, is_text=True)
        return value

    def firsts(self, keys: Collection[str]) -> Settings:
        """The settings with one value for each of the keys: the first, if the file has a list for the layers."""
        listed = {self.prefix + key: self._value(key, None) for key in keys}
        first = {
            key: value[0] for key, value in listed.items() if isinstance(value, list) and value
        }
        return Settings({**self.metadata, **first}, self.prefix, self.path) if first else self

    def any(self, key: str, default: Any = ...) -> Any:
        """The value without checks; arrays become lists."""
        return self._value(key, default)

    def length(self, key: str) -> int:
        """The number of items of an array; 0 if the key is missing or has another kind of value."""
        value = self.metadata.get(self.prefix + key)
        return len(value) if isinstance(value, (np.ndarray, list, tuple)) else 0

    def check_length(self, key: str, length: int, most: int = MAX_TOKENS) -> None:
        """Refuses an array of more than ``most`` items, before it becomes a list.

        Raises:
            CheckpointLimitError: it has more.
        """
        if length > most:
            raise CheckpointLimitError(
                f"metadata key '{self.prefix}{key}' has too many items",
                path=self.path, expected=f"at most {most}", found=length,
            )  # fmt: skip

    def wrong(
        self,
        key: str,
        expected: str,
        found: Any,
        problem: str = "has the wrong type",
        *,
        is_text: bool = False,
    ) -> CheckpointFormatError:
        """Makes the error for a value that cannot be used."""
        return CheckpointFormatError(
            f"metadata key '{self.prefix}{key}' {problem}",
            path=self.path,
            expected=expected,
            found=found if is_text else shown(found),
        )

    def unsupported(self, what: str) -> UnsupportedModelError:
        """Makes the error for a model that is valid, but that no GGUF table of maxjax describes."""
        return unsupported(what, self.path)

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(self.prefix + key)
        if value is None:
            if default is ...:
                raise CheckpointFormatError(
                    f"metadata key '{self.prefix}{key}' is missing", path=self.path
                )
            return default
        if isinstance(value, (np.ndarray, list, tuple)):
            self.check_length(key, len(value))
        if isinstance(value, (np.ndarray, np.generic)):
            value = value.tolist()
        if type(value) is float:
            return as_written(value)
        return list(value) if isinstance(value, tuple) else value

    def _typed(self, key: str, default: Any, kind: type, name: str) -> Any:
        value = self._value(key, default)
        if value is not default and type(value) is not kind:
            raise self.wrong(key, name, value)
        return value

    def _same(self, key: str, values: Sequence[Any]) -> Any:
        if not values:
            raise self.wrong(key, "a whole number", values)
        odd = next((value for value in values if value != values[0]), None)
        if odd is not None and type(odd) is int:
            raise self.unsupported(
                f"a model whose layers differ in '{self.prefix}{key}' "
                f"({shown(values[0])} and {shown(odd)})"
            )
        return values[0] if odd is None else odd


def settings(
    metadata: Mapping[str, Any],
    architecture: str | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Settings:
    """The Settings of the given architecture, or by default of the one that the file names.

    Raises:
        CheckpointFormatError: the file does not name an architecture.
    """
    if architecture is None:
        architecture = Settings(metadata, path=path).text("general.architecture")
    return Settings(metadata, f"{architecture}.", path)


def as_written(value: float) -> float:
    """The number of fewest digits that a file holds as this float32; a float64 as it is.

    So a model from a GGUF file has the settings, and the treedef, of the model that the file was made of.

    Example:
        >>> as_written(9.999999747378752e-06), as_written(0.1), as_written(1 / 3)
        (1e-05, 0.1, 0.3333333333333333)
    """
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def unsupported(what: str, path: str | os.PathLike[str] | None = None) -> UnsupportedModelError:
    """Makes the error, on one line, for a model that no GGUF table of maxjax describes."""
    where = "" if path is None else f"{os.fspath(path)}: "
    return UnsupportedModelError(f"{where}{what} is not supported"[:2000])


def unknown_architecture(
    name: str, known: Iterable[str], path: str | os.PathLike[str] | None
) -> UnsupportedModelError:
    """Makes the error for a GGUF architecture that is none of the known ones."""
    what = f"the GGUF architecture {shown(name)} (maxjax supports {', '.join(known)})"
    return unsupported(what, path)


def token_id(given: Settings, key: str, count: int) -> int | None:
    """The id of a special token among ``count`` tokens; None if the file names none.

    Some converters write -1 as 32 bits, 4294967295, for a token that does not exist.
    """
    name = f"{key}_token_id"
    if given.any(name, None) == _NO_TOKEN:
        return None
    return given.count(name, None, minimum=0, maximum=count - 1)
