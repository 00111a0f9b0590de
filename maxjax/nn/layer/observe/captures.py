"""Captures: the captured values of one run, as a mapping by full names and a pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ....errors import UserInputError, closest, some
from .frames import StackedValues, Taps, concrete, label_of, of_layer, types_of
from .places import Place, has_wildcard, match, natural, split


class CaptureKeyError(UserInputError, KeyError):
    """Nothing was captured under this name."""

    __str__ = Exception.__str__  # KeyError's shows the message as a literal


@jax.tree_util.register_pytree_with_keys_class
class Captures(Mapping[str, Any]):
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

    def __init__(self, values: Mapping[Place, tuple[Any, ...]], ranks: Any = None):
        # Keys are (name, site); the name of a stack's layers has their pattern. Values have one entry for each run.
        self._values = dict(values)
        self._ranks = ranks or {
            place: tuple(jnp.ndim(leaf) for leaf in jax.tree.leaves(runs))
            for place, runs in self._values.items()
        }
        self._homes = _homes(self._values)

    @classmethod
    def of(cls, taps: Taps, level: int) -> Captures:
        """The values that were recorded for the plan of that level."""
        found = {
            (name, site): tuple(values)
            for (own, name, site, what), values in taps.items()
            if own == level and what == "value"
        }
        return cls(found)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        keys = list(self._values)
        children = [(jax.tree_util.DictKey(label_of(*key)), self._values[key]) for key in keys]
        return children, (tuple(keys), tuple(self._ranks[key] for key in keys))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> Captures:
        made = object.__new__(cls)
        made._values = dict(zip(aux[0], children, strict=True))
        made._ranks = dict(zip(aux[0], aux[1], strict=True))
        made._homes = _homes(made._values)
        return made

    @property
    def entries(self) -> Mapping[Place, tuple[Any, ...]]:
        """The values of each run by (name, site); the layers of a stack are one entry, a StackedValues."""
        return self._values

    @property
    def places(self) -> set[Place]:
        """The (name, site) of each captured value."""
        return set(self._homes)

    # -- the mapping

    # Compared by identity, because arrays do not compare to a single bool.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __iter__(self) -> Iterator[str]:
        places = sorted(self._homes, key=lambda place: (natural(place[0]), label_of(*place)))
        return (label_of(*place) for place in places)

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self._match(key))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __getitem__(self, key: str) -> Any:
        found = self._match(key)
        if not found:
            like = closest(key, self)
            hint = f" (did you mean '{like}'?)" if like else ""
            there = (
                f"; there are {some(list(self), 6)}" if self._homes else "; nothing was captured"
            )
            raise CaptureKeyError(f"nothing was captured under '{key}'{hint}{there}")
        if not has_wildcard(split(key)[0]):
            if len(found) > 1:
                labels = some([label_of(*place) for place in found], 4)
                raise CaptureKeyError(
                    f"'{key}' is the end of several names: {labels}. Write one of them, or a pattern"
                )
            return self._value(found[0])
        return self._all(key, found)

    def _match(self, key: str) -> list[Place]:
        name, site = split(key)
        names = [n for n, s in self._homes if s == site]
        return [(one, site) for one in sorted(match(name, names), key=natural)]

    def _value(self, place: Place) -> Any:
        home, found = self._homes[place]
        runs = self._values[home]
        if found is not None:
            row: int = found
            leaves, tree = jax.tree.flatten(tuple(run.tree for run in runs))
            ranks, count = self._ranks[home], len(runs[0].numbers)
            runs = jax.tree.unflatten(
                tree,
                [
                    _applied(partial(_row_of, row, count, rank), a)
                    for a, rank in zip(leaves, ranks, strict=True)
                ],
            )
        return runs[0] if len(runs) == 1 else runs

    def _all(self, key: str, found: list[Place]) -> Any:
        """The values of several places as one tree of arrays, stacked along a new axis."""
        homes = {self._homes[place][0] for place in found}
        if len(homes) == 1:
            (home,) = homes
            runs = self._values[home]
            if isinstance(runs[0], StackedValues) and len(runs[0].numbers) == len(found):
                trees = tuple(run.tree for run in runs)
                return trees[0] if len(trees) == 1 else trees
        values = [self._value(place) for place in found]
        kinds = {types_of(value): place for value, place in zip(values, found, strict=True)}
        if len(kinds) > 1:
            each = some([f"{label_of(*place)} {kind}" for kind, place in kinds.items()], 3)
            raise UserInputError(
                f"the values under '{key}' differ, and cannot be stacked into one array: {each}"
            )
        home, row = self._homes[found[0]]
        ranks = iter(self._ranks[home])
        own = 0 if row is None else 1  # a slice does not have the axis of layers
        return jax.tree.map(
            lambda *a: _applied(_stacked(max(a[0].ndim - (next(ranks) - own), 0)), *a), *values
        )

    def __repr__(self) -> str:
        rows = []
        for (name, site), runs in self._values.items():
            first = concrete(name)
            if _is_stacked(runs):
                first = of_layer(name, runs[0].numbers[0])
                name = of_layer(name, _ranges(runs[0].numbers))
                one = len(runs[0].numbers) == 1
                runs = tuple(run.tree for run in runs)
                runs = jax.tree.map(_without_first, runs) if one else runs
            single = isinstance(runs, tuple) and len(runs) == 1
            rows.append(
                (
                    natural(label_of(first, site)),
                    label_of(name, site) or "(the model)",
                    types_of(runs[0] if single else runs),
                )
            )
        if not rows:
            return "Captures: nothing"
        rows = [row[1:] for row in sorted(rows, key=lambda row: row[0])]
        width = max(len(label) for label, _ in rows)
        return "\n".join(["Captures:", *(f"  {label:{width}}   {kind}" for label, kind in rows)])


def _homes(values: Mapping[Place, Any]) -> dict[Place, tuple[Place, int | None]]:
    """For each place, the key of the entry with its values, and its row there if the entry has several layers."""
    found: dict[Place, tuple[Place, int | None]] = {}
    for place, runs in values.items():
        name, site = place
        if not _is_stacked(runs):
            found[concrete(name), site] = place, None
            continue
        for row, number in enumerate(runs[0].numbers):
            found[of_layer(name, number), site] = place, row
    return found


def _is_stacked(runs: Any) -> bool:
    # Trees of a transformation's arguments, such as out_axes, may have any leaves.
    return isinstance(runs, tuple) and bool(runs) and isinstance(runs[0], StackedValues)


def _row_of(row: int, count: int, rank: int, array: jax.Array) -> jax.Array:
    """A layer's part of an array of all layers, which had so many axes when it was captured.

    Transformations add axes in front of that of the layers; what was reduced since took axes behind it.
    """
    axis = max(array.ndim - rank, 0)
    if array.ndim <= axis or array.shape[axis] != count:
        raise UserInputError(
            "the captured arrays no longer have their axis of layers: take the layer before you reduce them"
        )
    return jax.lax.index_in_dim(array, row, axis, keepdims=False)


def _stacked(axis: int) -> Callable[..., Any]:
    return lambda *arrays: jnp.stack(arrays, axis=axis)


def _applied(function: Callable[..., Any], *arrays: Any) -> Any:
    """The result of a function for arrays, or for placeholders, which ``jax.eval_shape`` returns."""
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in arrays):
        return jax.eval_shape(function, *arrays)
    return function(*arrays)


def _without_first(array: Any) -> Any:
    """The shape and dtype of an array without its first axis, for rendering."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        return array
    return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as text: ``{0..29}``, or ``{1, 3}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{', '.join(map(str, numbers))}}}"
