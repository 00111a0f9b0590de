"""Captures: the captured values of one run, as a mapping by full names and a pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from ....errors import UserInputError, closest, some
from .patches import types_of
from .places import Place, has_wildcard, label_of, match, natural, split
from .plans import Key, Taps


class CaptureKeyError(UserInputError, KeyError):
    """Nothing was captured under this name."""

    __str__ = Exception.__str__  # KeyError's shows the message as a literal


class ByName(Mapping[str, Any]):
    """A mapping from names to arrays."""

    # Compared by identity, because arrays do not compare to a single bool.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


@jax.tree_util.register_pytree_with_keys_class
class Captures(ByName):
    """The captured values, by the full name of each place: ``captures["layers.3.mlp"]``.

    A key may omit the beginning of a name (``"layers.3"`` for ``model.layers.3``) and have the
    wildcards of a pattern: ``captures["layers.*.mlp"]`` is one array ``[L, ...]`` of all captured
    layers, in their order. If a shared layer runs n times in a call of the model, the value is a
    tuple of n values.

    It is a pytree, so that jitted functions can return it, and so can functions under ``jax.grad`` with
    ``has_aux``, ``vmap`` and ``scan``; axes that these add precede the axis of layers. The values of a stack
    are one array of all its layers, of which ``captures["layers.3.mlp"]`` is a slice.

    Raises:
        KeyError: nothing was captured under a key (the error is a UserInputError too); the message suggests
            the nearest name.
        UserInputError: a key matches the values of several layers, which differ in shape.

    Example:
        >>> import jax, jax.numpy as jnp, maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> run = maxjax.captured(lambda m, ids: m(ids), "layers.*", "layers.1.self_attn:weights")
        >>> logits, found = jax.jit(run)(model, jnp.ones((2, 5), jnp.int32))
        >>> found
        Captures:
          model.layers.{0..2}                float32[3,2,5,8]
          model.layers.1.self_attn:weights   float32[2,2,5,5]
        >>> found["layers.2"].shape, found["layers.*"].shape
        ((2, 5, 8), (3, 2, 5, 8))
    """

    def __init__(self, entries: Taps):
        self.entries = entries
        # The number of axes of each array in the value of one layer, when it was captured.
        self._ranks = {
            key: tuple(jnp.ndim(leaf) - bool(key.layers) for leaf in jax.tree.leaves(runs))
            for key, runs in entries.items()
        }

    @classmethod
    def of(cls, taps: Taps, level: int) -> Captures:
        """Return the values that were recorded for the plan of that level."""
        return cls(
            {k._replace(level=0): runs for k, runs in taps.items() if runs and k.level == level}
        )

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        children = [(jax.tree_util.DictKey(key.label), runs) for key, runs in self.entries.items()]
        return children, tuple(self._ranks.items())

    @classmethod
    def tree_unflatten(cls, ranks: Any, children: Sequence[Any]) -> Captures:
        made = object.__new__(cls)
        made._ranks = dict(ranks)
        made.entries = dict(zip(made._ranks, children, strict=True))
        return made

    @cached_property
    def _places(self) -> dict[Place, tuple[Key, int]]:
        """For each place, the key of its values, and the index of its layer in them."""
        return {
            (name, key.site): (key, row)
            for key in self.entries
            for row, name in enumerate(key.names)
        }

    def __iter__(self) -> Iterator[str]:
        places = sorted(self._places, key=lambda place: (natural(place[0]), label_of(*place)))
        return (label_of(*place) for place in places)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self._match(key))

    def __getitem__(self, key: str) -> Any:
        found = self._match(key)
        if not found:
            like = closest(key, self)
            hint = f" (did you mean '{like}'?)" if like else ""
            there = f"; there are {some(list(self), 6)}" if self else "; nothing was captured"
            raise CaptureKeyError(f"nothing was captured under '{key}'{hint}{there}")
        if has_wildcard(split(key)[0]):
            return self._stacked(key, found)
        if len(found) > 1:
            labels = some([label_of(*place) for place in found], 4)
            raise CaptureKeyError(
                f"'{key}' is the end of several names: {labels}. Write one of them, or a pattern"
            )
        return self._value(found[0])

    def _match(self, key: str) -> list[Place]:
        name, site = split(key)
        names = [n for n, s in self._places if s == site]
        return [(one, site) for one in sorted(match(name, names), key=natural)]

    def _ranks_of(self, key: Key) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self.entries[key]), self._ranks[key])

    def _value(self, place: Place) -> Any:
        key, row = self._places[place]
        runs = self.entries[key]
        if key.layers:
            own = lambda array, rank: _applied(partial(_row, row, len(key.layers), rank), array)
            runs = jax.tree.map(own, runs, self._ranks_of(key))
        return _single(runs)

    def _stacked(self, label: str, found: list[Place]) -> Any:
        """Return the values of several places as one tree of arrays, stacked along a new axis."""
        key = self._places[found[0]][0]
        if len(key.layers) == len(found) and all(self._places[one][0] == key for one in found):
            return _single(self.entries[key])
        values = [self._value(place) for place in found]
        kinds = {types_of(value): place for value, place in zip(values, found, strict=True)}
        if len(kinds) > 1:
            each = some([f"{label_of(*place)} {kind}" for kind, place in kinds.items()], 3)
            raise UserInputError(
                f"the values under '{label}' differ, and cannot be stacked into one array: {each}"
            )

        def stacked(rank: int, *arrays: Any) -> Any:
            axis = max(arrays[0].ndim - rank, 0)  # behind the axes that transformations have added
            return _applied(lambda *rows: jnp.stack(rows, axis), *arrays)

        return jax.tree.map(stacked, _single(self._ranks_of(key)), *values)

    def __repr__(self) -> str:
        rows = []
        for key, runs in self.entries.items():
            order = natural(label_of(key.names[0], key.site))
            rows.append((order, key.label or "(the model)", types_of(_single(runs))))
        if not rows:
            return "Captures: nothing"
        width = max(len(label) for _, label, _ in rows)
        lines = (f"  {label:{width}}   {kind}" for _, label, kind in sorted(rows))
        return "\n".join(["Captures:", *lines])


def _single(runs: Any) -> Any:
    """Return the value of a Module that ran once, or a tuple with the value of each run."""
    return runs[0] if isinstance(runs, tuple) and len(runs) == 1 else runs


def _row(row: int, count: int, rank: int, array: jax.Array) -> jax.Array:
    """Return a layer's part of an array of all layers; the value of one layer had so many axes when it was captured.

    Transformations add axes in front of that of the layers; what was reduced since took axes behind it.
    """
    axis = max(array.ndim - 1 - rank, 0)
    if array.ndim <= axis or array.shape[axis] != count:
        raise UserInputError(
            "the captured arrays no longer have their axis of layers: take the layer before you reduce them"
        )
    return jax.lax.index_in_dim(array, row, axis, keepdims=False)


def _applied(function: Callable[..., Any], *arrays: Any) -> Any:
    """Return the result of a function for arrays, or for placeholders, which ``jax.eval_shape`` returns."""
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in arrays):
        return jax.eval_shape(function, *arrays)
    return function(*arrays)
