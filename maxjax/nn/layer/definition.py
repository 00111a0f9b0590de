"""Definition: the treedef of a Module, created by one walk and interned.

A Module flattens to its unique weights' values in state-dict order, one level deep. The
rest (classes, attributes, static values, ties, names) is a Definition: equal
definitions are one object, so JAX compares treedefs by identity at every dispatch.

Four values that are no part of the Module change what a call of it computes. So they are in the treedef as
well, and each combination has its own compiled program:

The installed hooks and prehooks (``hooks.token``)
    tests/nn/layer/test_hooks.py: test_jit_retraces_under_hooks_and_uses_the_old_program_again and
    test_prehooks_retrace_and_reach_layers_without_weights
Whether operators of Weights return TensorValues (``KIND``, in a :class:`Variant`)
    tests/graph/test_kind.py: test_a_jitted_function_of_a_weight_or_a_module_is_traced_for_each_kind
The captures and patches that observe a Module (:func:`marked`)
    tests/nn/test_capture.py: test_a_copy_made_in_the_function_is_observed_and_others_are_not
In IPython, the code of the classes, which ``%autoreload`` changes (``reloads.code``)
    tests/test_reloads.py: test_a_model_built_before_runs_the_new_code
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from ...graph.kind import ARRAYS, KIND
from ...graph.weight.epoch import EPOCH, note_leaf_cache, structure_changed
from ...graph.weight.running import RUNNING
from ...graph.weight.weight import leaf_for_jax, leaf_of
from ...kernels.stack_slice import StackSlice, stack_of
from ...reloads import code, watch
from .hooks import token, wrap_edited
from .observe.places import of_first_layer
from .static import unread_fields, unshared
from .walk import ModuleNames, Walk, host_of, source_of
from .watched import AssignedList, Changeable


class Definition:
    """Everything in a tree of Modules except the values of its weights. It is immutable and interned.

    Attributes:
        names: full name of each leaf, in state-dict order.
        owned: for each leaf, whether it is in the state dict (False if every reference below
            this root is marked as shared with an owner elsewhere).
        nodes: one :class:`Node` for each Module, in walk order.
        weights: for each leaf, a Weight or StackedWeight without a value, as a template.
        statics: static values of each node.
        stacked: whether there is a StackedWeight among ``weights``.
        marks: for each node, the plans that observe the Module, each with the Module's name for it
            (``observe/plans.py``); () if no Module is observed.
        shards: for each node, a map from attributes to templates of their shards.
        changeable: whether a static value can change in place, so that each Module gets a copy.
    """

    __slots__ = (
        "key", "names", "owned", "nodes", "weights", "statics", "stacked", "shards",
        "marks", "changeable", "__weakref__",
    )  # fmt: skip

    def __repr__(self) -> str:
        what = f"{self.nodes[0].cls.__name__}({len(self.names)} weights)"
        return f"{what} (maxjax.tree.map says in what two differ)"

    def __reduce__(self) -> Any:
        raise TypeError("a Module's treedef cannot be pickled; pickle the Module")

    def __copy__(self) -> Definition:
        return self

    def __deepcopy__(self, memo: Any) -> Definition:
        return self


class Variant:
    """The treedef data of a Module: its Definition, the kind of values, and values that no call reads.

    Values that no call reads are not compared. So ``jax.tree.map`` takes models from two checkpoints, and a
    compiled function takes either. The result of ``tree.map`` has those of its first tree; that of a
    compiled function, those that its argument had when the function was traced.

    Attributes:
        unread: for each node, the values and keys of static attributes that no call reads, or that have
            fields that no call reads; () if there are none.
        kind: kind of values (``graph/kind.py``). It is compared, so that JAX never uses one trace for two kinds.
    """

    __slots__ = ("definition", "unread", "kind")

    def __init__(self, definition: Definition, unread: Unread = (), kind: int = ARRAYS):
        self.definition, self.unread, self.kind = definition, unread, kind

    def __repr__(self) -> str:
        return repr(self.definition)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return False
        return other.definition is self.definition and other.kind == self.kind

    def __hash__(self) -> int:
        return hash(self.definition)


Unread = tuple[dict[str, tuple[Any, Hashable]], ...]
watch(wrap_edited)
watch(structure_changed)
_INTERNED: weakref.WeakValueDictionary[Hashable, Definition] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def _interned(key: Hashable, make: Callable[[], Mapping[str, Any]]) -> Definition:
    """Return the Definition of this key, for whose other attributes ``make`` is called if there is none."""
    found = _INTERNED.get(key)
    if found is None:
        found = Definition()
        found.key = key
        for name, value in make().items():
            setattr(found, name, value)
        with _LOCK:  # a WeakValueDictionary does not do it in one step
            found = _INTERNED.setdefault(key, found)  # another thread may have been faster
    return found


class Node(NamedTuple):
    """One Module in a Definition.

    Attributes:
        cls: class of the Module.
        weights: tuples (attribute, local name, leaf index, marked shared, index in a stack or None).
        children: pairs (attribute, node index).
        statics: pairs (attribute, key of the value), sorted.
        in_stack: whether the Module is, or is in, one of the layers of a LayerStack.
        stacks: for a LayerStack, pairs (leaf index of a StackedWeight, index of its first Weight if it is a
            part of an outer LayerStack's, otherwise None).
        elsewhere: for a LayerStack, tuples (layer index, path in the layer, node index) of Modules
            that the model also holds elsewhere, in layers that another layer represents.
        shards: tuples (attribute, index of the sharded leaf, index in a stack or None, description of
            the shard); the description is -1 if the sharded Weight is not below the root.
        source: for a layer that ``shard`` returned, node index of the original or _ELSEWHERE; otherwise None.
    """

    cls: type
    weights: tuple[tuple[str, str, int, bool, int | None], ...]
    children: tuple[tuple[str, int], ...]
    statics: tuple[Any, ...]
    in_stack: bool
    stacks: tuple[tuple[int, int | None], ...]
    elsewhere: tuple[tuple[int, str, int], ...]
    shards: tuple[tuple[str, int, int | None, Any], ...]
    source: int | None


# Node.source if the layer that was split is not below the root, but all of its Weights are.
_ELSEWHERE = -1


class Cache:
    """All that is computed of the tree below a Module, and for which structure and which values of Weights it is valid.

    Attributes:
        structure: ``EPOCH.structure`` for which this is valid; at another, the Module gets a new Cache.
        treedef, definition: what JAX compares.
        weights: for each leaf, the Weight or StackedWeight that has it.
        sliced: whether leaves are slices of stacks, which are kept as StackSlices and sliced on demand.
        changeable, lists: what can change without an assignment to a Module; ``watches``: whether there is any.
        values: ``EPOCH.values`` for which ``leaves`` and ``traced`` (whether one is traced) are valid.
        names: the names below the Module, with one for all equal layers of a stack (True) or one for each (False),
            once they are wanted (``Module._mx_names_below``).
    """

    __slots__ = (
        "structure", "treedef", "definition", "weights", "sliced", "changeable", "lists", "watches",
        "values", "leaves", "traced", "names", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        structure: int,
        treedef: Variant,
        weights: tuple[Any, ...],
        changeable: tuple[Changeable, ...] = (),
        lists: tuple[AssignedList, ...] = (),
        sliced: bool = False,
    ):
        self.structure, self.treedef, self.definition = structure, treedef, treedef.definition
        self.weights, self.sliced = weights, sliced
        self.changeable, self.lists = changeable, lists
        self.watches = bool(changeable or lists)
        self.values, self.leaves, self.traced = -1, (), False
        self.names: dict[bool, ModuleNames] = {}

    def is_outdated(self) -> bool:
        """Whether the structure below the Module has changed.

        Raises:
            TypeError: a caller's list was changed after it was assigned.
        """
        if self.structure != EPOCH.structure:
            return True
        for one in self.lists:
            one.check()
        return any(one.has_changed() for one in self.changeable)

    def refresh(self) -> tuple[Any, ...]:
        """Collects the leaves from the weights again."""
        values = EPOCH.values
        leaves = tuple(map(leaf_of, self.weights))
        self.leaves, self.values = leaves, values
        self.traced = any(isinstance(stack_of(leaf), Tracer) for leaf in leaves)
        note_leaf_cache(self)
        return leaves


def _array(leaf: Any) -> Any:
    """The leaf as an array; a slice of a stack becomes the array of that layer."""
    if type(leaf) is not StackSlice:
        return leaf
    if isinstance(leaf.stack, Tracer):
        return leaf.__jax_array__()
    with jax.ensure_compile_time_eval():  # outside of any trace that is running
        return leaf.__jax_array__()


def define(root: Any) -> Cache:
    """Walks the tree below ``root``, and returns its Definition and weights in a new Cache."""
    epoch = EPOCH.structure  # before the walk: what changes meanwhile must be walked again
    walk = Walk(root, stacked=True)
    changeable = Changeable.below(walk.modules)
    try:
        index, leaves, _ = walk.owners()
    except ValueError:
        Walk(root).owners()  # raises the same error with the names of a state dict
        raise
    nodes = tuple(_node(i, walk, index) for i in range(len(walk.modules)))
    weights = tuple(weight for _, weight, _ in leaves)
    names = tuple(name for name, _, _ in leaves)
    owned = tuple(flag for _, _, flag in leaves)
    marks = tuple(m._mx_marks for m in walk.modules)
    specs = tuple(w.spec for w in weights)
    classes = {node.cls for node in nodes}
    key = (token(), code(classes), nodes, names, owned, specs, marks if any(marks) else ())

    def make() -> dict[str, Any]:
        memo: dict[int, Any] = {}
        return {
            "nodes": nodes, "names": names, "owned": owned, "marks": key[-1],
            "weights": tuple(w.like(None) for w in weights),
            "stacked": walk.stacked,
            "changeable": bool(changeable),
            "shards": tuple(
                {a: shard.of(None) for a, shard in m._mx_shards.items() if hasattr(shard, "host")}
                for m in walk.modules
            ),
            "statics": tuple(
                {attr: unshared(vars(module)[attr], memo) for attr, _ in node.statics}
                for module, node in zip(walk.modules, nodes, strict=True)
            ),
        }  # fmt: skip

    treedef = Variant(_interned(key, make), _unread_of(walk.modules))
    sliced = any(weight.home is not None for weight in weights)
    lists = AssignedList.below(walk.modules)
    return Cache(epoch, treedef, weights, changeable, lists, sliced)


def _unread_of(modules: list[Any]) -> Unread:
    """The static attributes of each Module that are not compared, or not all fields of which are."""
    found = tuple(
        {
            attr: (vars(module)[attr], key)
            for attr, key in module._mx_statics.items()
            if attr in module._mx_unread or unread_fields(type(vars(module)[attr]))
        }
        for module in modules
    )
    return found if any(found) else ()


def _node(number: int, walk: Walk, index: dict[int, int]) -> Node:
    module = walk.modules[number]
    weights = []
    for attr, local in module._mx_locals.items():
        weight = module._mx_weights[local]
        holder, number_in_stack = walk.slot(weight)
        shared = attr in module._mx_shared
        weights.append((attr, local, index[id(holder)], shared, number_in_stack))
    slots = [walk.slot(stack) for stack in module._mx_stacks]
    return Node(
        type(module),
        tuple(weights),
        tuple((attr, walk.index[id(child)]) for attr, child in module._mx_children.items()),
        tuple(
            sorted(
                (item for item in module._mx_statics.items() if item[0] not in module._mx_unread),
                key=itemgetter(0),
            )
        ),
        walk.stacked and module._mx_in_stack,
        tuple((index[id(holder)], first) for holder, first in slots),
        _elsewhere(module, walk),
        tuple(_part(attr, shard, walk, index) for attr, shard in module._mx_shards.items()),
        walk.index.get(id(source_of(module)), _ELSEWHERE) if "_mx_source" in vars(module) else None,
    )


def _part(
    attr: str, shard: Any, walk: Walk, index: dict[int, int]
) -> tuple[str, int, int | None, Any]:
    host = host_of(shard)
    holder, number = walk.slot(host)
    if id(holder) not in index:
        return attr, index[id(shard)], None, -1
    return attr, index[id(holder)], number, shard.spec


def _elsewhere(stack: Any, walk: Walk) -> tuple[tuple[int, str, int], ...]:
    """The Modules in represented layers of a stack that the model also holds in other places."""
    if not stack._mx_is_stack:
        return ()
    if not any(
        m._mx_in_stack and not inner for m, inner in zip(walk.modules, walk.in_stack, strict=True)
    ):
        return ()
    found = []
    for i, layer in sorted(vars(stack).get("_mx_made", {}).items()):
        if layer in stack._mx_children.values():
            continue
        below = Walk(layer, stacked=True)
        found += [
            (i, path, walk.index[id(module)])
            for module, path in zip(below.modules, below.paths, strict=True)
            if module._mx_in_stack and id(module) in walk.index
        ]
    return tuple(found)


def marked(root: Any, plan: Hashable, name: str) -> Any:
    """A copy of a Module and of all Modules below it, marked as observed by a plan.

    The copy has the same values, but another treedef, which ``jax.tree.map`` and JAX's
    transformations preserve.

    Args:
        plan: plan that observes the Modules.
        name: full name of the Module for the plan; the names of Modules below start with it.
    """
    start = f"{name}." if name else ""
    mark = lambda prefix: (plan, of_first_layer(f"{start}{prefix}".rstrip(".")))
    return _remarked(root, lambda marks, prefix: (*marks, mark(prefix)))


def unmarked(tree: Any, plan: Hashable) -> Any:
    """A copy of the tree in which no Module is marked as observed by a plan."""
    others = lambda marks, prefix: tuple(mark for mark in marks if mark[0] != plan)
    unobserved = lambda value: (
        _remarked(value, others) if getattr(value, "_mx_marks", ()) else value
    )
    return jax.tree.map(unobserved, tree, is_leaf=lambda value: hasattr(value, "_mx_marks"))


def _remarked(root: Any, change: Callable[[tuple[Any, ...], str], tuple[Any, ...]]) -> Any:
    """A copy of a Module with other marks, which ``change`` makes of those of each Module and its prefix."""
    leaves, found = flatten(root)
    old, walk = found.definition, Walk(root, stacked=True)
    pairs = zip(walk.modules, walk.prefixes, strict=True)
    marks = tuple(change(module._mx_marks, prefix) for module, prefix in pairs)
    marks = marks if any(marks) else ()
    slots = [slot for slot in Definition.__slots__ if slot not in ("key", "marks", "__weakref__")]
    make = lambda: {**{slot: getattr(old, slot) for slot in slots}, "marks": marks}
    return unflatten(Variant(_interned((*old.key[:-1], marks), make), found.unread), leaves)


def unflatten(treedef: Variant, leaves: Iterator[Any] | Any) -> Any:
    """A new tree of Modules around ``leaves``, which may be any objects and are not inspected."""
    definition = treedef.definition
    holders = tuple(
        w.like(leaf, name)
        for w, leaf, name in zip(definition.weights, leaves, definition.names, strict=True)
    )
    values, keys = list(definition.statics), [dict(node.statics) for node in definition.nodes]
    if definition.changeable:
        memo: dict[int, Any] = {}
        values = [{attr: unshared(v, memo) for attr, v in own.items()} for own in values]
    for i, unread in enumerate(treedef.unread):
        values[i] = {**values[i], **{attr: value for attr, (value, _) in unread.items()}}
        keys[i] |= {attr: key for attr, (_, key) in unread.items()}
    modules = build(definition, holders, values, keys)
    changeable = Changeable.below(modules) if definition.changeable else ()
    vars(modules[0])["_mx_cache"] = Cache(EPOCH.structure, treedef, holders, changeable)
    return modules[0]


def build(
    definition: Definition,
    holders: Sequence[Any],
    values: Sequence[Mapping[str, Any]],
    keys: Sequence[dict[str, Hashable]],
    given: Mapping[int, Any] = MappingProxyType({}),
) -> list[Any]:
    """The Modules of a Definition, in walk order.

    Args:
        holders: for each leaf, the Weight or StackedWeight that has it.
        values, keys: for each node, the values of its static attributes, and their keys.
        given: by the index of a node, a Module that is taken as it is.
    """
    nodes = definition.nodes
    modules = [given[i] if i in given else object.__new__(n.cls) for i, n in enumerate(nodes)]
    for number, (module, node) in enumerate(zip(modules, nodes, strict=True)):
        if number in given:
            continue
        weights = {
            local: holders[leaf] if i is None else holders[leaf].view(i)
            for _, local, leaf, _, i in node.weights
        }
        children = {attr: modules[i] for attr, i in node.children}
        state = vars(module)
        state.update(
            values[number],
            _mx_weights=weights,
            _mx_locals={attr: local for attr, local, _, _, _ in node.weights},
            _mx_children=children,
            _mx_shared={attr for attr, _, _, shared, _ in node.weights if shared},
            _mx_statics=keys[number],
            _mx_cache=None,
            **children,
        )
        for attr, local, _, _, _ in node.weights:
            state[attr] = weights[local]
        if node.shards:
            templates = definition.shards[number]
            shards = {
                attr: holders[leaf] if what == -1
                else templates[attr].of(holders[leaf] if i is None else holders[leaf].view(i))
                for attr, leaf, i, what in node.shards
            }  # fmt: skip
            state.update(shards, _mx_shards=shards)
        if definition.marks:
            state["_mx_marks"] = definition.marks[number]
        if node.in_stack:
            state["_mx_in_stack"] = True
        if node.source is not None:
            state["_mx_source"] = None if node.source == _ELSEWHERE else modules[node.source]
        if node.cls._mx_is_stack:
            state["_mx_stacks"] = tuple(
                holders[leaf] if start is None else holders[leaf].inner(start)
                for leaf, start in node.stacks
            )
            if node.elsewhere:
                state["_mx_elsewhere"] = {(i, path): modules[k] for i, path, k in node.elsewhere}
    return modules


def cache_of(module: Any) -> Cache:
    """The valid Cache of the structure below a Module; its leaves are not touched."""
    cache = module._mx_cache
    if (
        cache is None
        or cache.structure != EPOCH.structure
        or (cache.watches and cache.is_outdated())
    ):
        cache = vars(module)["_mx_cache"] = define(module)
    return cache


def flatten(module: Any) -> tuple[tuple[Any, ...], Variant]:
    # Every jitted call runs this at dispatch: it is a few look-ups if nothing has changed.
    # Leaves are read before the epoch, because other threads advance the epoch before they release leaves.
    cache = module._mx_cache
    if cache is None or cache.structure != EPOCH.structure or cache.watches:
        cache = cache_of(module)
    leaves = cache.leaves
    if cache.values != EPOCH.values:
        leaves = cache.refresh()
    if RUNNING.graphs:
        leaves = tuple(map(leaf_for_jax, cache.weights))
    if cache.sliced:
        leaves = tuple(map(_array, leaves))
    treedef = cache.treedef
    if treedef.kind != KIND.now:
        treedef = cache.treedef = Variant(treedef.definition, treedef.unread, KIND.now)
    return leaves, treedef


def is_traced(module: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a weight of a Module or an argument is traced."""
    cache = cache_of(module)
    if cache.values != EPOCH.values:
        cache.refresh()
    if cache.traced:
        return True
    for leaf in jax.tree.leaves((args, kwargs)):  # each call of a layer runs this
        if isinstance(leaf, Tracer):
            return True
    return False


def weight_values(module: Any) -> list[Any]:
    """The values that the weights hold: the leaves, with the whole stack instead of a slice."""
    cache = cache_of(module)
    leaves = cache.leaves
    return list(map(stack_of, leaves if cache.values == EPOCH.values else cache.refresh()))


def flatten_with_keys(module: Any) -> tuple[list[tuple[Any, Any]], Variant]:
    leaves, treedef = flatten(module)
    keys = map(jax.tree_util.GetAttrKey, treedef.definition.names)
    return list(zip(keys, leaves, strict=True)), treedef
