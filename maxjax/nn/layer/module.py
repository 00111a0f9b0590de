"""Module: a torch-like tree of layers and Weights that is a JAX pytree.

``definition.py`` turns the tree into a treedef, ``state.py`` reads and writes its
weights, and ``hooks.py`` runs hooks around calls. A Module holds Weights and plain data, but no state
that changes while it runs: caches and random keys are arguments and results.
"""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import jax

from ...elsewhere import METHODS, check_keywords
from ...errors import UserInputError
from ...graph import compile_cache
from ...graph.kind import is_tensor_value
from ...graph.tensor_type import TensorType
from ...graph.weight.epoch import EPOCH, structure_changed
from ...graph.weight.running import RUNNING
from ...graph.weight.weight import Weight
from ...kernels.stack_slice import StackSlice
from . import call_stack, calls, hooks
from . import place as placing
from .compiled_from import CompiledFrom
from .contents import holds_items
from .definition import Cache, Definition, cache_of, flatten, flatten_with_keys, unflatten
from .hooks import Layer
from .rows import OfModule
from .state import StateDict
from .static import Live, freeze, unread_fields, unshared
from .walk import ModuleNames, Walk
from .watched import AssignedList

# MAX's graph language, which trace, compile and build_subgraph import on first use.
if TYPE_CHECKING:
    from ...graph.graph import Graph
    from ...graph.program import Model
    from ...graph.subgraph import Subgraph


class Module(OfModule, Layer, StateDict, ABC):
    """A part of a model: Weights, other Modules and plain data, with a computation in ``__call__``.

    Assigning a Weight or a Module to an attribute registers it. A list of Modules, or an
    empty list, becomes a LayerList when it is assigned (``xs.0.weight``); add layers with
    ``module.xs.append(layer)``. A tuple of Modules becomes an immutable LayerTuple. Lists of the
    shards that ``shard`` returns are views of the original layer. Any other value becomes a
    static attribute: part of the treedef, compared by content. Lists and dicts are kept as frozen copies, NumPy
    arrays of at most 1 MiB as read-only ones; an instance of a dataclass and a SimpleNamespace themselves: if
    one of their fields changes, functions are compiled again.

    A Module is a pytree whose leaves are its unique weights' values in state-dict order
    (``jax.ShapeDtypeStruct`` for weights without a value), so all of JAX works on it, once its weights
    have values; before, ``jax.eval_shape``, ``lower`` and functions of trees do. Pass it as an argument:
    ``jax.jit(lambda m, x: m(x))(model, x)``. JAX compiles again if something else than a value differs:
    ``definition.py`` says what.

    Raises:
        TypeError: the value that is assigned is a JAX array, a NumPy array above 1 MiB, a dict of Modules, a layer of
            another library, or any other object that contains arrays, which would not be leaves of the Module;
            or an object that can change and compares by identity, of which compiled functions would keep old values.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from maxjax.graph import DeviceRef, Weight
        >>> from maxjax.nn import Module
        >>> class Scale(Module):
        ...     def __init__(self, n):
        ...         super().__init__()
        ...         self.gain = Weight("gain", "float32", (n,), DeviceRef.CPU())
        ...     def __call__(self, x):
        ...         return x * self.gain
        >>> model = Scale(3)
        >>> jax.eval_shape(lambda m, x: m(x), model, jnp.ones(3)).shape
        (3,)
        >>> _ = model.load_state_dict({"gain": jnp.arange(3.0)})
        >>> print(jax.jit(lambda m, x: m(x))(model, jnp.ones(3)))
        [0. 1. 2.]
    """

    # Internal state of a Module, in its __dict__ so that copying needs no special code:
    # local name → Weight, attribute → local name, attribute → child, attributes marked
    # shared, attribute → key of the static value, and the cached definition.
    _mx_weights: dict[str, Weight]
    _mx_locals: dict[str, str]
    _mx_children: dict[str, Module]
    _mx_shared: set[str]
    _mx_statics: dict[str, Any]
    _mx_cache: Cache | None
    # Static attributes that no call reads, by which Modules are not compared.
    _mx_unread: frozenset[str] = frozenset()
    # Static attribute: local names of the weights that are trained besides LoRA weights (nn/low_rank.py).
    _mx_trained: tuple[str, ...] = ()
    # Attribute → shard of a Weight; the Weight itself may be in any Module.
    _mx_shards: Mapping[str, Weight] = MappingProxyType({})
    # The caller's own list, of which this LayerList was made.
    _mx_assigned: AssignedList | None = None
    # The classes of Modules that replace Python lists and tuples.
    _mx_containers: dict[type, type] = {}
    _mx_is_container: bool = False
    # Whether this Module is, or is in, a layer of a LayerStack, which cannot be changed separately.
    _mx_in_stack: bool = False
    # Whether this is a LayerStack, whether layers of another LayerStack may hold it, and its StackedWeights.
    _mx_is_stack: bool = False
    _mx_nests: bool = False
    _mx_stacks: tuple[Any, ...] = ()
    # The plans that observe this Module: pairs (plan, name of the Module), as in ``observe/plans.py``.
    _mx_marks: tuple[Any, ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any):
        if kwargs:
            check_keywords(cls, kwargs)
        self = super().__new__(cls)
        # In __new__, so that a subclass may call super().__init__() late or never.
        vars(self).update(_mx_weights={}, _mx_locals={}, _mx_children={}, _mx_shared=set(),
                             _mx_statics={}, _mx_cache=None)  # fmt: skip
        return self

    def __init__(self) -> None:
        super().__init__()

    def __init_subclass__(cls, stands_for: type | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if isinstance(value, (Module, Weight)):
                raise TypeError(
                    f"{cls.__name__}.{name} is a {type(value).__name__} in the class body, where no instance "
                    f"sees it: assign it in __init__, self.{name} = …"
                )
        if vars(cls).get("__slots__"):
            raise TypeError(
                f"{cls.__name__} has __slots__, whose attributes a Module would not see: remove them"
            )
        cls._mx_is_container = stands_for is not None
        if stands_for is not None:
            Module._mx_containers[stands_for] = cls
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)

    @classmethod
    def _wrap_call(cls, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def wrapped(self: Module, /, *args: Any, **kwargs: Any) -> Any:
            if hooks.is_plain():
                outputs = call_stack.run(self, call, args, kwargs)
                if hooks._HOOKS:  # added during the call
                    return hooks.dispatch(self, call, args, kwargs, outputs)
                return outputs
            return calls.run(self, call, args, kwargs)

        return wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the layer's result; subclasses define it.

        Raises:
            NotImplementedError: the class does not define it.
        """
        name, has_forward = type(self).__name__, callable(getattr(type(self), "forward", None))
        todo = (
            "rename forward to __call__"
            if has_forward
            else "define def __call__(self, x): … in the class"
        )
        raise NotImplementedError(f"{name} cannot be called, as it has no __call__: {todo}")

    # -- attributes

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError: there is no such attribute; for methods of other libraries it says what to write."""
        if name in METHODS and not hasattr(type(self), name):
            what = f"'{type(self).__name__}' object has no attribute '{name}': {METHODS[name]}"
            raise AttributeError(what, name=name, obj=self)
        return object.__getattribute__(self, name)  # the usual error, or that of a property

    def __setattr__(self, name: str, value: Any) -> None:
        if self._mx_in_stack:
            raise TypeError(self._mx_refusal(name))
        where, descriptor = f"{type(self).__name__}.{name}", getattr(type(self), name, None)
        if hasattr(type(descriptor), "__set__") or name == "__class__":
            structure_changed()
            return super().__setattr__(name, value)  # a property: its setter, or AttributeError
        is_other = name not in self._mx_locals and name not in self._mx_children
        if RUNNING.graphs and is_other and is_tensor_value(value):
            return RUNNING.graphs[-1].hold(self, name, value)
        if type(value) in (list, tuple) and holds_items(value) is not False:
            original = value
            try:
                value = self._mx_containers[type(value)](value)
            except TypeError as error:
                raise TypeError(f"{where}: {error}") from None
            AssignedList.watch(where, original, value)
        if isinstance(value, Weight) and value.shard_idx is None:
            local = self._claim(name, value)
            self._forget(name, keep=local)
            self._mx_weights[local], self._mx_locals[name] = value, local
        elif isinstance(value, Module):
            if name not in self._mx_children:  # a replaced child keeps its place in the order
                self._forget(name)
            self._mx_children[name] = value
        elif isinstance(value, Weight):
            # A shard is a view of another Weight, and not a weight of its own.
            self._forget(name)
            vars(self)["_mx_shards"] = {**self._mx_shards, name: value}
        else:
            if name in self._mx_locals and hasattr(value, "shape"):  # it would be a constant
                raise TypeError(
                    f"{where} is a Weight: {where}.value = array gives it a value, load_state_dict() several"
                )
            try:
                value, key = freeze(value, where)
            except RecursionError:
                what = type(value).__name__
                raise TypeError(f"{where} is a {what} that contains itself") from None
            is_same = name in self._mx_statics and self._mx_statics[name] == key
            if is_same and type(key) is not Live and not unread_fields(type(value)):
                return
            self._forget(name)
            self._mx_statics[name] = key
        if any(module is self for module in RUNNING.modules):
            call_stack.warn_once(
                "static",
                self,
                f"{where} is assigned while the module runs: under jax.jit "
                "the assignment is lost after the trace. Return the new value instead (a Module holds weights only)",
            )
        vars(self)[name] = value
        structure_changed()

    def _mx_adopt(self) -> None:
        """Registers attributes that were set without ``__setattr__``, as in a frozen dataclass."""
        known = {*self._mx_locals, *self._mx_children, *self._mx_statics, *self._mx_shards}
        for name in [n for n in vars(self) if n not in known and not n.startswith("_mx_")]:
            if not isinstance(getattr(type(self), name, None), cached_property):
                Module.__setattr__(self, name, vars(self)[name])

    def _claim(self, name: str, weight: Weight) -> str:
        """The local name under which ``weight`` is registered when it is assigned to attribute ``name``."""
        for candidate in (weight.spec.local_name, name):
            holder = self._mx_weights.get(candidate)
            users = [attr for attr, local in self._mx_locals.items() if local == candidate]
            if holder is None or holder is weight or users == [name]:
                return candidate
        names = {weight.spec.local_name: None, name: None}
        raise ValueError(
            f"{type(self).__name__}.{name}: this module already has another weight named "
            f"{' and one named '.join(map(repr, names))}; give the Weight another name"
        )

    def _forget(self, name: str, keep: str | None = None) -> None:
        """Unregisters an attribute; ``keep`` is a local name that keeps its position in the order."""
        local = self._mx_locals.get(name)
        if local is not None and local != keep:
            del self._mx_locals[name]
            if local not in self._mx_locals.values():
                del self._mx_weights[local]
        if name in self._mx_shards:
            vars(self)["_mx_shards"] = {a: w for a, w in self._mx_shards.items() if a != name}
        self._mx_shared.discard(name)
        self._mx_statics.pop(name, None)
        self._mx_children.pop(name, None)

    def _mx_refusal(self, name: str) -> str:
        return (
            f"{type(self).__name__}.{name} cannot be changed: the layer is one of a LayerStack, whose layers "
            "are equal. layers.unstack() returns a LayerList of independent layers"
        )

    def __delattr__(self, name: str) -> None:
        if self._mx_in_stack:
            raise TypeError(self._mx_refusal(name))
        super().__delattr__(name)
        self._forget(name)
        structure_changed()

    def __dir__(self) -> list[str]:
        """The attributes for completion, without the internal ones."""
        names = map(str, super().__dir__())
        return [name for name in names if name.isidentifier() and not name.startswith("_mx_")]

    @property
    def sublayers(self) -> Mapping[str, Module]:
        """The direct child Modules by attribute name; a live, read-only view."""
        return MappingProxyType(self._mx_layers())

    def _mx_layers(self) -> dict[str, Module]:
        """The child Modules by their names in a state dict."""
        return self._mx_children

    @property
    def layer_weights(self) -> Mapping[str, Weight]:
        """This layer's own Weights by local name; a live, read-only view."""
        return MappingProxyType(self._mx_weights)

    @property
    def _omit_module_attr_name(self) -> bool:
        """Whether descendants' names leave out the attribute that holds this Module."""
        return False

    def set_shared_weight(self, name: str, weight: Weight) -> None:
        """Assigns a Weight that belongs to another layer, which is its owner: the weight is then tied.

        The state dict has the weight once, under its owner's name.
        """
        setattr(self, name, weight)
        self._mx_shared.add(name)
        structure_changed()

    def initializer(self, name: str) -> Callable[..., Any] | None:
        """The function with which ``maxjax.init`` fills this layer's weight of that local name: a function
        of (key, shape, dtype) as in ``jax.nn.initializers``, or None for the default."""
        return None

    def sharding_rules(self) -> Mapping[str, Any]:
        """The rules by which :meth:`to` splits the weights in this Module over a mesh.

        Returns:
            A map from attribute paths below this Module, of weights (``"norm.weight"``) or of linear layers
            (``"q_proj"``: the rule of its weight ``[out, in]``, from which that of the bias follows), to a Split
            (``graph/placement/split.py``: ROWS, COLUMNS, REPLICATED, …), a PartitionSpec or a ShardingStrategy, whose
            number of devices is ignored. Rules of outer Modules take precedence.
        """
        return {}

    # -- the tree

    def named_modules(self) -> Iterable[tuple[str, Module]]:
        """Yields (prefix, Module) for this Module and every Module below, once each, breadth first.

        The prefix is that of its weights' full names: "" for this Module, and ending in "." for others.
        """
        walk = Walk(self)
        return zip(walk.prefixes, walk.modules, strict=True)

    def _iter_named_modules(self) -> Iterable[tuple[str, str, Module]]:
        """MAX's walk: triples (path of attributes, prefix of the weights' names, Module), breadth first."""
        walk = Walk(self)
        for path, prefix, module in zip(walk.paths, walk.prefixes, walk.modules, strict=True):
            yield path.rstrip("."), prefix, module

    def _iter_named_weights(self) -> Iterable[tuple[str, Weight, Module]]:
        """MAX's walk: triples (full name, Weight, the Module that has it), without weights that another owns."""
        holders = {
            id(weight): module
            for _, _, module in self._iter_named_modules()
            for attr, local in module._mx_locals.items()
            if attr not in module._mx_shared
            for weight in (module._mx_weights[local],)
        }
        for name, weight in self.raw_state_dict().items():
            yield name, weight, holders.get(id(weight), self)

    def replace_module(self, name: str, module: Module) -> None:
        """Replaces the direct child ``name`` by another Module.

        Raises:
            KeyError: there is no such child.
        """
        if name not in self._mx_children:
            raise KeyError(f"'{type(self).__name__}' has no child module '{name}'")
        setattr(self, name, module)

    def to(
        self,
        *devices: Any,
        sharding_strategy: Any = None,
        rules: Mapping[str, Any] | None = None,
        memory_kind: str | None = None,
    ) -> Self:
        """Sets the sharding of every weight, in place: moves values now, and placeholders when they are loaded.

        Args:
            devices: a mesh; one DeviceRef, jax.Device or jax Sharding; or several devices
                with a ``sharding_strategy``. On a mesh every weight is split by its own
                strategy, or by the rules of the layers above it (:meth:`sharding_rules`).
            sharding_strategy: strategy for all weights. ``ShardingStrategy.tensor_parallel(n)``
                and ``expert_parallel(n)`` follow the layers' rules; others apply to each weight.
            rules: map, for a mesh, from patterns of full names (``*`` matches anything) to a
                PartitionSpec, a ShardingStrategy, or None for replicated; the first pattern that
                matches takes precedence over all other rules.
            memory_kind: kind of device memory, such as ``"pinned_host"``, from which weights
                are copied to the device when they are used.

        Returns:
            This Module.

        Raises:
            UserInputError: no device is given, or several devices without a strategy; the mesh lacks an
                axis that a strategy or rule names; or a strategy or spec does not fit a weight.
            NotImplementedError: a strategy for a mesh is a function whose parts are not equal consecutive blocks of
                one axis.
            OutOfMemoryError: a device cannot hold its shards.

        Warns:
            UserWarning: matrices are replicated although their rules split them, because no size divides; once for
                all of them, with their bytes and what would help.

        Example:
            >>> import maxjax
            >>> from maxjax import nn
            >>> from maxjax.graph import DeviceRef
            >>> mlp = nn.MLP("float32", None, 4, 8, [DeviceRef.CPU()]).to(maxjax.make_mesh(model=1))
            >>> tuple(mlp.gate_proj.weight.sharding.spec)
            (None, None)
        """
        if not devices:
            raise UserInputError(f"{type(self).__name__}.to() needs a device or a mesh")
        placing.place_on(self, devices, sharding_strategy, rules, memory_kind)
        return self

    # -- graphs

    def trace(self, *input_types: TensorType, name: str | None = None, **options: Any) -> Graph:
        """Traces this Module for arguments of these types; the options are those of :class:`Graph`."""
        from ...graph.graph import Graph

        return Graph(name or type(self).__qualname__, self, input_types, **options)

    def compile(
        self,
        *specs: Any,
        session: Any = None,
        weights: Mapping[str, Any] | None = None,
        name: str | None = None,
        donate: Sequence[int] = (),
        **options: Any,
    ) -> Model:
        """Compiles this Module for arguments of given types, before or after its weights are loaded.

        Args:
            specs: for each argument of ``__call__``, a ``jax.ShapeDtypeStruct``, an array, or a pytree of them; the
                program takes and returns such pytrees. If all are TensorTypes, these are flat lists, as in MAX.
            session: MAX's InferenceSession, ignored.
            weights: values by full name, which stay fixed in the program. Other weights must have a value. By
                default it uses those at the time of a call, and refuses to run with other layers or attributes.
            name: name of the program, by default that of the class.
            donate: indices of arguments whose memory the results may reuse, such as a cache.
            options: those of :class:`maxjax.graph.Graph`.

        Raises:
            NotImplementedError: an option of MAX is given that maxjax lacks.
            TypeError: a spec is neither a type nor an array.
            ValueError: ``weights`` has a value of the wrong type, or lacks a weight without a value.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from maxjax import nn
            >>> from maxjax.graph import DeviceRef
            >>> model = nn.Linear(3, 2, "float32", DeviceRef.CPU())
            >>> program = model.compile(jax.ShapeDtypeStruct((4, 3), jnp.float32))
            >>> _ = model.load_state_dict({"weight": jnp.ones((2, 3))})
            >>> print(program(jnp.ones((4, 3)))[0])
            [3. 3.]
        """
        from ...graph.graph import Graph
        from ...graph.program import Model, Program, Trees

        del session
        compile_cache.enable()
        title = name or type(self).__qualname__
        source = CompiledFrom(title, self) if weights is None else None
        if specs and all(isinstance(spec, TensorType) for spec in specs):
            return Model(self.trace(*specs, name=title, **options), weights, donate, source)
        trees = Trees(title, self, specs)
        return Program(Graph(title, trees, trees.types, **options), trees, weights, donate, source)

    def build_subgraph(
        self,
        name: str,
        inputs: Sequence[Any] | None = None,
        weight_prefix: str = "",
        *,
        input_types: Sequence[Any] | None = None,
    ) -> Subgraph:
        """Builds a subgraph of this layer that ``ops.call`` can run with the weights of any equal layer.

        Args:
            name: descriptive name of the subgraph.
            inputs: for each argument of ``__call__``, a tensor, a TensorType, or a tree of
                them. ``input_types`` is the older name of this argument.
            weight_prefix: prefix of the names of those weights that each call looks up under its own prefix;
                all other weights are those of this layer in every call. The names are those below any running
                Module, of which the innermost comes first, or the names of the Weights.

        Raises:
            TypeError: ``inputs`` are missing, one is not a tensor, or the result is not a flat list of tensors.
            NotImplementedError: the Module holds a LayerStack.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from maxjax import init, nn
            >>> from maxjax.graph import DeviceRef, ops
            >>> class Net(nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.layers = nn.LayerList(nn.Linear(3, 3, "float32", DeviceRef.CPU()) for _ in range(4))
            ...     def __call__(self, h):
            ...         block = self.layers[0].build_subgraph("block", [h], weight_prefix="layers.0.")
            ...         for i in range(4):
            ...             h = ops.call(block, h, prefix=f"layers.{i}.")[0]
            ...         return h
            >>> net = init(Net(), jax.random.key(0))
            >>> net(jnp.ones((2, 3))).shape
            (2, 3)
        """
        from ...graph.subgraph import Subgraph

        given = inputs if inputs is not None else input_types
        if given is None:
            raise TypeError("build_subgraph() needs inputs (or input_types)")
        definition, weights = self._mx_definition()
        if definition.stacked:
            raise NotImplementedError(
                "build_subgraph of a Module that holds a LayerStack: unstack it first"
            )
        slots: list[str | Weight] = []
        for weight in weights:
            names = RUNNING.names_of(weight) if weight_prefix else ()
            named = [one for one in names if one.startswith(weight_prefix)]
            slots.append(named[0].removeprefix(weight_prefix) if named else weight)
        # In the loop of a LayerStack, a weight is a slice of a stack: of two arrays, but here one leaf.
        treedef = jax.tree.structure(self, is_leaf=lambda x: isinstance(x, StackSlice))
        return Subgraph(name, treedef, given, slots, definition.weights)

    # -- pytree, copies

    def _mx_definition(self) -> tuple[Definition, tuple[Any, ...]]:
        cache = cache_of(self)
        return cache.definition, cache.weights

    def _mx_names(self) -> tuple[dict[str, Weight], dict[str, str]]:
        cache_of(self)  # raises if a caller's list was changed
        names = self._mx_names_below()
        return names.owned, names.aliases

    def _mx_names_below(self, stacked: bool = False) -> ModuleNames:
        cache = self._mx_cache
        if cache is None or cache.structure != EPOCH.structure:
            cache = cache_of(self)
        if stacked not in cache.names:
            cache.names[stacked] = ModuleNames(Walk(self, stacked=stacked))
        return cache.names[stacked]

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        # Functions are shared, as by jax.tree.map: a copied one would change the treedef.
        for name in self._mx_statics:
            value = vars(self)[name]
            memo[id(value)] = unshared(value, memo)
        new = memo[id(self)] = object.__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        # The keys of static values hold types that cannot be pickled, such as that of functions.
        state = {**vars(self), "_mx_cache": None, "_mx_assigned": None, "_mx_marks": ()}
        return {**state, "_mx_statics": dict.fromkeys(self._mx_statics)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for name in ("_mx_weights", "_mx_locals", "_mx_children", "_mx_shared"):
            vars(self)[name] = type(state[name])(state[name])
        # Keys hold identities of the original objects, so they are computed again.
        vars(self)["_mx_statics"] = statics = {}
        for name in state["_mx_statics"]:
            vars(self)[name], statics[name] = freeze(state[name], f"{type(self).__name__}.{name}")
