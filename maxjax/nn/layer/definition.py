"""Floor 4. The definition of a Module: its treedef, made by one walk and interned.

A Module flattens to its unique weights' values in state-dict order, one level deep. The
rest (classes, attributes, static values, ties, names) is a Definition: equal
definitions are one object, so JAX compares treedefs by identity at every dispatch.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import jax

from ...graph.weight import EPOCH, LEAF_CACHES, Weight
from .hooks import token


class Definition:
    """What a tree of Modules is apart from its weights' values. Immutable, interned.

    Attributes:
        names: Full name of each leaf, in state-dict order.
        owned: For each leaf, whether it is in the state dict (False where every
            reference below this root is marked as shared with an owner elsewhere).
        aliases: Other full names of tied weights → the owner's.
        nodes: One per Module in walk order: (class, weights, children, statics), where
            weights are (attribute, leaf index, marked shared) and children are
            (attribute, node index).
        weights: A Weight without value per leaf, to copy from.
        statics: The static values of each node.
    """

    __slots__ = ("key", "names", "owned", "aliases", "nodes", "weights", "statics", "__weakref__")

    def __repr__(self) -> str:
        return f"{self.nodes[0][0].__name__}({len(self.names)} weights)"

    def __reduce__(self) -> Any:
        raise TypeError("a Module's treedef cannot be pickled; pickle the Module")

    def __copy__(self) -> Definition:
        return self

    def __deepcopy__(self, memo: Any) -> Definition:
        return self


_INTERNED: weakref.WeakValueDictionary[Hashable, Definition] = weakref.WeakValueDictionary()


class Walk:
    """One breadth-first walk over the Modules below a root; each Module once.

    Attributes:
        modules: In walk order.
        prefixes: For each, the start of its weights' full names: "" or "a.b.".
        paths: For each, its attribute path; differs where a Module omits its own name.
        places: (full name, attribute path, weight, marked shared) in walk order.
    """

    def __init__(self, root: Any):
        self.modules = [root]
        self.prefixes = [""]
        self.paths = [""]
        self.index = {id(root): 0}
        self.places: list[tuple[str, str, Weight, bool]] = []
        for i, module in enumerate(self.modules):  # grows while it runs
            self._visit(module, self.prefixes[i], self.paths[i])

    def _visit(self, module: Any, prefix: str, path: str) -> None:
        weights = module._mx_weights
        for attr, local in module._mx_locals.items():
            place = (prefix + local, path + attr, weights[local], attr in module._mx_shared)
            self.places.append(place)
        for attr, child in module._mx_children.items():
            if id(child) in self.index:
                continue
            self.index[id(child)] = len(self.modules)
            self.modules.append(child)
            self.prefixes.append(prefix if child._omit_module_attr_name else f"{prefix}{attr}.")
            self.paths.append(f"{path}{attr}.")

    def owners(self) -> tuple[dict[int, int], list[tuple[str, Weight, bool]], dict[str, str]]:
        """Picks the owner of each weight: the first place not marked shared, else the first.

        Returns:
            leaf index by id(weight); the leaves (name, weight, owned) in state-dict
            order; aliases of tied weights.

        Raises:
            ValueError: Two weights have one full name.
        """
        owner: dict[int, int] = {}
        for position, (_, _, weight, shared) in enumerate(self.places):
            known = owner.get(id(weight))
            if known is None or (self.places[known][3] and not shared):
                owner[id(weight)] = position
        index: dict[int, int] = {}
        leaves: list[tuple[str, Weight, bool]] = []
        taken: dict[str, str] = {}
        for position in sorted(owner.values()):
            name, path, weight, shared = self.places[position]
            if name in taken:
                raise ValueError(_duplicate(name, taken[name], path))
            taken[name] = path
            index[id(weight)] = len(leaves)
            leaves.append((name, weight, not shared))
        aliases = {}
        for name, _, weight, shared in self.places:
            true_name = leaves[index[id(weight)]][0]
            if not shared and name != true_name and name not in taken:
                aliases[name] = true_name
        return index, leaves, aliases


def _duplicate(name: str, first: str, second: str) -> str:
    return (
        f"Duplicate weight name '{name}': '{first}' and '{second}' would have the same full name in the "
        "state dict. One of the modules on these paths leaves its own attribute name out "
        "(_omit_module_attr_name): rename one of the weights or attributes"
    )


class Cache:
    """What a Module keeps of its last walk: for which epochs it holds, and what it found."""

    __slots__ = ("structure", "definition", "weights", "values", "leaves", "__weakref__")

    def __init__(self, structure: int, definition: Definition, weights: tuple[Weight, ...]):
        self.structure, self.definition, self.weights = structure, definition, weights
        self.refresh()

    def refresh(self) -> tuple[Any, ...]:
        """Collects the weights' leaves anew."""
        values = EPOCH.values
        leaves = tuple(weight._leaf for weight in self.weights)
        self.leaves, self.values = leaves, values
        LEAF_CACHES.add(self)
        return leaves


def define(root: Any) -> Cache:
    """Walks the tree below ``root``."""
    epoch = EPOCH.structure
    walk = Walk(root)
    index, leaves, aliases = walk.owners()
    nodes = tuple(_node(module, walk, index) for module in walk.modules)
    weights = tuple(weight for _, weight, _ in leaves)
    names = tuple(name for name, _, _ in leaves)
    owned = tuple(flag for _, _, flag in leaves)
    key = (token(), nodes, names, owned, tuple(w._static() for w in weights))
    definition = _INTERNED.get(key)
    if definition is None:
        definition = Definition()
        definition.key, definition.names, definition.owned, definition.aliases = (
            key,
            names,
            owned,
            aliases,
        )
        definition.nodes = nodes
        definition.weights = tuple(Weight._from_static(w, None, None) for w in weights)
        definition.statics = tuple({a: m.__dict__[a] for a in m._mx_statics} for m in walk.modules)
        # Two threads may get here at once: one definition wins.
        definition = _INTERNED.setdefault(key, definition)
    return Cache(epoch, definition, weights)


def _node(module: Any, walk: Walk, index: dict[int, int]) -> tuple[Any, ...]:
    weights = module._mx_weights
    return (
        type(module),
        tuple((attr, local, index[id(weights[local])], attr in module._mx_shared)
              for attr, local in module._mx_locals.items()),
        tuple((attr, walk.index[id(child)]) for attr, child in module._mx_children.items()),
        tuple(sorted(module._mx_statics.items(), key=_first)),
    )  # fmt: skip


def _first(item: tuple[str, Any]) -> str:
    return item[0]


def rebuild(definition: Definition, leaves: Iterator[Any] | Any) -> Any:
    """A new tree of Modules around ``leaves``, which may be anything and are not looked at."""
    weights = tuple(
        Weight._from_static(w, leaf, name)
        for w, leaf, name in zip(definition.weights, leaves, definition.names, strict=True)
    )
    modules = [object.__new__(node[0]) for node in definition.nodes]
    for module, node, statics in zip(modules, definition.nodes, definition.statics, strict=True):
        _, own, children, keys = node
        by_local = {local: weights[i] for _, local, i, _ in own}
        by_attr = {attr: modules[i] for attr, i in children}
        module.__dict__.update(
            statics,
            _mx_weights=by_local,
            _mx_locals={attr: local for attr, local, _, _ in own},
            _mx_children=by_attr,
            _mx_shared={attr for attr, _, _, shared in own if shared},
            _mx_statics=dict(keys),
            _mx_cache=None,
            **by_attr,
        )
        module.__dict__.update({attr: by_local[local] for attr, local, _, _ in own})
    modules[0].__dict__["_mx_cache"] = Cache(EPOCH.structure, definition, weights)
    return modules[0]


def flatten(module: Any) -> tuple[tuple[Any, ...], Definition]:
    # The dispatch path of every jitted call: two look-ups when nothing has changed. The
    # leaves are read before the count: another thread counts first, then lets them go.
    cache = module._mx_cache
    if cache is None or cache.structure != EPOCH.structure:
        cache = vars(module)["_mx_cache"] = define(module)
    leaves = cache.leaves
    if cache.values != EPOCH.values:
        leaves = cache.refresh()
    return leaves, cache.definition


def flatten_with_keys(module: Any) -> tuple[list[tuple[Any, Any]], Definition]:
    leaves, definition = flatten(module)
    keys = map(jax.tree_util.GetAttrKey, definition.names)
    return list(zip(keys, leaves, strict=True)), definition
