"""Floor 3. Programs: a Graph with its weights → trace → lower → compile → Model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..driver import Buffer
from ..dtype import DType
from ..errors import some
from .graph import Entry, Graph
from .shape import StaticDim
from .symbolic import naming
from .tensor_type import TensorType
from .value import TensorValue
from .weights import WeightData


class Model:
    """A compiled Graph and its weights, ready to run.

    Made by ``InferenceSession.load`` or ``Module.compile``. A Graph of static shapes is
    compiled at once; one with symbolic dimensions is lowered once and compiled by XLA for
    each set of sizes it meets.

    Attributes:
        name: The Graph's.
        input_types, output_types: The Graph's.
    """

    def __init__(self, graph: Graph, registry: Mapping[str, Any] | None = None):
        if graph.jaxpr is None:
            raise ValueError(
                f"Graph '{graph.name}' has no output: end its with block with g.output(…)"
            )
        self.name = graph.name
        self.input_types, self.output_types = graph.input_types, graph.output_types
        self._weights = [_weight_value(entry, graph, registry) for entry in graph.entries]
        run = _function(graph)
        weights = [
            jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=_committed(w)) for w in self._weights
        ]
        with naming(graph._sizes):
            inputs = [kind.to_jax() for kind in graph.input_types]
        if all(kind.is_static for kind in graph.input_types):
            self._run = jax.jit(run).lower(weights, inputs).compile()
        else:
            self._run = jax.jit(jax.export.export(jax.jit(run))(weights, inputs).call)

    def execute(self, *args: Any) -> list[TensorValue]:
        """Runs it.

        Args:
            args: An array for each input: JAX, NumPy, a Buffer, a TensorValue, or anything
                that speaks DLPack, of exactly its dtype and shape.

        Returns:
            A TensorValue for each output (``.to_numpy()`` as MAX's Buffer has).

        Raises:
            ValueError: Another number of inputs, or one of another type; both are named.
        """
        if len(args) != len(self.input_types):
            raise ValueError(f"Number of inputs ({len(args)}) does not match expected number "
                             f"({len(self.input_types)}) for model '{self.name}'")  # fmt: skip
        sizes: dict[str, int] = {}
        arrays = [
            _input(i, a, kind, sizes)
            for i, (a, kind) in enumerate(zip(args, self.input_types, strict=True))
        ]
        return [TensorValue(y) for y in self._run(self._weights, arrays)]

    def __call__(self, *args: Any) -> list[TensorValue]:
        """As :meth:`execute`."""
        return self.execute(*args)

    def __repr__(self) -> str:
        return f"Model({self.name}, inputs={list(self.input_types)})"


def _function(graph: Graph) -> Any:
    """The graph as a function of (weights, inputs)."""
    closed = graph.jaxpr
    by_address = {entry.address: i for i, entry in enumerate(graph.entries)}

    def run(weights: list[Any], inputs: list[Any]) -> list[Any]:
        return _evaluate(
            closed.jaxpr,
            _constants(closed.consts, weights, by_address),
            inputs,
            weights,
            by_address,
        )

    return run


def _constants(consts: Sequence[Any], weights: list[Any], by_address: dict[int, int]) -> list[Any]:
    """The constants of a jaxpr, with each stand-in replaced by its weight."""
    found = []
    for const in consts:
        index = by_address.get(_address(const))
        found.append(const if index is None else weights[index].reshape((1, *weights[index].shape)))
    return found


def _address(const: Any) -> int:
    """Where a NumPy constant lies; 0 for a jax.Array, which is no stand-in."""
    return 0 if isinstance(const, jax.Array) else np.asarray(const).ctypes.data


def _evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    weights: list[Any],
    by_address: dict[int, int],
) -> list[Any]:
    """Runs a jaxpr with other constants; a jitted part that closes over a Weight is inlined."""
    if not any(_holds_weight(equation, by_address) for equation in jaxpr.eqns):
        return _run(
            jaxpr, jaxpr.eqns, (*jaxpr.constvars, *jaxpr.invars), jaxpr.outvars, (*consts, *args)
        )
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for equation in jaxpr.eqns:
        if _holds_weight(equation, by_address):
            inner = equation.params["jaxpr"]
            held = _constants(inner.consts, weights, by_address)
            operands = [_read(atom, values) for atom in equation.invars]
            results = _evaluate(inner.jaxpr, held, operands, weights, by_address)
        else:
            free = [atom for atom in equation.invars if not _is_literal(atom)]
            free = list(dict.fromkeys(free))
            results = _run(jaxpr, [equation], free, equation.outvars, [values[v] for v in free])
        values.update(zip(equation.outvars, results, strict=True))
    return [_read(atom, values) for atom in jaxpr.outvars]


def _read(atom: Any, values: dict[Any, Any]) -> Any:
    return atom.val if _is_literal(atom) else values[atom]


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _run(jaxpr: Any, equations: Any, inputs: Any, outputs: Any, args: Sequence[Any]) -> list[Any]:
    """Some equations of a jaxpr as a function of their free variables."""
    from jax.extend import core as jax_core  # takes a while to import, and only Graphs need it

    part = jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(equations),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(part, []))(*args)


def _holds_weight(equation: Any, by_address: dict[int, int]) -> bool:
    """Whether the equation is a jitted part that closes over a Weight, at any depth."""
    if equation.primitive.name not in ("jit", "pjit"):
        return False
    closed = equation.params["jaxpr"]
    return any(_address(const) in by_address for const in closed.consts) or any(
        _holds_weight(inner, by_address) for inner in closed.jaxpr.eqns
    )


def _weight_value(entry: Entry, graph: Graph, registry: Mapping[str, Any] | None) -> jax.Array:
    """A weight's value: the registry's, else its own."""
    value = None if registry is None else registry.get(entry.name)
    if value is not None and [e.name for e in graph.entries].count(entry.name) > 1:
        raise ValueError(
            f"Graph '{graph.name}' has several weights named '{entry.name}', so the weights registry "
            "cannot say which is meant: call state_dict() on the model first, which names them"
        )
    if value is None:
        value = entry.weight.value
    if value is None:
        known = "" if registry is None else f"; it has {some(sorted(registry)) or 'nothing'}"
        raise ValueError(f"Weight '{entry.name}' is not in the weights registry{known}")
    array = np.asarray(value) if isinstance(value, (WeightData, Buffer)) else value
    array = array if isinstance(array, jax.Array) else np.array(array)
    wanted = entry.stand_in.dtype
    if tuple(array.shape) != entry.shape or jax.dtypes.canonicalize_dtype(array.dtype) != wanted:
        raise ValueError(f"Weight '{entry.name}' in the weights registry is {array.dtype} {tuple(array.shape)}, "
                         f"but the graph wants {wanted} {entry.shape}")  # fmt: skip
    return jax.device_put(array, entry.weight._sharding)


def _committed(array: jax.Array) -> Any:
    return array.sharding if getattr(array, "committed", False) else None


def _input(i: int, value: Any, kind: TensorType, sizes: dict[str, int]) -> Any:
    """An input of the right type as an array; ``sizes`` collects what the names stand for."""
    if isinstance(value, (TensorValue, Buffer, WeightData)):
        value = value.value if isinstance(value, TensorValue) else np.asarray(value)
    elif not isinstance(value, (jax.Array, np.ndarray)):
        value = np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
    dtype = DType.of(jax.dtypes.canonicalize_dtype(kind.dtype.np))
    fits = DType.of(value.dtype) in (kind.dtype, dtype) and value.ndim == kind.rank
    for size, dim in zip(value.shape, kind.shape, strict=False):
        want = int(dim) if isinstance(dim, StaticDim) else sizes.setdefault(str(dim), size)
        fits = fits and size == want
    if not fits:
        known = f" with {sizes}" if sizes else ""
        raise ValueError(f"Input at position {i}: {DType.of(value.dtype)} {tuple(value.shape)} does not match expected "
                         f"type {kind.dtype} {kind.shape!r}{known}")  # fmt: skip
    return value if value.dtype == dtype.np else value.astype(dtype.np)
