"""Programs: a Graph with its weights → trace → lower → compile → Model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..agreement import agreed
from ..dtype import DType
from ..errors import some
from ..kernels.stack_slice import stack_of
from ..progress import compiling
from ..reloads import Compiled
from ..rendering.rendered import Rendered, summary
from ..rendering.row import Row
from .buffer import BufferValue
from .graph import Graph, GraphWeight, program_row
from .kind import ARRAYS, computing_with
from .operands import fitting
from .placement.arrays import default_device
from .placement.division import spec_text
from .rebinding import check, check_determined, sizes_of_names
from .shape import Shape, StaticDim
from .subgraph import is_input, type_of_input
from .symbolic import naming, to_dim
from .tensor_type import Type
from .value import TensorValue, unwrap
from .weight.epoch import EPOCH, note_leaf_cache
from .weight.weight import Weight
from .weights.given import host_or_jax


class Binding:
    """The values of the weights of a compiled Graph, collected again when one has changed.

    Attributes:
        types: type of each value at compile time, a ``jax.ShapeDtypeStruct``.
        entries: the weights of the Graph.
        sizes: sizes of the named dimensions of the present values.
    """

    def __init__(self, graph: Graph, registry: Mapping[str, Any] | None):
        self._graph = graph.name
        self.entries = graph.entries
        self._fixed = _from_registry(graph, registry)
        self.types = [
            jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=_placement(entry, fixed))
            for entry, fixed in zip(self.entries, self._fixed, strict=True)
        ]
        self._epoch = -1
        self.leaves: Any = None
        self.sizes: dict[str, int] = {}

    def require(self, registry: Mapping[str, Any] | None, only: Sequence[Weight] | None) -> None:
        """Checks that all weights, or those in ``only``, have values.

        Raises:
            ValueError: a weight has no value; the message has its name.
        """
        wanted = None if only is None else set(map(id, only))
        for entry, fixed in zip(self.entries, self._fixed, strict=True):
            if fixed is not None or (wanted is not None and id(entry.weight) not in wanted):
                continue
            if (name := _lazy_name(entry)) is not None:
                raise ValueError(_missing(name, registry))

    def values(self) -> Any:
        """One array for each weight.

        Raises:
            ValueError: a weight has no value, or one of another type or placement than when the
                program was compiled; or sizes of one name differ.
        """
        values = self.leaves
        if self._epoch != EPOCH.values:
            epoch = EPOCH.values
            values = [
                self._value(*of) for of in zip(self.entries, self._fixed, self.types, strict=True)
            ]
            self.sizes = self._named_sizes(values)
            self.leaves, self._epoch = values, epoch
            note_leaf_cache(self)  # values that have changed are not kept until the next call
        return values

    def _value(self, entry: GraphWeight, fixed: Any, kind: jax.ShapeDtypeStruct) -> Any:
        if fixed is not None:
            return fixed
        if (lazy := _lazy_name(entry)) is not None:
            raise ValueError(f"weight '{lazy}' has no value: '{self._graph}' is compiled, but its weights are not "
                             "loaded (call load_state_dict() or maxjax.init())")  # fmt: skip
        array, name = entry.weight.array(), entry.names[0]
        if not isinstance(array, jax.Array):
            array = jnp.asarray(array)
        if not _fits(array.shape, kind.shape) or array.dtype != kind.dtype:
            raise ValueError(f"weight '{name}' was {kind.dtype} {list(kind.shape)} when '{self._graph}' was compiled, "
                             f"and is {array.dtype} {list(array.shape)} now: compile it again")  # fmt: skip
        sharding = kind.sharding
        if sharding is not None and not getattr(array, "committed", True):
            return jax.device_put(array, sharding)
        if not getattr(array, "committed", False):
            return array
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(default_device())
        if not array.sharding.is_equivalent_to(sharding, array.ndim):
            raise ValueError(f"weight '{name}' was on {spec_text(sharding)} when '{self._graph}' was compiled, and is "
                             f"on {spec_text(array.sharding)} now: compile it again, or move the weight")  # fmt: skip
        return array

    def _named_sizes(self, values: Sequence[Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for entry, value in zip(self.entries, values, strict=True):
            if entry.is_static:
                continue
            for dim, size in zip(map(to_dim, entry.shape), value.shape, strict=True):
                if not isinstance(dim, StaticDim) and sizes.setdefault(str(dim), size) != size:
                    raise ValueError(
                        f"weight '{entry.names[0]}' is {list(value.shape)}, but '{self._graph}' was compiled for "
                        f"{Shape(map(to_dim, entry.shape))!r}, and {dim} is {sizes[str(dim)]} in another weight"
                    )
        return sizes


def _fits(shape: Sequence[int], wanted: Sequence[Any]) -> bool:
    """Whether a shape is the wanted one, in which symbolic sizes match any."""
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(
        size == want for size, want in pairs if isinstance(want, int)
    )


def _missing(name: str, registry: Mapping[str, Any] | None) -> str:
    known = "" if registry is None else f"; it has {some(sorted(registry)) or 'nothing'}"
    return f"Weight '{name}' is not in the weights registry{known}"


def _replicated(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """On the devices of a weight, for inputs of any rank and size."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding


def _placement(entry: GraphWeight, fixed: Any) -> Any:
    """The sharding that a weight has or will have; None lets JAX choose."""
    weight = entry.weight
    value = stack_of(weight.leaf) if fixed is None else fixed
    return value.sharding if getattr(value, "committed", False) else weight.spec.leaf_sharding


def _lazy_name(entry: GraphWeight) -> str | None:
    """The name of the first weight without a value; None if all have one."""
    weights = zip(entry.names, entry.weight.weights, strict=True)
    return next((name for name, weight in weights if weight.is_missing), None)


def _from_registry(graph: Graph, registry: Mapping[str, Any] | None) -> list[Any]:
    """For each entry its value in the registry, stacked for a stack of layers; None if it is absent."""
    if registry is None:
        return [None] * len(graph.entries)
    counts = Counter(name for entry in graph.entries for name in entry.names)
    uses = Counter(key for entry in graph.entries for keys in entry.keys for key in set(keys))

    def key_of(name: str, *others: str) -> str:
        alone = (key for key in others if uses[key] == 1)
        return next((key for key in (name, *alone) if registry.get(key) is not None), name)

    def value_of(entry: GraphWeight) -> Any:
        keys, holder = [key_of(*known) for known in entry.keys], entry.weight
        if all(registry.get(key) is None for key in keys):
            return None
        kept = []
        for name, key, weight in zip(entry.names, keys, holder.weights, strict=True):
            if counts[key] > 1:
                raise ValueError(
                    f"Graph '{graph.name}' has several weights named '{key}', so the weights registry "
                    "is ambiguous: call state_dict() on the model first, which gives them full names"
                )
            value = registry.get(key)
            if value is None:
                value = weight
                if weight.is_missing:
                    raise ValueError(_missing(name, registry))
            kept.append(weight.spec.arranged(_checked(name, entry, weight, value)))
        array = kept[0]
        if holder.spec.lead:
            array = jnp.stack(kept).reshape(*holder.spec.lead, *array.shape)
        return jax.device_put(array, holder.spec.leaf_sharding)

    return [value_of(entry) for entry in graph.entries]


def _checked(name: str, entry: GraphWeight, weight: Weight, value: Any) -> Any:
    array = unwrap(value) if isinstance(value, Weight) else _from_any(value)
    array = array if isinstance(array, jax.Array) else fitting(np.array(array))
    wanted, holder = entry.dtype, entry.weight
    shape = entry.shape[len(holder.spec.spans) :]
    if holder.spec.layout is not None:
        shape = tuple(int(d) for d in holder.spec.dims)
    form = weight.spec.form
    if form is not None and form.fits(DType.of(array.dtype), array.shape):
        array = jnp.asarray(form.to_stored(name, np.asarray(array)))  # as a file has it
        array = array if form.shape is None else array.reshape(shape)
    elif form is None and array.shape == weight.loaded_shape:
        array = array.reshape(shape)  # as the state dict has it: (1,) for ()
    if not _fits(array.shape, shape) or jax.dtypes.canonicalize_dtype(array.dtype) != wanted:
        raise ValueError(f"Weight '{name}' in the weights registry is {array.dtype} {tuple(array.shape)}, "
                         f"but the graph expects {wanted} {shape}")  # fmt: skip
    return array


def _donated(name: str, donate: Sequence[int], count: int) -> list[int]:
    """The inputs that are donated; negative indices count from the last input."""
    if wrong := [i for i in donate if not -count <= i < count]:
        raise ValueError(f"'{name}' has {count} inputs, and donate names input {wrong[0]}")
    return [range(count)[i] for i in donate]


class Model(Rendered):
    """A compiled Graph, which runs with the values that its weights have at each call.

    Made by ``InferenceSession.load`` or ``Module.compile``. A Graph of static shapes is
    compiled immediately; one with symbolic dimensions is lowered once, and compiled by XLA for each new
    set of sizes. Compiling needs no values: a program that was compiled from placeholders uses the
    values that are loaded later, with the placement that the weights had when it was compiled.

    Args:
        graph: finished Graph.
        registry: values by name, which stay fixed; other weights must have their own values. Without
            it, the program uses the values at the time of each call.
        donate: positions of inputs whose memory the outputs may reuse. These inputs cannot be
            used after the call.
        source: what the Graph was traced from, whose ``check()`` each call makes; None checks nothing.

    Attributes:
        name: name of the Graph.
        input_types, output_types: types of the Graph.

    Raises:
        ValueError: the Graph is not finished; ``donate`` names an input that it does not have; the registry
            has a value of the wrong type, or lacks a weight that has no value.
        NotImplementedError: the Graph has named sizes and prints values.
    """

    def __init__(
        self,
        graph: Graph,
        registry: Mapping[str, Any] | None = None,
        donate: Sequence[int] = (),
        source: Any = None,
    ):
        if graph.jaxpr is None:
            raise ValueError(
                f"Graph '{graph.name}' has no output: call g.output(…) at the end of its with block"
            )
        self.name, self._source = graph.name, source
        self._checked: dict[str, int] = {}  # the sizes of the last call
        self.input_types, self.output_types = graph.input_types, graph.output_types
        self._weights = Binding(graph, registry)
        self._weights.require(registry, graph.orphans if registry is None else None)
        self._sizes = graph._scope
        run = graph.function()
        with naming(graph._sizes):
            inputs = [kind.to_jax() for kind in graph.input_types]
        donated = _donated(self.name, donate, len(graph.input_types))
        positions = tuple(i + 1 for i in donated)  # after the weights
        if all(one.is_static for one in (*graph.input_types, *graph.entries)):
            jitted = jax.jit(run, donate_argnums=positions)
            with compiling(self.name):
                lowered = jitted.lower(self._weights.types, *inputs)
                self._run: Any = lowered.compile()
            wanted = self._run.input_shardings
            shardings, used = wanted[0][1:], jax.tree.leaves(wanted)
            shapes: Any = [kind.shape for kind in inputs]
            text = lowered.as_text
        else:
            if graph.jaxpr.effects:
                raise NotImplementedError(
                    f"'{self.name}': a program with named sizes cannot print or call Python while it runs: declare "
                    "its inputs and weights with numbers, or leave that out"
                )
            try:
                exported = jax.export.export(jax.jit(run))(self._weights.types, *inputs)
            except ValueError as error:
                shapes = [kind.shape for kind in graph.input_types]
                shapes += [map(to_dim, entry.shape) for entry in graph.entries]
                check_determined(self.name, shapes, error)
                raise
            self._run = jax.jit(exported.call, donate_argnums=positions)
            used = [kind.sharding for kind in self._weights.types if kind.sharding is not None]
            shardings = [_replicated(used[0]) if used else None] * len(inputs)
            shapes = [None] * len(inputs)  # sizes are compared at each call
            text = exported.mlir_module
        self._run = agreed(self._run, self.name, text, used)
        # For each input its shape, its dtype, and the sharding of a committed array.
        self._wanted = list(zip(shapes, [kind.dtype for kind in inputs], shardings, strict=True))

    def execute(self, *args: Any) -> list[TensorValue]:
        """Runs the program.

        Args:
            args: array for each input: JAX, NumPy, a Buffer, a TensorValue, or any DLPack array, of
                exactly its dtype and shape.

        Returns:
            A TensorValue for each output (with ``.to_numpy()``, as MAX's Buffer).

        Raises:
            ValueError: the number or the type of inputs is wrong; or a weight has no value, or another
                sharding than at compile time; or the Module that it was compiled from has changed.
            TypeError: it is called inside ``jax.jit`` or another transformation, and has no named sizes.
        """
        return [TensorValue(y) for y in self._execute(args)]

    def _execute(self, args: Sequence[Any]) -> list[jax.Array]:
        if self._source is not None:
            self._source.check()
        if len(args) != len(self.input_types):
            raise ValueError(f"Number of inputs ({len(args)}) does not match expected number "
                             f"({len(self.input_types)}) for model '{self.name}'")  # fmt: skip
        weights = self._weights.values()
        sizes, arrays = dict(self._weights.sizes), []
        for i, (value, (shape, dtype, to)) in enumerate(zip(args, self._wanted, strict=True)):
            fits = isinstance(value, jax.Array) and value.shape == shape and value.dtype == dtype
            if not fits:
                value = _input(i, value, self.input_types[i], sizes)
            if isinstance(value, Tracer):
                if shape is not None:
                    raise TypeError(
                        f"'{self.name}' is a compiled program, which cannot run inside jax.jit, jax.grad or another "
                        "transformation: call its Module there"
                    )
            elif to is not None and getattr(value, "committed", False) and value.sharding != to:
                value = jax.device_put(value, to)
            arrays.append(value)
        if sizes != self._checked:
            check(self._sizes.checks, self._sizes.names, sizes_of_names(self.name, sizes))
            # Inside jax.export the sizes are expressions of its trace.
            self._checked = sizes if all(type(size) is int for size in sizes.values()) else {}
        return self._run(weights, *arrays)

    def __call__(self, *args: Any) -> Any:
        """The same as :meth:`execute`."""
        return self.execute(*args)

    def _mx_row(self) -> Row:
        return program_row(self.name, self.input_types, self.output_types, self._weights.entries)

    def _mx_title(self, row: Row) -> str:
        return f"{type(self).__name__} {row.name}, {row.notes[0]}"

    def __repr__(self) -> str:
        return summary(self)


class Trees:
    """A Module's call as a function of flat inputs and outputs, for a Graph.

    Attributes:
        types: TensorTypes of the leaves of the arguments.
        inputs, outputs: treedefs; that of the outputs is known after tracing.
        counts: number of leaves of each argument.
    """

    def __init__(self, name: str, module: Callable[..., Any], specs: Sequence[Any]):
        kinds, self.inputs = jax.tree.flatten(tuple(specs), is_leaf=is_input)
        self.types = [type_of_input(f"compile of '{name}'", kind) for kind in kinds]
        self.counts = [len(jax.tree.leaves(spec, is_leaf=is_input)) for spec in specs]
        self.outputs: Any = None
        self._module = module

    @property
    def classes(self) -> set[type]:
        """The classes of its Modules."""
        named = getattr(self._module, "named_modules", None)
        parts = [self._module] if named is None else [part for _, part in named()]
        return {type(part) for part in parts}

    def __call__(self, *values: TensorValue) -> tuple[Any, ...]:
        args = jax.tree.unflatten(self.inputs, [unwrap(value) for value in values])
        with computing_with(ARRAYS):  # as in a call of the Module itself
            leaves, self.outputs = jax.tree.flatten(self._module(*args))
        return tuple(map(jnp.asarray, leaves))


class Program(Model):
    """A Model for pytrees of arrays, which has the signature of its Module.

    Attributes:
        in_tree, out_tree: treedefs of the arguments and of the result.
    """

    def __init__(
        self,
        graph: Graph,
        trees: Trees,
        registry: Any = None,
        donate: Sequence[int] = (),
        source: Any = None,
    ):
        self.in_tree, self.out_tree = trees.inputs, trees.outputs
        self._code = Compiled(graph.name, trees.classes)
        leaves = iter(range(trees.inputs.num_leaves))
        by_argument = [[next(leaves) for _ in range(n)] for n in trees.counts]
        donated = _donated(graph.name, donate, len(by_argument))
        positions = [leaf for i in donated for leaf in by_argument[i]]
        super().__init__(graph, registry, positions, source)

    def __call__(self, *args: Any) -> Any:
        """Runs the program.

        Raises:
            ValueError: the structure or a type of the arguments is wrong, or as for ``execute``.
        """
        self._code.check()
        leaves, tree = jax.tree.flatten(args)
        if tree != self.in_tree:
            leaves, tree = jax.tree.flatten(args, is_leaf=is_input)  # TensorValues as inputs
        if tree != self.in_tree:
            raise ValueError(
                f"'{self.name}' was compiled for arguments with the structure {self.in_tree}, not {tree}"
            )
        return jax.tree.unflatten(self.out_tree, self._execute(leaves))


def _from_any(value: Any) -> Any:
    """A NumPy array or jax.Array of a list of numbers, or of an array of any library."""
    return host_or_jax(value) if hasattr(value, "__dlpack__") else np.asarray(value)


def _input(i: int, value: Any, kind: Type, sizes: dict[str, int]) -> Any:
    """An input as an array, after checks; ``sizes`` collects the sizes of named dimensions."""
    of_graph = isinstance(value, (TensorValue, BufferValue))
    value = value.value if of_graph else _from_any(value)
    dtype = DType.of(jax.dtypes.canonicalize_dtype(kind.dtype.np))
    fits = DType.of(value.dtype) in (kind.dtype, dtype) and value.ndim == kind.rank
    for size, dim in zip(value.shape, kind.shape, strict=False):
        want = int(dim) if isinstance(dim, StaticDim) else sizes.setdefault(str(dim), size)
        fits = fits and size == want
    if not fits:
        known = f" with {sizes}" if sizes else ""
        raise ValueError(f"Input at position {i}: {DType.of(value.dtype)} {tuple(value.shape)} does not match expected "
                         f"type {kind.dtype} {kind.shape!r}{known}")  # fmt: skip
    if isinstance(value, np.ndarray):
        value = fitting(value)
    return value if value.dtype == dtype.np else value.astype(dtype.np)
