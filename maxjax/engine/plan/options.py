"""Reads the options of ``maxjax.plan``: meshes as sizes, memory as text, dtypes by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from ...dtype import DType
from ...errors import UserInputError
from ...graph.placement.mesh import AXES, abstract_mesh, axis_name, known_axes, similar_axis
from ...models.weights import named_dtype, named_float
from ...nn.kv_cache.cache import check_cache_dtype


@dataclass(frozen=True)
class PlanRequest:
    """The checked options of ``plan`` that determine the sizes of weights and KV cache."""

    dtype: DType | None
    batch: int | None
    length: int | None
    cache_dtype: DType | None


def read_mesh(mesh: Any, rules: Any = None) -> Any:
    """The mesh that an option describes; sizes alone give an AbstractMesh, which has no devices.

    Example:
        >>> dict(read_mesh("model=8,data=2").shape)
        {'model': 8, 'data': 2}
    """
    if mesh is None:
        if rules is not None:
            raise UserInputError("rules= need a mesh: plan(model, mesh, rules=...)")
        return None
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    sizes = list(read_axes(mesh) if isinstance(mesh, str) else _items(mesh))
    text = ",".join(f"{name}={size}" for name, size in sizes)
    found = {axis_name(name): size for name, size in sizes}
    if not found or any(type(n) is not int or not 0 < n <= 2**31 for n in found.values()):
        raise UserInputError(
            f"mesh: '{text}': sizes must be positive integers, as in model=8,data=2"
        )
    if len(found) < len(sizes):
        raise UserInputError(f"mesh: '{text}' names one axis twice")
    unknown = [name for name in found if name not in AXES]
    if unknown and rules is None and (len(found) > 1 or similar_axis(unknown[0])):
        raise UserInputError(
            f"mesh: there is no axis '{unknown[0]}': axes are {known_axes()}; a single axis may have any name"
        )
    return abstract_mesh(found)


def _items(mesh: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(mesh, Mapping):
        raise TypeError(
            f"mesh must be a jax Mesh or a dict of axis sizes, not {type(mesh).__name__}"
        )
    return iter(mesh.items())


def read_axes(text: str) -> Iterator[tuple[str, int]]:
    """The axes of a mesh and their sizes, of which make_mesh takes -1 too.

    Example:
        >>> list(read_axes("model=-1,data=2"))
        [('model', -1), ('data', 2)]
    """
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(-1|\d{1,10})\s*", part, re.ASCII)
        if match is None:
            raise UserInputError(f"mesh: '{text}' is not of the form model=8,data=2")
        yield match[1], int(match[2])


def read_dtype(option: str, dtype: Any) -> DType | None:
    if dtype is None:
        return None
    if option != "cache_dtype":
        return named_float(option, dtype)
    found = named_dtype(option, dtype)
    check_cache_dtype(found)
    return found
