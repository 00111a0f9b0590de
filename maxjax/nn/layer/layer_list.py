"""LayerList, a list of Modules, and LayerTuple, Sequential and MissingLayer.

Children are attributes "0", "1", …, so that names in state dicts are ``layers.3.weight``; every
change of the list renumbers them. A list of Modules that is assigned to a Module becomes a LayerList,
and a tuple a LayerTuple; both support the usual list and tuple operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, overload

from ...graph.weight.epoch import structure_changed
from ...graph.weight.weight import Weight
from ...rendering.rendered import summary
from .contents import MIXED, holds_items
from .hooks import Layer
from .module import Module
from .static import freeze
from .watched import AssignedList

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    L = TypeVar("L", default=Any)

    class _Of(Generic[L]):
        """A container of layers of one type."""

else:
    L = Any

    class _Of:
        """``LayerList[Block]`` is for type checkers; at run time it is LayerList itself."""

        def __class_getitem__(cls, kind: Any) -> type:
            return cls


# The classes of items of a list that holds data instead of layers.
_DATA = (bool, int, float, str)


class LayerList(Module, _Of[L], stands_for=list):
    """A list of layers whose weights are named by their position.

    Args:
        layers: iterable of Modules. Items may also be legacy Layers and None, which have no weights;
            lists and tuples of Modules, which become LayerLists and LayerTuples; or shards of a Weight.

    A call runs the layers one after the other: the first is called with all arguments, each later one with
    the result of the layer before. Slices and sums are plain lists, and a LayerList equals a plain list
    of the same objects. A list of Modules, or an empty list, becomes a LayerList when it is assigned to
    an attribute of a Module. Numbers and strings can be appended to an empty one, which then holds only these.

    Raises:
        TypeError: an item is not a layer.

    Example:
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> layers = nn.LayerList(nn.Linear(2, 2, "float32", DeviceRef.CPU()) for _ in range(2))
        >>> layers.append(nn.Linear(2, 3, "float32", DeviceRef.CPU()))
        >>> list(layers.raw_state_dict())
        ['0.weight', '1.weight', '2.weight']
    """

    # The type of slices and sums, and of sequences that may be equal to this one.
    _plain_type: type = list
    # The class that ``stack`` creates: the one subclass defined with ``is_stack=True``.
    _stack_type: type[Any]

    def __init_subclass__(cls, is_stack: bool = False, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if is_stack:
            LayerList._stack_type = cls

    def __init__(self, layers: Iterable[L] = ()):
        super().__init__()
        self._renew([self._item(layer) for layer in layers])

    @property
    def layers(self) -> list[L]:
        """The layers as a plain list (a new one each time)."""
        return [vars(self)[str(i)] for i in range(len(self))]

    @property
    def sublayers(self) -> Mapping[str, Module]:
        """The Modules by position.

        Raises:
            ValueError: the list holds a Layer that is not a Module, as in MAX.
        """
        if any(not isinstance(layer, (Module, Weight)) for layer in self.layers):
            raise ValueError("Not all layers in this Sequential object have been migrated to V2.")
        return super().sublayers

    def _renew(self, layers: list[Any]) -> None:
        """Replaces the content by ``layers``, registered under 0, 1, …."""
        if self._mx_in_stack:
            raise TypeError(self._mx_refusal("layers"))
        is_data = all(type(layer) in _DATA for layer in layers)
        layers = layers if is_data else [self._item(layer) for layer in layers]
        for name in [name for name in vars(self) if name.isdigit()]:
            self._forget(name)
            del vars(self)[name]
        others = dict(self._mx_children)
        self._mx_children.clear()
        shards = dict(self._mx_shards)
        for i, layer in enumerate(layers):
            vars(self)[str(i)] = layer
            if isinstance(layer, Module):
                self._mx_children[str(i)] = layer
            elif isinstance(layer, Weight):
                shards[str(i)] = layer
            else:
                key = freeze(layer, type(self).__name__)[1] if is_data else (type(layer), layer)
                self._mx_statics[str(i)] = key
        self._mx_children.update(others)
        if shards or self._mx_shards:
            vars(self)["_mx_shards"] = shards
        structure_changed()

    def _item(self, layer: Any) -> Any:
        """The item that represents ``layer``: itself, or a LayerList for a list."""
        if type(layer) in self._mx_containers and holds_items(layer) is not False:
            made = self._mx_containers[type(layer)](layer)
            AssignedList.watch("", layer, made)
            return made
        if layer is None or isinstance(layer, Layer):
            return layer
        if isinstance(layer, Weight) and layer.shard_idx is not None:
            return layer
        raise TypeError(f"{type(self).__name__} holds layers, not {type(layer).__name__}{MIXED}; "
                        "assign a list of plain data as a whole, for example module.sizes = [1, 2]")  # fmt: skip

    def stack(self, *, period: int | None = None, first: int = 0) -> Any:
        """Returns a new LayerStack of these layers, which compiles one body for all of them.

        The layers keep their names and become views of the stack. LayerStack describes the
        arguments, and which layers can be stacked.

        Raises:
            ValueError: the layers differ in more than values; the message names the difference.
            TypeError: the list has items that are not Modules, or attributes besides its items.
        """
        names = {*self._mx_children, *self._mx_locals, *self._mx_statics}
        if more := sorted(name for name in names if not name.isdecimal()):
            raise TypeError(f"this {type(self).__name__} holds more than layers ({', '.join(more)}): put the layers "
                            "into a LayerList of their own and stack that")  # fmt: skip
        return self._stack_type(self.layers, period=period, first=first, list_class=type(self))

    def append(self, layer: Layer) -> None:
        """Adds a layer at the end."""
        self._renew([*self.layers, layer])

    def insert(self, i: int, layer: Layer) -> None:
        """Inserts a layer before position ``i``; the layers after it are renumbered."""
        layers: list[Any] = self.layers
        layers.insert(i, layer)
        self._renew(layers)

    def extend(self, layers: Iterable[Layer] | Layer) -> None:
        """Adds several layers, or one, at the end."""
        more = (
            [layers]
            if isinstance(layers, Layer) and not isinstance(layers, LayerList)
            else list(layers)
        )
        self._renew([*self.layers, *more])

    def pop(self, i: int = -1) -> Any:
        """Removes a layer and returns it."""
        layers = self.layers
        layer = layers.pop(i)
        self._renew(layers)
        return layer

    def remove(self, layer: Layer) -> None:
        """Removes a layer.

        Raises:
            ValueError: the layer is not in the list.
        """
        self.pop(self.index(layer))

    def clear(self) -> None:
        """Removes all layers."""
        self._renew([])

    def reverse(self) -> None:
        """Reverses the order; the layers are renumbered."""
        self._renew(self.layers[::-1])

    def index(self, layer: object) -> int:
        """The position of a layer.

        Raises:
            ValueError: the layer is not in the list.
        """
        for i, one in enumerate(self.layers):
            if _equal(one, layer):
                return i
        raise ValueError(f"the layer is not in this {type(self).__name__}")

    def count(self, layer: object) -> int:
        """The number of times a layer is in the list."""
        return sum(_equal(one, layer) for one in self.layers)

    def __add__(self, other: Any) -> Any:
        plain = self._plain_type
        if not isinstance(other, (plain, LayerList)):
            return NotImplemented
        return plain(self.layers) + plain(other)

    def __radd__(self, other: Any) -> Any:
        plain = self._plain_type
        return other + plain(self.layers) if isinstance(other, plain) else NotImplemented

    def __iadd__(self, layers: Iterable[Layer]) -> LayerList:
        self.extend(layers)
        return self

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(other) is self._plain_type and self._plain_type(self.layers) == other

    __hash__ = Module.__hash__

    def __setitem__(self, i: int | slice, layer: Any) -> None:
        layers = self.layers
        layers[i] = layer
        self._renew(layers)

    def __delitem__(self, i: int | slice) -> None:
        layers = self.layers
        del layers[i]
        self._renew(layers)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.isdigit():
            super().__setattr__(name, value)
        elif name in vars(self):
            super().__setattr__(name, self._item(value))
        elif name == str(len(self)):
            self._renew([*self.layers, value])
        else:
            raise IndexError(
                f"{type(self).__name__}[{name}]: the next layer of a list of {len(self)} is {len(self)}"
            )

    def __delattr__(self, name: str) -> None:
        if name.isdigit() and name in vars(self):
            del self[int(name)]
        else:
            super().__delattr__(name)

    def _ipython_key_completions_(self) -> list[int]:
        return list(range(len(self)))

    @overload
    def __getitem__(self, i: int) -> L: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[L]: ...
    def __getitem__(self, i: int | slice) -> Any:
        found = self.layers[i]
        return self._plain_type(found) if isinstance(i, slice) else found

    def __len__(self) -> int:
        return sum(name.isdigit() for name in vars(self))

    def __iter__(self) -> Iterator[L]:
        return iter(self.layers)

    def __contains__(self, layer: object) -> bool:
        return any(_equal(one, layer) for one in self.layers)

    def __str__(self) -> str:
        layers: list[Any] = self.layers
        return f"[{', '.join(repr(x) if type(x) in _DATA else summary(x) for x in layers)}]"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layers in order.

        Raises:
            IndexError: the list is empty.
        """
        layers: list[Any] = self.layers
        return in_turn(layers, args, kwargs)


Sequence.register(LayerList)  # type: ignore[attr-defined]


def _equal(one: Any, other: Any) -> bool:
    """Whether two items are the same layer, or equal data."""
    return one is other or (type(one) in _DATA and one == other)


def in_turn(layers: list[Callable[..., Any]], args: tuple, kwargs: dict) -> Any:
    """Runs layers one after the other: the first on the arguments, each later one on the last result."""
    outputs = layers[0](*args, **kwargs)
    for layer in layers[1:]:
        outputs = layer(outputs)
    return outputs


class LayerTuple(LayerList, stands_for=tuple):
    """An immutable LayerList; a tuple of Modules becomes one when it is assigned to a Module.

    Raises:
        TypeError: an operation would change the items.
    """

    _plain_type = tuple

    def __init__(self, layers: Iterable[Any] = ()):
        Module.__init__(self)
        super()._renew(list(layers))

    def _renew(self, layers: list[Any]) -> None:
        raise TypeError("a tuple of Modules cannot be changed: assign a new tuple, or use a list")


class Sequential(LayerList):
    """A LayerList that is meant to be called: it runs its layers one after the other."""


class MissingLayer(Module):
    """A placeholder in a LayerList for a layer that another process holds. It has no weights.

    Args:
        layer_id: name or index of the layer, for the message of the RuntimeError that a call raises.
    """

    def __init__(self, layer_id: Any):
        super().__init__()
        self.layer_id = layer_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises a RuntimeError: the layer is not in this process."""
        raise RuntimeError(f"layer {self.layer_id} is missing in this process and cannot be called")
