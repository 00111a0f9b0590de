"""Walk: the traversal of the Modules below a root, which finds names, weights, ties and shards.

State dicts, treedefs, placement and hooks all take names from it, so that their names agree.
The parts of a layer are the layers that ``shard`` returns; they are views of the original layer, and have no names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from ...errors import UserInputError
from ...graph.weight.weight import Weight


def check_module(model: Any, function: str, reads: bool = True) -> None:
    """Checks that what a public function was given as a model is a Module.

    Args:
        reads: whether the function needs the arrays of the model, so that they may not be deleted.

    Raises:
        UserInputError: it is not, or its arrays are deleted; the message begins with the name of the function.

    Example:
        >>> check_module((1, 2), "replace")
        Traceback (most recent call last):
        maxjax.errors.UserInputError: maxjax.replace takes a maxjax Module, not tuple
    """
    if hasattr(type(model), "_mx_definition"):
        if reads and (problem := deleted_arrays(model)):
            raise UserInputError(f"maxjax.{function}: {problem}")
        return
    first = model[0] if isinstance(model, tuple) and model else None  # of what load() returns
    what, hint = type(model).__name__, ""
    if hasattr(type(first), "_mx_definition"):
        hint = "; pass the first item of the tuple, as in model, tokenizer = maxjax.load(path)"
    elif isinstance(model, type) and hasattr(model, "_mx_definition"):
        what, hint = f"the class {model.__name__}", f": make one, {model.__name__}(…)"
    raise UserInputError(f"maxjax.{function} takes a maxjax Module, not {what}{hint}")


def deleted_arrays(model: Any) -> str:
    """What is wrong, if arrays of a Module are deleted; "" if none is."""
    for weight in model._mx_definition()[1]:
        leaf = weight.leaf
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            return (
                f"the arrays of this {type(model).__name__} are deleted, as it was donated to a compiled function "
                "(donate_argnums): go on with the model that the function returned, model = step(model, …)"
            )
    return ""


class Reference(NamedTuple):
    """A Weight that an attribute of a Module refers to.

    Attributes:
        name: full name.
        path: attribute path, which differs from the name if a Module omits its own name.
        weight: the Weight; it may have other references, too.
        shared: whether the attribute is marked as a reference to another layer's weight.
        in_stack: whether the Module is in the layer that represents all equal layers of a LayerStack.
    """

    name: str
    path: str
    weight: Weight
    shared: bool
    in_stack: bool


class Walk:
    """One breadth-first walk over the Modules below a root, visiting each Module once.

    Parts of layers (from ``shard``) that a Module holds are views and have no names. If the original
    layer is not below the root, the walk includes it under the name of the attribute
    that holds the parts. Parts are visited last, and only with ``stacked``.

    Args:
        root: Module at which the walk starts.
        stacked: whether one layer represents all equal layers of a LayerStack (treedef), or each is visited.

    Attributes:
        modules: Modules in walk order.
        prefixes: for each Module, the prefix of its weights' full names: "" or "a.b.".
        paths: for each Module, its attribute path, which differs from the prefix if a Module
            omits its own name.
        in_stack: for each Module, whether it is in the layer that represents all equal layers of
            a LayerStack.
        references: the references to Weights, in walk order.
        stacked: whether the walk visited a LayerStack.
        stacks: ids of the StackedWeights of these LayerStacks; for inner LayerStacks, of the parts of
            the outer LayerStacks' StackedWeights that they use.
        shards: tuples (full name, attribute path, shard) for shards that are held as attributes.
    """

    def __init__(self, root: Any, stacked: bool = False):
        self.modules = [root]
        self.prefixes = [""]
        self.paths = [""]
        self.in_stack = [False]
        self.index = {id(root): 0}
        self.references: list[Reference] = []
        self.stacked = False
        self.stacks: set[int] = set()
        self._inner_stacks: dict[
            int, list[Any]
        ] = {}  # by id of the StackedWeight of which they are views
        self.shards: list[tuple[str, str, Weight]] = []
        self._held: list[_View] = []
        self._layers_only = not stacked
        # If the root itself is a part or a list of parts, the weights are those of the parts.
        self._views = not _is_view(root)
        done = self._run(0)
        for view in self._held:  # grows while it runs
            _Owners(self).add(view)
            done = self._run(done)
        if stacked:
            self._views = False
            for view in self._held:
                self.enter(
                    view.item, f"{view.prefix}{view.attr}.", f"{view.path}{view.attr}.", view.within
                )
            self._run(done)

    def _run(self, done: int) -> int:
        """Visits the Modules from index ``done`` on, including those that are added meanwhile."""
        while done < len(self.modules):
            module = self.modules[done]
            module._mx_adopt()
            is_stack = not self._layers_only and module._mx_is_stack
            if is_stack:
                self.stacked = True
                self.stacks.update(map(id, module._mx_stacks))
                for stack in module._mx_stacks:
                    if stack.home is not None:
                        self._inner_stacks.setdefault(id(stack.home[0]), []).append(stack)
            children = module._mx_layers() if self._layers_only else module._mx_children
            self._visit(done, module, children, is_stack)
            done += 1
        return done

    def enter(self, module: Any, prefix: str, path: str, within: bool) -> None:
        """Adds a new Module, to be visited later."""
        if id(module) in self.index:
            return
        self.index[id(module)] = len(self.modules)
        self.modules.append(module)
        self.in_stack.append(within and module._mx_in_stack)
        self.prefixes.append(prefix)
        self.paths.append(path)

    def _visit(self, number: int, module: Any, children: Any, is_stack: bool) -> None:
        prefix, path, inner = self.prefixes[number], self.paths[number], self.in_stack[number]
        weights, shared = module._mx_weights, module._mx_shared
        self.references += [
            Reference(prefix + local, path + attr, weights[local], attr in shared, inner)
            for attr, local in module._mx_locals.items()
        ]
        self.shards += [
            (prefix + shard.name, path + attr, shard) for attr, shard in module._mx_shards.items()
        ]
        within = inner or is_stack
        for attr, child in children.items():
            if id(child) in self.index:
                continue
            if self._views and _is_view(child):
                self._held.append(_View(child, attr, prefix, path, within))
                continue
            below = prefix if child._omit_module_attr_name else f"{prefix}{attr}."
            self.enter(child, below, f"{path}{attr}.", within)

    def slot(self, weight: Any) -> tuple[Any, int | None]:
        """The object that holds the leaf of a Weight, and the Weight's number in it.

        It is the Weight's StackedWeight, or the stack of one layer of that, if one of them is below the root;
        otherwise it is the Weight itself, and there is no number. A stack of one layer has a slot as a Weight has.
        """
        if weight.home is None:
            return weight, None
        stack, number = weight.home
        if id(stack) in self.stacks:
            return stack, number
        for inner in self._inner_stacks.get(id(stack), ()):
            first = inner.home[1]
            if inner is not weight and first <= number < first + inner.spec.count:
                return inner, number - first
        return weight, None

    def holder(self, weight: Any) -> Any:
        """The object that holds the leaf of a Weight."""
        return self.slot(weight)[0]

    def owners(self) -> tuple[dict[int, int], list[tuple[str, Any, bool]], dict[str, str]]:
        """Chooses the owner of each leaf: the first place that is not marked shared, otherwise the first place.

        A stack is named by its own layer, not by a weight that is tied to one of its slices.

        Returns:
            A map from id(holder) to the leaf's index; tuples (name, holder, owned) of the leaves in
            state-dict order; and a map from other names of tied weights to the owner's name.

        Raises:
            ValueError: two weights have the same full name.
        """
        holders = [self.holder(one.weight) for one in self.references]
        best: dict[int, tuple[bool, bool, int]] = {}  # the reference that gives a holder its name
        for i, (holder, one) in enumerate(zip(holders, self.references, strict=True)):
            found = (holder is not one.weight and not one.in_stack, one.shared, i)
            best[id(holder)] = min(found, best.get(id(holder), found))
        index: dict[int, int] = {}
        leaves: list[tuple[str, Any, bool]] = []
        taken: dict[str, str] = {}
        for i in sorted(i for _, _, i in best.values()):
            name, path, _, shared, _ = self.references[i]
            if name in taken:
                raise ValueError(_duplicate(name, taken[name], path))
            taken[name] = path
            index[id(holders[i])] = len(leaves)
            leaves.append((name, holders[i], not shared))
        for name, path, shard in self.shards:
            # If the original Weight is not below the root, a shard is an ordinary leaf.
            if id(self.holder(host_of(shard))) not in index and id(shard) not in index:
                name = path if name in taken else name
                taken[name] = path
                index[id(shard)] = len(leaves)
                leaves.append((name, shard, True))
        aliases = {}
        for holder, one in zip(holders, self.references, strict=True):
            true_name = leaves[index[id(holder)]][0]
            if not one.shared and one.name != true_name and one.name not in taken:
                aliases[one.name] = true_name
        return index, leaves, aliases


class ModuleNames:
    """The names that a walk has found, to look up. It holds no Module: ids are those of what is in the tree.

    Attributes:
        prefixes: map from id(Module) to its prefix, in walk order.
        weights: map from full name to Weight.
        names: map from id(Weight) to its first full name.
        stacks: ids of the StackedWeights.
        owned: map from full name to Weight, as in a state dict: each once, under its owner's name.
        aliases: map from other full names of tied weights to the owner's name.
    """

    __slots__ = ("prefixes", "weights", "names", "stacks", "owned", "aliases")

    def __init__(self, walk: Walk):
        self.prefixes = {id(m): p for m, p in zip(walk.modules, walk.prefixes, strict=True)}
        self.weights = {one.name: one.weight for one in walk.references}
        self.names = {id(one.weight): one.name for one in reversed(walk.references)}
        self.stacks = walk.stacks
        _, leaves, self.aliases = walk.owners()
        self.owned = {name: weight for name, weight, owned in leaves if owned}


def host_of(shard: Any) -> Weight:
    """The Weight of which this is a shard; the shard itself if it has no such Weight after a rebuild."""
    return getattr(shard, "host", shard)


def _duplicate(name: str, first: str, second: str) -> str:
    return (
        f"Duplicate weight name '{name}': '{first}' and '{second}' would have the same full name in the "
        "state dict. One of the modules on these paths leaves its own attribute name out "
        "(_omit_module_attr_name), or a Weight's name has a dot: rename one of the weights or attributes"
    )


class _View(NamedTuple):
    """A part of a layer, or a list of parts, that is an attribute of a Module.

    Attributes:
        item: part, which is a Module, a list of Modules, or a shard of a Weight.
        attr: name of the attribute.
        prefix: prefix of the full names of the holder's weights.
        path: prefix of the attribute paths below the holder.
        within: whether the holder is, or is in, one of the layers of a LayerStack.
    """

    item: Any
    attr: str
    prefix: str
    path: str
    within: bool


def _is_view(item: Any, in_list: bool = False) -> bool:
    """Whether an item holds no weights of its own, but is a part of a layer, or a list of parts.

    The parts that a user-written ``shard`` method has made are known by the shards in them, and only as items of
    a list. A layer that holds a list of parts is not a part.
    """
    if isinstance(item, Weight):
        return True
    is_copy = "_mx_source" in vars(item)  # shard() has made it
    if not (is_copy or item._mx_is_container or in_list):
        return False
    if any(module._mx_weights for module in _below(item)):
        return False
    if is_copy:
        return True
    items = [*item._mx_children.values(), *item._mx_shards.values()]
    if item._mx_is_container and items and all(_is_view(one, in_list=True) for one in items):
        return True
    return in_list and any(m._mx_shards and not m._mx_is_container for m in _below(item))


def _below(module: Any) -> Iterator[Any]:
    """This Module and all Modules in it, without the contents of parts of other layers."""
    found, seen = [module], {id(module)}
    for one in found:  # grows while it runs
        yield one
        for child in one._mx_children.values():
            other = "_mx_source" in vars(child) and "_mx_source" not in vars(module)
            if id(child) not in seen and not other:
                seen.add(id(child))
                found.append(child)


class _Owners:
    """Finds the original layers of parts, and adds them to the walk if they are not below the root."""

    def __init__(self, walk: Walk):
        self.walk = walk

    @cached_property
    def placed(self) -> set[int]:
        """ids of the holders of the weights visited so far; computed only if an original layer was not visited."""
        return {id(self.walk.holder(one.weight)) for one in self.walk.references}

    def add(self, view: _View) -> None:
        """Adds the owners of a view, under the name of the attribute that holds it."""
        item, attr, prefix, path, within = view
        source = source_of(item)
        if isinstance(item, Weight):
            self._add_weight(prefix, path + attr, host_of(item), within)
        elif source is not None:
            if id(source) not in self.walk.index and not self._has_all(item):
                self.walk.enter(source, f"{prefix}{attr}.", f"{path}{attr}.", within)
        elif item._mx_is_container:
            items = {**item._mx_children, **item._mx_shards}
            origins = [_origins(part) for part in items.values()]
            one = all(
                found & origins[0] for found in origins
            )  # all parts are of the same layer or Weight
            for i, part in items.items():
                inner = (
                    view if one else _View(item, attr, f"{prefix}{attr}.", f"{path}{attr}.", within)
                )
                self.add(inner._replace(item=part, attr=attr if one else i))
        elif not self._has_all(item):
            below = Walk(item)
            for module, start in zip(below.modules, below.prefixes, strict=True):
                for name, shard in module._mx_shards.items():
                    where = f"{path}{attr}.{start}{name}"
                    self._add_weight(f"{prefix}{attr}.{start}", where, host_of(shard), within)

    def _has_all(self, part: Any) -> bool:
        return all(self._has(host_of(s)) for m in _below(part) for s in m._mx_shards.values())

    def _has(self, weight: Weight) -> bool:
        return id(self.walk.holder(weight)) in self.placed

    def _add_weight(self, prefix: str, path: str, weight: Weight, within: bool) -> None:
        if not self._has(weight):
            self.placed.add(id(self.walk.holder(weight)))
            name = prefix + weight.spec.local_name
            self.walk.references.append(Reference(name, path, weight, False, within))


def source_of(item: Any) -> Any:
    """The original layer of a part, if it is known."""
    return vars(item).get("_mx_source")


def _origins(item: Any) -> set[int]:
    """ids of the original layer or Weights of an item; for a list, the id of the list."""
    if isinstance(item, Weight):
        return {id(host_of(item))}
    if (source := source_of(item)) is not None:
        return {id(source)}
    if item._mx_is_container:
        return {id(item)}
    return {id(host_of(shard)) for one in _below(item) for shard in one._mx_shards.values()}


def recursive_named_layers(parent: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yields (name, Module) for ``parent`` and every Module in it, once each, breadth first.

    A name is the attribute path below ``prefix``, without a trailing dot; that of ``parent`` is ``prefix``.
    """
    walk = Walk(parent)
    for path, module in zip(walk.paths, walk.modules, strict=True):
        yield ".".join(filter(None, (prefix, path.rstrip(".")))), module
