"""Subgraphs: layers that are traced once and called with the weights of many layers.

A Subgraph holds the treedef of its layer and the types of its inputs. They are the cache key of one jitted
function, so that equal layers with equal inputs are traced once in the process. The weights of a call are
looked up by name when it is made. The layer itself is not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ..dtype import DType
from ..errors import some
from ..kernels import StackSlice
from .kind import KIND, VALUES, computing_with, to_values, wants_values
from .shape import Shape, StaticDim
from .symbolic import Scope, is_checked, is_known, naming, sizes_of, to_dim, to_sizes
from .tensor_type import TensorType
from .value import TensorValue, unwrap
from .weight.running import RUNNING
from .weight.weight import Weight


class Subgraph:
    """A computation that ``ops.call`` runs with the weights of different layers.

    Attributes:
        name: name for messages.
        input_types: TensorTypes of the leaves of the inputs.
        placeholders: names of the weights that each call looks up, without the prefix.
    """

    def __init__(
        self,
        name: str,
        target: Any,
        inputs: Sequence[Any],
        slots: Sequence[str | Weight],
        templates: Sequence[Weight],
    ):
        leaves, self._in_tree = jax.tree.flatten(list(inputs), is_leaf=is_input)
        self.name = name
        self.input_types = [type_of_input(f"subgraph '{name}'", leaf) for leaf in leaves]
        self.placeholders = [slot for slot in slots if isinstance(slot, str)]
        self._target, self._slots, self._templates = target, list(slots), list(templates)
        self._output_types = self._trace(kind_of_call(inputs))

    @classmethod
    def of_function(
        cls, name: str, function: Callable[..., Any], inputs: Sequence[Any]
    ) -> Subgraph:
        """A subgraph of a function; it uses the Weights that it closes over in every call."""
        return cls(name, _Function(function), inputs, (), ())

    @property
    def inputs(self) -> tuple[TensorType, ...]:
        """The types of the inputs, which have ``dtype``, ``shape`` and ``device`` as the inputs of a Graph have."""
        return tuple(self.input_types)

    @property
    def output_types(self) -> list[TensorType]:
        """A TensorType for each output of a call."""
        return list(self._output_types)

    def _trace(self, kind: int) -> list[TensorType]:
        """Traces the layer for its output types; calls reuse the trace from JAX's cache."""
        dims = [dim for w in self._templates for dim in w.spec.dims]
        dims += [dim for kind in self.input_types for dim in kind.shape]
        names = {str(name) for name in Shape(dims).parameters}
        fresh = sizes_of(name for name in names if not is_known(name))
        # With names that the Graph being built does not have, each call is traced and checked again.
        with naming(fresh, Scope() if fresh or not is_checked() else None):
            shapes = [w.spec.leaf_shape or to_sizes(w.spec.dims) for w in self._templates]
            dtypes = [jax.dtypes.canonicalize_dtype(w.dtype.np) for w in self._templates]
            weights = list(map(jax.ShapeDtypeStruct, shapes, dtypes))
            inputs = [one.to_jax() for one in self.input_types]
            with computing_with(kind):
                run = functools.partial(_call, self._target, self._in_tree, kind)
                outputs = jax.eval_shape(run, weights, inputs)
        device = (
            self.input_types[0].device if self.input_types else TensorValue(np.zeros(())).device
        )
        return [TensorType(o.dtype, [to_dim(size) for size in o.shape], device) for o in outputs]

    def call(self, args: Sequence[Any], prefix: str) -> list[Any]:
        """Runs it; see ``ops.call``, which returns these arrays as what the caller computes with."""
        flat = [unwrap(leaf) for leaf in jax.tree.leaves(list(args), is_leaf=is_input)]
        check_arguments(self.name, flat, self.input_types)
        chosen = self._weights(prefix)
        homes = [w.home for w in chosen]
        homes = [home if home and RUNNING.is_below(home[0]) else None for home in homes]
        places = {home[1] for home in homes if home is not None}
        if len(places) == 1 and RUNNING.graphs:
            # A layer of a LayerStack in a Graph, which turns such calls into a loop (reroll.py).
            stacked = tuple(home is not None for home in homes)
            stacks = [home[0].array() for home in homes if home is not None]
            others = [w.array() for w, home in zip(chosen, homes, strict=True) if home is None]
            place = np.int32(places.pop())
            key = (self._target, self._in_tree, KIND.now, stacked)
            return _call_at(*key, stacks, place, others, flat)
        weights = [weight.array() for weight in chosen]
        return _call(self._target, self._in_tree, KIND.now, weights, flat)

    def _weights(self, prefix: str) -> list[Weight]:
        names = [prefix + name for name in self.placeholders]
        found = iter(self._find(names, prefix))
        return [slot if isinstance(slot, Weight) else next(found) for slot in self._slots]

    def _find(self, names: list[str], prefix: str) -> list[Weight]:
        if not names:
            return []
        templates = [
            t for t, slot in zip(self._templates, self._slots, strict=True) if isinstance(slot, str)
        ]
        found = RUNNING.find(names, templates)
        if found is None:
            raise ValueError(f"ops.call({self.name}, prefix='{prefix}'): no running Module, and no Graph, has the "
                             f"weights {some(names)}")  # fmt: skip
        for name, weight, template in zip(names, found, templates, strict=True):
            if weight.shape != template.shape or weight.dtype is not template.dtype:
                raise ValueError(f"weight '{name}' is {weight.dtype} {weight.shape!r}, but the subgraph "
                                 f"{self.name} was built for {template.dtype} {template.shape!r}")  # fmt: skip
        return found

    def __repr__(self) -> str:
        inputs = ", ".join(f"{t.dtype.name}{list(map(str, t.shape))}" for t in self.input_types)
        return f"Subgraph {self.name}({inputs}), {len(self.placeholders)} weights looked up"


def call(graph: Any, *args: Any, prefix: str = "") -> list[Any]:
    """Runs a subgraph with the weights whose names start with ``prefix``.

    Args:
        graph: subgraph from ``Module.build_subgraph`` or ``Graph.add_subgraph``, or a finished Graph.
        args: tensors or pytrees of tensors, whose leaves are the inputs in order.
        prefix: prefix of the names of the weights that the subgraph looks up. They are looked up in the
            innermost running Module that has all of them, or else in the Graph being built.

    Returns:
        A list with an array for each output. The outputs are TensorValues, as in MAX, if there is a TensorValue
        among ``args``, or if the caller computes with TensorValues, as in a Graph; arrays have no ``.tensor``.

    Raises:
        TypeError: ``graph`` is not a subgraph.
        ValueError: the number of tensors or the type of a tensor or weight is wrong, or a
            name is not found; the message says which.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import TensorValue
        >>> from maxjax.nn import Module
        >>> class Double(Module):
        ...     def __call__(self, x):
        ...         return x * 2
        >>> double = Double().build_subgraph("double", [jnp.ones(1)])
        >>> call(double, jnp.ones(1))
        [Array([2.], dtype=float32)]
        >>> call(double, TensorValue(jnp.ones(1)))[0].tensor.shape
        [Dim(1)]
    """
    if not callable(getattr(graph, "call", None)):
        raise TypeError(f"ops.call() takes a subgraph, not {type(graph).__name__}; "
                        "make one with Module.build_subgraph")  # fmt: skip
    kind = kind_of_call(args)
    with computing_with(kind):
        outputs = graph.call(args, prefix)
    return [TensorValue(y) for y in outputs] if kind == VALUES else list(outputs)


def kind_of_call(args: Iterable[Any]) -> int:
    """The kind of values (``kind.py``) that a subgraph computes with when it is called with these arguments."""
    return VALUES if KIND.values or wants_values(args) else KIND.now


def check_arguments(name: str, flat: Sequence[Any], kinds: Sequence[Any]) -> None:
    """Raises ValueError unless the arguments of a call have the types of its inputs."""
    if len(flat) != len(kinds):
        raise ValueError(f"Expected {len(kinds)} args to call to {name}, got {len(flat)}")
    for i, (array, kind) in enumerate(zip(flat, kinds, strict=True)):
        found = TensorValue(array).type
        sizes = zip(found.shape, kind.shape, strict=False)
        dtype = DType.of(jax.dtypes.canonicalize_dtype(kind.dtype.np))
        fits = found.rank == kind.rank and found.dtype is dtype
        if not fits or any(a != b and isinstance(b, StaticDim) for a, b in sizes):
            raise ValueError(f"argument {i} of the call to {name} is {found.dtype} {found.shape!r}, "
                             f"but it was built for {kind.dtype} {kind.shape!r}")  # fmt: skip


class _Function:
    """A function of TensorValues with the interface of a treedef."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def unflatten(self, leaves: Any) -> Callable[..., Any]:
        return self._call

    def _call(self, *inputs: Any) -> Any:
        with computing_with(VALUES):
            return self.function(*to_values(inputs))


def _run(target: Any, in_tree: Any, kind: int, weights: list[Any], inputs: list[Any]) -> list[Any]:
    layer = target.unflatten(weights)
    given = map(TensorValue, inputs) if kind == VALUES else inputs
    result = layer(*jax.tree.unflatten(in_tree, given))
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    for output in outputs:
        if not isinstance(output, (TensorValue, jax.Array)):
            raise TypeError(f"a subgraph must return a tensor or a flat list of tensors, but an output is "
                            f"a {type(output).__name__}")  # fmt: skip
    return [unwrap(output) for output in outputs]


# ``kind`` is part of the key, because traces of the kinds differ (``kind.py``).
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call(target: Any, in_tree: Any, kind: int, weights: Any, inputs: Any) -> list[Any]:
    return _run(target, in_tree, kind, weights, inputs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _call_at(
    target: Any,
    in_tree: Any,
    kind: int,
    stacked: tuple[bool, ...],
    stacks: list[Any],
    place: Any,
    others: list[Any],
    inputs: list[Any],
) -> list[Any]:
    """Like ``_call``, with the weights of the layer at index ``place`` of the stacks."""
    slices, plain = (StackSlice(stack, place) for stack in stacks), iter(others)
    weights = [next(slices if is_stacked else plain) for is_stacked in stacked]
    return _run(target, in_tree, kind, weights, inputs)


def is_input(x: Any) -> bool:
    """Whether a value is a single input, although JAX would flatten it."""
    return isinstance(x, (TensorValue, TensorType))


def type_of_input(what: str, leaf: Any) -> TensorType:
    """The TensorType of an input that is given as a type, a placeholder or a tensor.

    Args:
        what: what has the input, for messages.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(leaf, TensorType):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return TensorType(leaf.dtype, leaf.shape, TensorValue(np.zeros(())).device)
    if isinstance(leaf, (TensorValue, jax.Array, np.ndarray)):
        return TensorValue(leaf).type
    raise TypeError(f"{what}: an input is a tensor or a TensorType, not {type(leaf).__name__}")
