"""Adds weights to layers and removes them, also in stacks, and unstacks layers that become unequal.

A single layer of a LayerStack cannot be changed. These functions change the layer that represents all equal
layers; a new weight is stacked like the others, so that no value is copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ....errors import UserInputError
from ....graph.weight.epoch import structure_changed
from ....graph.weight.stacked import StackedWeight, by_stack
from ....graph.weight.weight import Weight
from ..module import Module
from ..static import freeze
from ..walk import Walk


def add_weight(root: Module, layer: Any, attr: str, weight: Weight, beside: Weight) -> None:
    """Assigns a Weight to a layer; in a LayerStack, one for each of the equal layers.

    Args:
        root: Module that contains the layer, and the stack.
        layer: layer; in a stack, the one that represents all equal layers (``Walk(stacked=True)``).
        attr: name of the attribute.
        weight: Weight without a value.
        beside: Weight that the layer has already, which shows whether the layer is in a stack.

    Raises:
        NotImplementedError: the layer is in a stack within a stack.
    """
    home = beside.home
    if home is None:
        setattr(layer, attr, weight)
        return
    if len(home[0].spec.spans) > 1:
        raise NotImplementedError(f"a weight of layers in stacks within stacks: '{beside.name}'")
    stack = _stack_of(root, home[0])
    added = StackedWeight(weight, home[0].spec.spans[0])
    local = weight.spec.local_name
    vars(layer)["_mx_weights"] = {**layer._mx_weights, local: added.view(home[1])}
    vars(layer)["_mx_locals"] = {**layer._mx_locals, attr: local}
    vars(layer)[attr] = layer._mx_weights[local]
    _renew(stack, (*stack._mx_stacks, added))


def add_shared_weight(root: Module, layer: Any, attr: str, weight: Weight, beside: Weight) -> None:
    """Assigns one Weight to a layer; in a LayerStack, the same one to each of the equal layers.

    Args:
        root, layer, attr, beside: as for :func:`add_weight`.
        weight: Weight that other layers may have too.
    """
    if beside.home is None:
        layer.set_shared_weight(attr, weight)
        return
    local = weight.spec.local_name
    vars(layer)["_mx_weights"] = {**layer._mx_weights, local: weight}
    vars(layer)["_mx_locals"] = {**layer._mx_locals, attr: local}
    vars(layer)[attr] = weight
    layer._mx_shared.add(attr)
    stack = _stack_of(root, beside.home[0])
    _renew(stack, stack._mx_stacks)


def remove_weight(root: Module, layer: Any, attr: str) -> None:
    """Removes a Weight from a layer, and from all equal layers if it is in a LayerStack."""
    home = getattr(layer, attr).home
    if home is None:
        delattr(layer, attr)
        return
    stack = _stack_of(root, home[0])
    local = layer._mx_locals[attr]
    for name, key in (("_mx_weights", local), ("_mx_locals", attr)):
        vars(layer)[name] = {k: v for k, v in vars(layer)[name].items() if k != key}
    del vars(layer)[attr]
    _renew(stack, tuple(one for one in stack._mx_stacks if one is not home[0]))


def set_static(layer: Any, attr: str, value: Any) -> None:
    """Sets a static attribute of a layer; in a stack, that of the layer that represents all equal layers.

    None removes the attribute, so that the value of the class applies.
    """
    statics = {k: v for k, v in layer._mx_statics.items() if k != attr}
    vars(layer).pop(attr, None)
    if value is not None:
        value, statics[attr] = freeze(value, f"{type(layer).__name__}.{attr}")
        vars(layer)[attr] = value
    vars(layer)["_mx_statics"] = statics
    structure_changed()


def _stack_of(root: Module, holder: StackedWeight) -> Any:
    """The LayerStack that has a StackedWeight."""
    for module in Walk(root, stacked=True).modules:
        if any(one is holder for one in module._mx_stacks):
            return module
    raise UserInputError("the layer is one of a LayerStack that is not in this model")


def _renew(stack: Any, stacks: tuple[StackedWeight, ...]) -> None:
    # The other layers are copies of the representing layer, and are made again on demand.
    vars(stack).update(_mx_stacks=stacks, _mx_made={})
    structure_changed()


def unstack_unequal(model: Any, kinds: Mapping[str, Hashable]) -> Any:
    """The model with LayerLists instead of the stacks whose layers would become unequal.

    Args:
        model: Module, which is changed in place unless it is such a stack itself.
        kinds: kind of each weight, by full name; a stack is unstacked if its weights have different kinds.
    """
    while unequal := _unequal(model, kinds):
        if model._mx_is_stack:
            return model.unstack()
        for _, module in list(model.named_modules()):
            for attr, child in list(module._mx_children.items()):
                # The outermost stack, which holds the arrays.
                own = (id(stack) for stack in child._mx_stacks if stack.home is None)
                if child._mx_is_stack and not unequal.isdisjoint(own):
                    setattr(module, attr, child.unstack())
    return model


def _unequal(model: Any, kinds: Mapping[str, Hashable]) -> set[int]:
    """ids of the StackedWeights whose Weights have different kinds."""
    weights = model.raw_state_dict().items()
    found = by_stack((weight, kinds.get(name)) for name, weight in weights)
    return {id(holder) for holder, of in found if len(set(of.values())) > 1}
