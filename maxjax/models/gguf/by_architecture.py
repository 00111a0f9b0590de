"""``ByArchitecture``: what the table of each GGUF architecture gives, looked up in the registry of families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ..registry import gguf_architectures, of_gguf

V = TypeVar("V")


class ByArchitecture(Mapping[str, V]):
    """A mapping from GGUF architectures: a family is imported when its architecture is looked up.

    Args:
        value: function of the family with the table of an architecture.

    Example:
        >>> ByArchitecture(lambda family: family.model_type)["phi2"]
        'phi'
    """

    def __init__(self, value: Callable[[Any], V]):
        self._value = value

    def __getitem__(self, architecture: str) -> V:
        family = of_gguf(architecture)
        if family is None:
            raise KeyError(architecture)
        return self._value(family)

    def __iter__(self) -> Iterator[str]:
        return iter(gguf_architectures())

    def __len__(self) -> int:
        return len(gguf_architectures())
