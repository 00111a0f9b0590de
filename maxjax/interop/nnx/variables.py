"""Finds the Variables of a flax nnx module, by dotted paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import graphlib
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ...errors import UserInputError
from ..renaming import TWO_OF_ONE_NAME


@dataclass
class TargetVariable:
    """A Variable that holds an array or a placeholder for one.

    Attributes:
        name: dotted path: "blocks.0.attn.query.kernel".
        variable: the Variable.
        owner: module that has the Variable as an attribute.
        shape, dtype: shape and dtype of its array.
        sharding: sharding of the array; None: JAX chooses it.
        is_needed: whether the Variable must be loaded: it is a Param, or has no value.
        names: all paths of the Variable; a shared Variable has several.
    """

    name: str
    variable: Any
    owner: Any
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    is_needed: bool
    names: list[str] = field(default_factory=list)

    @property
    def value(self) -> Any:
        """The array, or its placeholder."""
        return self.variable.get_value() if self.variable.ref else self.variable.get_raw_value()

    def put(self, array: jax.Array) -> None:
        """Sets the Variable's value, without a copy."""
        if self.variable.ref:
            self.variable.set_value(array)
        else:
            self.variable.set_raw_value(array)


def targets(module: Any) -> dict[str, TargetVariable]:
    """The Variables in a module by path; a shared Variable is there once, under its first path.

    The state of random number generators and Variables without an array are left out.

    Raises:
        UserInputError: the object is not a module of flax nnx, or two Variables have the same path.
    """
    found: dict[int, TargetVariable] = {}
    for path, owner, variable in places(module):
        if id(variable) not in found:
            one = _target(path, owner, variable)
            if one is None:
                continue
            found[id(variable)] = one
        found[id(variable)].names.append(path)
    named = {one.name: one for one in found.values()}
    if len(named) < len(found):
        counts = Counter(one.name for one in found.values())
        raise UserInputError(TWO_OF_ONE_NAME.format(max(counts, key=counts.__getitem__)))
    return named


def random_paths(module: Any) -> set[str]:
    """The paths of the state of random number generators."""
    return {path for path, _, variable in places(module) if isinstance(variable, nnx.RngState)}


def places(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, owner, Variable) for every path in a module that leads to a Variable.

    Raises:
        UserInputError: the object is not a module of flax nnx.
    """
    if graphlib.get_node_impl(module) is None:
        raise UserInputError(f"expected a flax nnx module, not {type(module).__name__}")
    yield from _places(module, (), [], None)


def _places(
    node: Any, path: tuple[str, ...], above: list[Any], owner: Any
) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(node, nnx.Variable):
        yield ".".join(path), owner, node
        return
    impl = graphlib.get_node_impl(node)
    if impl is None or any(node is one for one in above):  # references may be circular
        return
    above.append(node)
    holder = node if isinstance(node, nnx.Module) else owner
    for key, child in impl.node_dict(node).items():
        if not str(key).startswith("_pytree__"):
            yield from _places(child, (*path, str(key)), above, holder)
    above.pop()


def _target(path: str, owner: Any, variable: Any) -> TargetVariable | None:
    if isinstance(variable, nnx.RngState):
        return None
    value = variable.get_value() if variable.ref else variable.get_raw_value()
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    is_needed = isinstance(variable, nnx.Param) or isinstance(value, jax.ShapeDtypeStruct)
    sharding = _sharding(path, variable, value)
    dtype = jax.dtypes.canonicalize_dtype(dtype)  # a NumPy array becomes an array of JAX
    return TargetVariable(path, variable, owner, tuple(shape), dtype, sharding, is_needed)


def _sharding(path: str, variable: Any, value: Any) -> Any:
    """The sharding of the value, or the sharding in the Variable's metadata; None: JAX chooses it."""
    if isinstance(value, jax.Array):
        is_chosen = not isinstance(value, Tracer) and value.committed
        return value.sharding if is_chosen else None
    sharding = getattr(value, "sharding", None)
    metadata = variable.get_metadata()
    mesh = metadata.get("mesh") or jax.sharding.get_mesh()
    if sharding is None:
        if not metadata.get("out_sharding") or mesh.empty:
            return None
        return NamedSharding(mesh, nnx.spmd.get_var_pspec(variable) or PartitionSpec())
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    if mesh.empty or mesh.abstract_mesh != sharding.mesh:
        raise UserInputError(
            f"'{path}' was made for a mesh that is not the current one: load inside jax.set_mesh(mesh)"
        )
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
