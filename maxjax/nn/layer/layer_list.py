"""Floor 4. LayerList: the one container of Modules. Sequential: a LayerList by another name.

Children are attributes "0", "1", …, so that state dicts say ``layers.3.weight``; every
change of the list renumbers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ...graph.weight import structure_changed
from .hooks import Layer
from .module import Module

# Set by the file of LayerStack, which is a LayerList.
stacker: Callable[..., Any] | None = None


class LayerList(Module):
    """A list of layers whose weights are named by their position.

    Args:
        layers: Any iterable of Modules (or of legacy Layers and None, which have no weights).

    Calling it runs the layers one after the other: the first gets all arguments, each
    other one what the one before returned. A slice gives a plain list.

    Raises:
        TypeError: Something in it is not a layer.

    Example:
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> layers = nn.LayerList(nn.Linear(2, 2, "float32", DeviceRef.CPU()) for _ in range(2))
        >>> layers.append(nn.Linear(2, 3, "float32", DeviceRef.CPU()))
        >>> list(layers.raw_state_dict())
        ['0.weight', '1.weight', '2.weight']
    """

    def __init__(self, layers: Iterable[Layer | None] = ()):
        super().__init__()
        self._renew(list(layers))

    @property
    def layers(self) -> list[Any]:
        """The layers as a plain list (a new one each time)."""
        return [vars(self)[str(i)] for i in range(len(self))]

    @property
    def sublayers(self) -> Mapping[str, Module]:
        """The Modules by position.

        Raises:
            ValueError: The list holds a Layer that is not a Module, as in MAX.
        """
        if any(not isinstance(layer, Module) for layer in self.layers):
            raise ValueError("Not all layers in this Sequential object have been migrated to V2.")
        return super().sublayers

    def _renew(self, layers: list[Any]) -> None:
        """Registers ``layers`` under 0, 1, … in the place of what was there."""
        for layer in layers:
            if layer is not None and not isinstance(layer, Layer):
                raise TypeError(f"{type(self).__name__} holds layers, not {type(layer).__name__}")
        for name in [name for name in vars(self) if name.isdigit()]:
            self._forget(name)
            del vars(self)[name]
        others = dict(self._mx_children)
        self._mx_children.clear()
        for i, layer in enumerate(layers):
            vars(self)[str(i)] = layer
            if isinstance(layer, Module):
                self._mx_children[str(i)] = layer
            else:
                self._mx_statics[str(i)] = (type(layer), layer)
        self._mx_children.update(others)
        structure_changed()

    def stack(self, *, period: int | None = None, first: int = 0) -> Any:
        """A LayerStack of these layers: one body for all, compiled once.

        The layers keep their names and become views of it. See LayerStack for the
        arguments and for what may be stacked.

        Raises:
            ValueError: The layers differ; the message says in what.
            TypeError: The list holds more than layers.
        """
        assert stacker is not None
        held = {*self._mx_children, *self._mx_locals, *self._mx_statics}
        if more := sorted(name for name in held if not name.isdecimal()):
            raise TypeError(f"this {type(self).__name__} holds more than layers ({', '.join(more)}): put the layers "
                            "into a LayerList of their own and stack that")  # fmt: skip
        return stacker(self.layers, period=period, first=first, list_class=type(self))

    def append(self, layer: Layer) -> None:
        """Adds a layer at the end."""
        self._renew([*self.layers, layer])

    def insert(self, i: int, layer: Layer) -> None:
        """Puts a layer before position ``i``; those behind it are renumbered."""
        layers = self.layers
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
        """Takes a layer out and returns it."""
        layers = self.layers
        layer = layers.pop(i)
        self._renew(layers)
        return layer

    def __setitem__(self, i: int | slice, layer: Any) -> None:
        layers = self.layers
        layers[i] = layer
        self._renew(layers)

    def __delitem__(self, i: int | slice) -> None:
        layers = self.layers
        del layers[i]
        self._renew(layers)

    def __getitem__(self, i: int | slice) -> Any:
        return self.layers[i]

    def __len__(self) -> int:
        return sum(name.isdigit() for name in vars(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __contains__(self, layer: object) -> bool:
        return any(layer is one for one in self.layers)

    def __str__(self) -> str:
        return str(self.layers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layers in order.

        Raises:
            IndexError: The list is empty.
        """
        return in_turn(self.layers, args, kwargs)


def in_turn(layers: list[Callable[..., Any]], args: tuple, kwargs: dict) -> Any:
    """What the last layer gives; the first gets the arguments, each other one what came before."""
    outputs = layers[0](*args, **kwargs)
    for layer in layers[1:]:
        outputs = layer(outputs)
    return outputs


class Sequential(LayerList):
    """A LayerList that is there to be called."""


class MissingLayer(Module):
    """A place in a LayerList for a layer that another process holds. No weights.

    Raises:
        RuntimeError: When called; names the layer.
    """

    def __init__(self, layer_id: Any):
        super().__init__()
        self.layer_id = layer_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses."""
        raise RuntimeError(f"layer {self.layer_id} is missing in this process and cannot be called")
