"""Graph: a computation traced once to a jaxpr, with named weights.

``Graph(name, forward, input_types)`` and ``with Graph(...) as g:`` both trace plain jnp
code: ``jax.make_jaxpr`` runs in a greenlet that passes its tracers to the block and receives
the outputs at its end. A Weight that is used during the trace becomes an argument of the
program (``arguments.py``), whether it has a value or not; ``program.py`` compiles and runs the result.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from ..errors import first_line
from ..rendering.rendered import Rendered, summary
from ..rendering.row import Row, counted, short
from .arguments import TraceArguments, used_arguments, with_arguments
from .buffer import BufferValue
from .kind import VALUES, computing_with
from .placement.rows import array_row
from .reroll import reroll
from .shape import Shape
from .subgraph import Subgraph, check_arguments, is_input
from .symbolic import Scope, is_known, naming, sizes_of, to_sizes
from .tensor_type import BufferType, TensorType, Type
from .value import TensorValue, unwrap
from .weight.rows import weight_row
from .weight.running import RUNNING
from .weight.weight import Weight
from .weights.cursor import UnreadWeights


class ProfileScopeColor(enum.StrEnum):
    """Colours of MAX's profiler; JAX's scopes have none."""

    MODULAR_PURPLE = "modular_purple"
    BLUE = "blue"
    GREEN = "green"
    ORANGE = "orange"
    PURPLE = "purple"
    RED = "red"
    WHITE = "white"
    YELLOW = "yellow"


class _Meta(type):
    @property
    def current(cls) -> Graph:
        """The innermost Graph being built.

        Raises:
            LookupError: there is none.
        """
        if not RUNNING.graphs:
            raise LookupError("No graph found")
        return RUNNING.graphs[-1]


class GraphWeight:
    """A Weight, or the Weights of a stack, as an argument of a Graph.

    Args:
        arguments: arguments of the Graph, to which it is added.

    Attributes:
        number: number of the argument.
        names: full names of the Weights.
        keys: for each Weight, the names that a registry may have it under.
        shape: shape of the argument, in which names are symbolic sizes.
        dtype: dtype of the argument.
        is_leaf: whether JAX has only taken it as a leaf of a pytree, and may not have used it.
    """

    def __init__(self, weight: Weight, arguments: TraceArguments):
        self.weight = weight
        self.names = [RUNNING.name_of(one) for one in weight.weights]
        # Keys of a registry: the state dict of a child has a shorter name, and a Weight may have a name of its own.
        self.keys = [
            (name, RUNNING.path_of(one) or name, one.name)
            for name, one in zip(self.names, weight.weights, strict=True)
        ]
        # The sizes of a Weight with names are those of its next value, also if it has one now.
        self.shape = (
            tuple(map(int, weight.leaf.shape))
            if weight.spec.is_static
            else (*weight.spec.lead, *to_sizes(weight.spec.dims))
        )
        self.dtype = jax.dtypes.canonicalize_dtype(weight.spec.dtype.np)
        self.number = arguments.add(self.shape, self.dtype)
        self.is_leaf = False

    @property
    def is_static(self) -> bool:
        """Whether every size is known."""
        return all(isinstance(size, int) for size in self.shape)

    def find(self, name: str) -> Weight | None:
        """The Weight of that name."""
        if name not in self.names:
            return None
        return self.weight.weights[self.names.index(name)]

    def placed(self, array: Any) -> Any:
        """The tracer of the argument with the sharding of the weight, which is part of types on an Explicit mesh."""
        sharding = self.weight.spec.leaf_sharding
        if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
            return jax.sharding.reshard(array, sharding.with_memory_kind("device"))
        return array


def program_row(
    name: str, inputs: Sequence[Type], outputs: Sequence[Type] | None, entries: Any
) -> Row:
    """The row of a Graph or of a program: its types, and the weights that it uses.

    Args:
        entries: the GraphWeights.
    """
    typed = lambda name, one: Row(
        name, "", one.dtype.name, tuple(map(str, one.shape)), is_array=True
    )
    given = [typed(f"input {i}", one) for i, one in enumerate(inputs)]
    found = [typed(f"output {i}", one) for i, one in enumerate(outputs or ())]
    weights: list[Row] = []
    for entry in entries:
        title = entry.names[0]
        if len(entry.names) > 1:
            title = f"{title} and {len(entry.names) - 1} more"
        is_one = isinstance(entry.weight, Weight)
        placed = weight_row(entry.weight, title) if is_one else array_row(title, entry.weight.leaf)
        weights.append(placed.row)
    count = counted(sum(len(entry.names) for entry in entries), "weight")
    held = Row("weights", count, children=tuple(weights))
    held.nbytes = sum(row.nbytes for row in weights)
    held.parameters = sum(row.parameters for row in weights)
    of = ", ".join(row.type_text for row in given)
    to = f" -> {', '.join(row.type_text for row in found)}" if outputs is not None else ""
    rows = (*given, *found, *([held] if weights else []))
    return Row(short(f"{name}({of}){to}", 300), notes=(count,), children=rows)


class Graph(Rendered, metaclass=_Meta):
    """A traced computation with typed inputs, outputs and named weights.

    Args:
        name: descriptive name.
        forward: function or Module that is called with one TensorValue per input. Without it
            the computation is written in a ``with`` block, which ends with :meth:`output`.
        input_types: TensorType for each input. A dimension may be a name: equal names stand for
            equal sizes, which are known only at run time. A BufferType declares an input that
            the graph writes to; its last value is an additional output, after the others.
        args, kwargs: further arguments of ``forward``, after the inputs. ``module=`` is a :class:`Module` that the
            graph is added to, and is not passed on.

    Attributes:
        jaxpr: traced program, a ``jax.extend.core.ClosedJaxpr``; None until the trace is finished. Its inputs are
            the weights that it uses, then the inputs of the graph.

    Raises:
        TypeError: an input type is neither a TensorType nor a BufferType.
        NotImplementedError: ``path`` or another option of MAX that maxjax lacks is given.

    A Weight or Module may be used in any number of Graphs.

    Example:
        >>> from maxjax.graph import DeviceRef, Graph, TensorType
        >>> with Graph("double", input_types=[TensorType("float32", (2,), DeviceRef.CPU())]) as g:
        ...     g.output(g.inputs[0].tensor * 2)
        >>> print(g)
        Graph double
        { lambda ; a:f32[2]. let b:f32[2] = mul a 2.0:f32[] in (b,) }
    """

    current: Graph  # the metaclass's property, for type checkers

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any] | None = None,
        input_types: Iterable[Type] = (),
        path: Any = None,
        *args: Any,
        **kwargs: Any,
    ):
        if path is not None:
            raise NotImplementedError(
                "Graph(path=...): reading a graph from a file is not supported"
            )
        for option in ("custom_extensions", "kernel_library"):
            if kwargs.pop(option, None):
                raise NotImplementedError(f"Graph({option}=...) is MAX's own and is not supported")
        module = kwargs.pop("module", None)
        for option in ("strict_device_placement", "is_device_graph"):
            kwargs.pop(option, None)
        self.name = name
        self.input_types = tuple(input_types)
        for kind in self.input_types:
            if not isinstance(kind, Type):
                raise TypeError(f"Graph '{name}': an input type must be a TensorType or BufferType, "
                                f"not {type(kind).__name__}")  # fmt: skip
        self.jaxpr: Any = None
        self.entries: list[GraphWeight] = []
        self._takes_leaves = False
        self._by_weight: dict[int, GraphWeight] = {}
        # Weights that were requested by name only: they get values from a registry alone.
        self.orphans: list[Weight] = []
        self._inputs: tuple[Any, ...] | None = None
        self._outputs: tuple[Any, ...] | None = None
        self._output_types: list[TensorType] | None = None
        self._greenlet: Any = None
        self._arguments: Any = None  # while it is being traced
        names = {str(p) for kind in self.input_types for p in kind.parameters}
        # Within another Graph, names of both are one size.
        self._sizes = sizes_of(name for name in names if not is_known(name))
        # Facts about sizes that the trace assumed, for the Model to check.
        self._scope = Scope()
        self._entered = contextlib.ExitStack()
        if forward is not None:
            self._trace(forward, args, kwargs)
        if module is not None:
            module._add(self)

    def _trace(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        with self:
            result = forward(*self.inputs, *args, **kwargs)
            if isinstance(result, (TensorValue, jax.Array, np.ndarray)):
                self.output(result)
            elif result is not None:
                self.output(*result)
            elif self._outputs is None:
                self.output()

    # -- writing it

    def __enter__(self) -> Graph:
        if self.jaxpr is not None or self._greenlet is not None:
            raise ValueError(f"Graph '{self.name}' is already built; create another one")
        import greenlet  # only Graphs that are written as a block need it

        block = greenlet.getcurrent()
        # Entered by hand: the block is the caller's.
        self._entered.enter_context(naming(self._sizes, self._scope))
        self._entered.enter_context(computing_with(VALUES))

        def body(*tracers: Any) -> Any:
            self._arguments = TraceArguments()
            return block.switch(tracers)

        def run() -> Any:
            kinds = [kind.to_jax() for kind in self.input_types]
            return jax.make_jaxpr(body)(*kinds)

        self._greenlet = greenlet.greenlet(run)
        tracers = self._greenlet.switch()
        self._inputs = tuple(
            (BufferValue if isinstance(kind, BufferType) else TensorValue)(x)
            for kind, x in zip(self.input_types, tracers, strict=True)
        )
        RUNNING.graphs.append(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        writer, self._greenlet = self._greenlet, None
        finished = error is None and self._outputs is not None
        try:
            if finished:
                buffers = [x for x in self.inputs if isinstance(x, BufferValue)]
                self._output_types = self.output_types + [x.type.as_tensor() for x in buffers]
                traced = writer.switch((*(self._outputs or ()), *(x.value for x in buffers)))
                used = used_arguments(traced)
                self.entries = [e for e in self.entries if not e.is_leaf or e.number in used]
                self.jaxpr = reroll(with_arguments(traced, [e.number for e in self.entries]))
        finally:
            if not writer.dead:
                # However the block was left, the trace must not stay active in this thread.
                writer.throw()  # a GreenletExit
            self._arguments.close()
            RUNNING.graphs.remove(self)
            self._entered.close()
        if isinstance(error, jax.errors.InconclusiveDimensionOperation):
            raise ValueError(
                f"Graph '{self.name}': {first_line(error)} It depends on sizes that are known only when the "
                "program runs: rebind the tensor to the size that it has, or declare the input with numbers"
            ) from error

    def hold(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute until the Graph is built, for code that keeps tensors it computed in attributes."""
        held = vars(owner)
        before = {name: held[name]} if name in held else {}

        def restore() -> None:
            held.pop(name, None)
            held.update(before)

        self._entered.callback(restore)
        held[name] = value

    def output(self, *values: Any) -> None:
        """Sets the outputs of the graph. Call it once, at the end of the block.

        Raises:
            ValueError: the call is outside the ``with`` block, or a second one.
            TypeError: an output is not a tensor.
        """
        if self._greenlet is None or self._outputs is not None:
            when = (
                "was already set"
                if self._outputs is not None
                else "must be set inside the with block"
            )
            raise ValueError(f"Graph '{self.name}': the output {when}")
        arrays = []
        for value in values:
            array = unwrap(value)
            if not isinstance(array, jax.Array):
                raise TypeError(
                    f"Graph '{self.name}': an output must be a tensor, not {type(value).__name__}"
                )
            arrays.append(array)
        self._output_types = [TensorValue(a).type for a in arrays]
        self._outputs = tuple(arrays)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """A TensorValue, or a BufferValue, for each input.

        Raises:
            ValueError: the ``with`` block has not begun; the inputs exist only from then on.
        """
        if self._inputs is None:
            raise ValueError(f"Graph '{self.name}': the inputs exist inside the with block")
        return self._inputs

    @property
    def output_types(self) -> list[TensorType]:
        """A TensorType for each output.

        Raises:
            TypeError: the output is not set yet.
        """
        if self._output_types is None:
            raise TypeError(f"Graph '{self.name}' is not yet terminated by a call to output")
        return self._output_types

    # -- weights

    def add_weight(self, weight: Weight, force_initial_weight_on_host: bool = True) -> TensorValue:
        """The Weight as a value of this graph, under its present name.

        A dimension of the Weight may be a name. Where it is the name of a dimension of an input, both have the same
        size in each call; another name has the size of the value that the Weight gets.

        Raises:
            ValueError: another Weight of that name is in the graph.

        Example:
            >>> import numpy as np
            >>> from maxjax.graph import DeviceRef, Graph, Model, TensorType, Weight
            >>> table = Weight("table", "float32", ("rows", 2), DeviceRef.CPU())
            >>> with Graph("look_up", input_types=[TensorType("int32", ("n",), DeviceRef.CPU())]) as g:
            ...     g.output(g.add_weight(table)[g.inputs[0].tensor])
            >>> g.output_types[0].shape
            [Dim('n'), Dim(2)]
            >>> model = Model(g, {"table": np.arange(6, dtype=np.float32).reshape(3, 2)})
            >>> print(model(np.int32([2]))[0].to_numpy())
            [[4. 5.]]
        """
        name = RUNNING.name_of(weight)
        known = [entry.find(name) for entry in self.entries]
        if any(one is not None and one is not weight for one in known):
            raise ValueError(
                f"Weight '{name}' already exists in Graph '{self.name}', and is another Weight: rename one, or "
                "first call state_dict() on the Module that contains both, which gives them full names"
            )
        return TensorValue(weight)

    def argument(self, weight: Weight) -> Any:
        """A Weight, or the Weights of a stack, as an argument of this graph: its tracer."""
        entry = self._by_weight.get(id(weight))
        if entry is None:
            names = map(str, Shape(weight.spec.dims).parameters)
            self._sizes.update(sizes_of(name for name in names if not is_known(name)))
            entry = GraphWeight(weight, self._arguments)
            entry.is_leaf = self._takes_leaves
            self._by_weight[id(weight)] = entry
            self.entries.append(entry)
        entry.is_leaf = entry.is_leaf and self._takes_leaves
        return entry.placed(self._arguments.tracers[entry.number])

    @contextlib.contextmanager
    def taking_leaves(self) -> Iterator[None]:
        """A context in which JAX takes the weights of pytrees, of which it may not use all."""
        before, self._takes_leaves = self._takes_leaves, True
        try:
            yield
        finally:
            self._takes_leaves = before

    def placeholder(self, name: str, template: Weight) -> Weight:
        """The Weight of that name, created if the graph has none; subgraphs use it.

        Raises:
            ValueError: the graph has several Weights of that name.
        """
        known = [one for entry in self.entries if (one := entry.find(name)) is not None]
        if len(known) > 1:
            raise ValueError(
                f"Graph '{self.name}' has several weights named '{name}': first call state_dict() on the Module "
                "that contains them, which gives them full names"
            )
        if known:
            return known[0]
        self.orphans.append(Weight(name, template.dtype, template.shape, template.device))
        return self.orphans[-1]

    def weights(self) -> UnreadWeights:
        """An empty cursor of names to allocate weights from: ``weights.layers[0].w.allocate(…)``."""
        return UnreadWeights()

    def add_subgraph(
        self,
        name: str,
        forward: Callable[..., Any] | None = None,
        input_types: Iterable[TensorType] = (),
        path: Any = None,
        custom_extensions: Sequence[Any] = (),
        devices: Iterable[Any] = (),
    ) -> Any:
        """A function for ``ops.call``, traced once.

        Args:
            name: the subgraph's name.
            forward: function of TensorValues. Without it the result is a Graph to write in a ``with`` block.
            input_types: a type for each argument of ``forward``.
            path, custom_extensions: options of MAX that maxjax lacks.
            devices: ignored, since the arrays say where they are.

        Raises:
            NotImplementedError: an option that maxjax lacks is given.

        Example:
            >>> from maxjax.graph import DeviceRef, Graph, TensorType, ops
            >>> kind = TensorType("float32", (2,), DeviceRef.CPU())
            >>> with Graph("main", input_types=[kind]) as g:
            ...     with g.add_subgraph("double", input_types=[kind]) as double:
            ...         double.output(double.inputs[0].tensor * 2)
            ...     g.output(*ops.call(double, g.inputs[0]))
            >>> g.output_types[0].shape
            [Dim(2)]
        """
        if path is not None or custom_extensions:
            option = "path" if path is not None else "custom_extensions"
            raise NotImplementedError(f"add_subgraph({option}=...) is not supported")
        if forward is None:
            return Graph(name, input_types=input_types)
        return Subgraph.of_function(name, forward, list(input_types))

    def profile_scope(self, name: str, color: ProfileScopeColor | None = None) -> Any:
        """``jax.named_scope``: a context whose operations have the prefix ``name`` in profiles.

        Args:
            name: prefix of the names.
            color: ignored.
        """
        return jax.named_scope(name)

    def call(self, args: Sequence[Any], prefix: str = "") -> list[Any]:
        """Runs the graph's program within another computation, with its own weights; see ``ops.call``.

        Raises:
            ValueError: the graph is not finished, or the number or the type of an argument is wrong.
        """
        if self.jaxpr is None:
            raise ValueError(
                f"Graph '{self.name}' is not finished: leave its with block before it is called"
            )
        flat = [unwrap(leaf) for leaf in jax.tree.leaves(list(args), is_leaf=is_input)]
        check_arguments(self.name, flat, self.input_types)
        return self.function()([entry.weight.array() for entry in self.entries], *flat)

    def function(self) -> Callable[..., list[Any]]:
        """The program as a function of the values of its ``entries``, and of the inputs."""
        from jax.extend.core import jaxpr_as_fun  # slow to import, and only Graphs need it

        evaluate = jaxpr_as_fun(self.jaxpr)

        def run(weights: Sequence[Any], *inputs: Any) -> list[Any]:
            return evaluate(*weights, *inputs)

        return run

    # -- looking at it

    def __str__(self) -> str:
        return f"Graph {self.name}\n{self.jaxpr if self.jaxpr is not None else '(not finished)'}"

    def _mx_row(self) -> Row:
        return program_row(self.name, self.input_types, self._output_types, self.entries)

    def _mx_title(self, row: Row) -> str:
        if self.jaxpr is None:
            return f"Graph {row.name} (not finished)"
        count = len(self.jaxpr.jaxpr.eqns)
        return f"Graph {row.name}, {counted(count, 'equation')}, {row.notes[0]}"

    def __repr__(self) -> str:
        return summary(self)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Graph cannot be pickled or copied; use maxjax.export for its program")


class Module:
    """MAX's container of several Graphs, for ``InferenceSession.load_all``; each is compiled by itself.

    Not to be confused with ``maxjax.nn.Module``, a layer of a model.

    Example:
        >>> from maxjax.graph import DeviceRef, Graph, Module, TensorType
        >>> module, kind = Module(), TensorType("float32", (2,), DeviceRef.CPU())
        >>> with Graph("double", input_types=[kind], module=module) as g:
        ...     g.output(g.inputs[0].tensor * 2)
        >>> module.top_level_graph_names()
        ['double']
    """

    def __init__(self) -> None:
        self.graphs: dict[str, Graph] = {}

    def top_level_graph_names(self) -> list[str]:
        """The names of the Graphs, in the order in which they were added."""
        return list(self.graphs)

    def _add(self, graph: Graph) -> None:
        if graph.name in self.graphs:
            raise ValueError(
                f"the module already has a Graph '{graph.name}': give each its own name"
            )
        self.graphs[graph.name] = graph
