"""``ByArchitecture``: what the table of each GGUF architecture gives, looked up in the registry of families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ..registry import gguf_architectures, of_gguf

V = TypeVar("V")


class ByArchitecture(Mapping[str, V]):
    """A mapping from GGUF architectures: a family is imported when its architecture is looked up.

    Args:
        built_in: values of architectures whose families have no ``GGUFTable``.
        value: function of a family that has one.

    Example:
        >>> ByArchitecture({"llama": "?"}, lambda family: family.model_type)["phi2"]
        'phi'
    """

    def __init__(self, built_in: Mapping[str, V], value: Callable[[Any], V]):
        self._built_in, self._value = built_in, value

    def __getitem__(self, architecture: str) -> V:
        family = of_gguf(architecture)
        return self._built_in[architecture] if family is None else self._value(family)

    def __iter__(self) -> Iterator[str]:
        return iter(gguf_architectures())

    def __len__(self) -> int:
        return len(gguf_architectures())
