"""``maxjax.tree.map``: ``jax.tree.map``, which says what differs between models that it cannot take together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .errors import UserInputError, some
from .graph.weight.spec import WeightSpec
from .nn.layer.module import Module
from .nn.layer.static import fields_of, unread_fields
from .nn.layer.walk import Walk
from .rendering.row import short


def map(
    function: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Applies a function to the leaves of pytrees, as ``jax.tree.map`` does.

    Models from different checkpoints are one kind of tree if they compute the same function of their weights. Raw
    configurations, generation settings and pooling are not compared; the result has those of the first tree.

    Args:
        function: function of one leaf of each tree.
        tree: a pytree, for example a Module.
        rest: pytrees of the same structure.
        is_leaf: function that says whether a node is taken as a leaf.

    Raises:
        UserInputError: Modules in the trees differ; the message names the attributes and both values.
        ValueError: the trees differ in another way.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> one, two = nn.LayerNorm(4, [], "float32"), nn.LayerNorm(4, [], "float32", eps=1e-6)
        >>> maxjax.tree.map(lambda a, b: (a + b) / 2, one, two)
        Traceback (most recent call last):
        ...
        maxjax.errors.UserInputError: tree.map: two LayerNorms differ in eps: 1e-05 and 1e-06
    """
    try:
        return jax.tree.map(function, tree, *rest, is_leaf=is_leaf)
    except (ValueError, AttributeError):  # the latter is JAX's for trees with other keys (0.10)
        for other in rest:
            if problem := _difference(tree, other):
                raise UserInputError(f"tree.map: {problem}") from None
        raise


def _difference(one: Any, two: Any) -> str:
    """How the first two Modules differ that are not equal; "" if no Modules do."""
    is_module = lambda value: isinstance(value, Module)
    leaves, found = jax.tree.flatten(one, is_leaf=is_module)
    others, other = jax.tree.flatten(two, is_leaf=is_module)
    if found != other:
        return ""
    for a, b in zip(leaves, others, strict=True):
        if is_module(a) and is_module(b) and jax.tree.structure(a) != jax.tree.structure(b):
            kinds = [type(a).__name__, type(b).__name__]
            what = f"two {kinds[0]}s" if kinds[0] == kinds[1] else f"{kinds[0]} and {kinds[1]}"
            found = differences(a, b)
            more = f"; and {len(found) - 3} more differences" if len(found) > 3 else ""
            return f"{what} differ in {'; '.join(found[:3])}{more}"
    return ""


def differences(one: Module, two: Module) -> list[str]:
    """What makes two Modules different trees: attributes with both values, Modules, and weights.

    Example:
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> differences(nn.Linear(2, 3, "float32", DeviceRef.CPU()), nn.Linear(2, 3, "bfloat16", DeviceRef.CPU()))
        ['dtype of weight: float32 and bfloat16']
    """
    found = list(_of_weights(one, two))
    walks = Walk(one, stacked=True), Walk(two, stacked=True)
    mine, others = (dict(zip(w.prefixes, w.modules, strict=True)) for w in walks)
    for prefix, module in mine.items():
        other, name = others.get(prefix), prefix.rstrip(".") or "the model"
        if other is None:
            found.append(f"{name}, which only the first has")
        elif type(module) is not type(other):
            found.append(f"{name}: {type(module).__name__} and {type(other).__name__}")
        else:
            found += _of_attributes(prefix, module, other)
    found += [f"{p.rstrip('.')}, which only the second has" for p in others if p not in mine]
    same = jax.tree.structure(one) == jax.tree.structure(two)
    return found if found or same else ["hooks or captures that were active when they were made"]


def _of_weights(one: Any, two: Any) -> Iterator[str]:
    tables = [
        dict(zip(d.names, d.weights, strict=True))
        for d in (one._mx_definition()[0], two._mx_definition()[0])
    ]
    groups: dict[str, list[str]] = {}
    for name in {**tables[0], **tables[1]}:
        first, second = (table.get(name) for table in tables)
        if first is None or second is None:
            groups.setdefault(
                f"that only the {'first' if second is None else 'second'} has", []
            ).append(name)
            continue
        for what, a, b in _unequal_parts(first.spec, second.spec):
            groups.setdefault(
                f"{what} of \0: {short(repr(a), 60)} and {short(repr(b), 60)}", []
            ).append(name)
    for text, names in groups.items():
        whose = some(names, 1).replace(" more", f" more weight{'s' * (len(names) > 2)}")
        yield text.replace("\0", whose) if "\0" in text else f"{whose}, {text}"


# The words for attributes of a WeightSpec whose names are not clear here.
_WORDS = {
    "kind": "class", "sizes": "shape", "encoding": "quantization", "align": "alignment", "spans": "stacking",
    "split": "split of the layers", "shard_idx": "shard",
}  # fmt: skip


def _unequal_parts(a: WeightSpec, b: WeightSpec) -> Iterator[tuple[str, Any, Any]]:
    if bool(a.spans) != bool(b.spans):
        x, y = ("StackedWeight" if one.spans else "Weight" for one in (a, b))
        yield "stacking", x, y
        return
    compared = [field.name for field in dataclasses.fields(WeightSpec) if field.compare]
    for name in ("sizes" if name == "dims" else name for name in compared):
        x, y = getattr(a, name), getattr(b, name)
        if x != y:
            yield _WORDS.get(name, name.replace("_", " ")), x, y


def _of_attributes(prefix: str, one: Any, two: Any) -> Iterator[str]:
    for name in sorted({**one._mx_statics, **two._mx_statics}):
        keys = one._mx_statics.get(name), two._mx_statics.get(name)
        if keys[0] != keys[1] and name not in one._mx_unread:
            yield from _of_values(prefix + name, vars(one).get(name), vars(two).get(name))
    if one._mx_shared != two._mx_shared:
        tied = [some(sorted(module._mx_shared)) or "none" for module in (one, two)]
        yield f"the tied weights of {prefix.rstrip('.') or 'the model'}: {tied[0]} and {tied[1]}"


def _of_values(path: str, one: Any, two: Any) -> Iterator[str]:
    """Names the parts in which two values of an attribute differ."""
    if type(one) is type(two) and (dataclasses.is_dataclass(one) or isinstance(one, dict)):
        held = [dict(v) if isinstance(v, dict) else fields_of(v) for v in (one, two)]
        for name in {**held[0], **held[1]}:
            pair = [part.get(name) for part in held]
            if name not in unread_fields(type(one)) and pair[0] != pair[1]:
                yield from _of_values(f"{path}.{name}", *pair)
    else:
        yield f"{path}: {short(repr(one), 60)} and {short(repr(two), 60)}"
