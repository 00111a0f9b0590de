"""State dicts: reading and loading a Module's weights by full name.

Loading sets either all weights or none, in three steps: it matches every value with its weight and
collects all problems; it reads and converts all values; it stores them.
``load/fit.py`` decides which values are accepted, and whether a value fits its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ...errors import CheckpointMismatchError, closest, releasing
from ...graph.shape import Shape
from ...graph.weight.stacked import StackedWeight, by_stack
from ...graph.weight.weight import Weight, outside_traces
from ...graph.weights import FileWeights
from ...graph.weights.same import same_content
from ...progress import reading, task
from .load.fit import Fit, bytes_to_read, fit
from .load.memory import check_room
from .load.stacks import plan, read


class LoadResult(NamedTuple):
    """The names that a load with ``strict=False`` did not match.

    Attributes:
        missing: names of weights that were not in the state dict.
        unexpected: keys of the state dict that match no weight.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class StateDict:
    """The state-dict methods of Module."""

    def _mx_names(self) -> tuple[dict[str, Weight], dict[str, str]]:
        raise NotImplementedError

    def raw_state_dict(self) -> dict[str, Weight]:
        """The Weight objects below this Module by full name, breadth first.

        Tied weights appear once, under their owner's name.

        Raises:
            ValueError: two weights have the same full name.
        """
        return dict(self._mx_names()[0])

    def __contains__(self, name: object) -> bool:
        """Whether a weight below this Module has the full name, as flax's ``TrainState`` asks of gradients.

        A Module that can be iterated over, or indexed, also contains its items.
        """
        if isinstance(name, str) and name in self._mx_names()[0]:
            return True
        kind: Any = type(self)
        has_items = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
        return has_items and name in iter(cast("Iterable[Any]", self))

    def state_dict(self, auto_initialize: bool = True) -> dict[str, Any]:
        """The values of all weights below this Module by full name, breadth first.

        Args:
            auto_initialize: whether to fill weights without a value with zeros, with their device
                or sharding. The weights keep these zeros.

        Raises:
            ValueError: a weight has no value, and ``auto_initialize`` is false, the weight has symbolic
                dimensions, whose sizes are unknown, or ``maxjax.partition`` put its value in the other half.
        """
        values = {}
        for name, weight in self.raw_state_dict().items():
            if weight.is_lazy and weight.source is not None:
                weight.read()
            if weight.is_lazy:
                if not auto_initialize:
                    advice = "was not initialized: load a state dict, or call maxjax.init()"
                    raise ValueError(weight.no_value(name, advice))
                with outside_traces(weight.leaf):
                    weight.put(_zeros(name, weight))
            weight.finalise(name)
            with outside_traces(weight.leaf):
                values[name] = weight.to_file(weight.stored_value())
        return values

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | FileWeights,
        *,
        override_quantization_encoding: bool = False,
        weight_alignment: int | None = None,
        strict: bool = True,
        cast: bool = False,
    ) -> LoadResult:
        """Loads the values of the weights of this Module, in place. If there is an error, no weight is changed.

        Args:
            state_dict: map from full names to arrays (NumPy, JAX, or any that support DLPack), WeightData
                or positions of a Weights cursor; or a Weights cursor, whose tensors are read from disk
                in parallel. NumPy arrays are copied.
            override_quantization_encoding: whether the encoding of the data replaces the weight's.
            weight_alignment: alignment in bytes that is required of every value and recorded in
                its weight; None means each weight's own alignment.
            strict: whether missing weights and unexpected keys are errors.
            cast: whether to convert between float dtypes, and between integer dtypes if the values fit.
                Otherwise dtypes must be equal.

        Returns:
            The missing names and the unexpected keys; both are empty if ``strict``.

        Raises:
            ValueError: values do not match the weights; the message lists all mismatches. For a
                Weights cursor it is a CheckpointMismatchError, which names the file.
            TypeError: ``state_dict`` is not a mapping.
            OutOfMemoryError: the devices or the host do not have enough memory for the values.

        Example:
            >>> import numpy as np
            >>> from maxjax import nn
            >>> model = nn.LayerNorm(3, devices=[None], dtype="float32", use_bias=False)
            >>> model.load_state_dict({"wieght": np.ones(3, np.float32)})
            Traceback (most recent call last):
            ...
            ValueError: ... Missing required weights: weight; For 'weight', did you mean 'wieght'?; ...
        """
        if not hasattr(state_dict, "keys"):
            raise TypeError(
                "load_state_dict() takes a mapping of names to arrays, such as load_weights(path) or "
                f"model.state_dict(), not {type(state_dict).__name__}"
            )
        weights, aliases = self._mx_names()
        source = (
            dict(state_dict._named_data()) if isinstance(state_dict, FileWeights) else state_dict
        )
        match = _Match(weights, source, aliases)
        options = {
            "override": override_quantization_encoding,
            "alignment": weight_alignment,
            "cast": cast,
        }
        fits: list[Fit] = []
        problems = list(match.problems)
        for name, value in match.values.items():
            found = fit(name, weights[name], value, **options)
            if isinstance(found, str):
                problems.append(found)
            else:
                fits.append(found)
        if strict and (match.missing or match.unexpected):
            problems.append(match.verdict())
        stacks, single, unequal = plan(fits)
        if problems or unequal:
            raise _error([*problems, *unequal], state_dict)
        check_room(self, fits)
        with releasing(), task("loading weights", reads=True):
            reading(bytes_to_read(fits))
            _load(fits, single, stacks)
        return LoadResult(match.missing, match.unexpected)


class _Match:
    """The matching of values with weights, and what remains unmatched on either side."""

    def __init__(
        self, weights: Mapping[str, Weight], source: Mapping[str, Any], aliases: Mapping[str, str]
    ):
        self.keys = list(source.keys())
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        used = set()
        other_names: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            other_names.setdefault(name, []).append(alias)
        for name in weights:
            keys = (name, *other_names.get(name, ()))
            # Each value is asked for once: a mapping may read or compute it.
            given = {key: _data(value) for key in keys if (value := source.get(key)) is not None}
            if not given:
                continue
            used.update(given)
            first, *others = given
            self.values[name] = given[first]
            for other in others:
                if not same_content(given[first], given[other]):
                    self.problems.append(
                        f"'{first}' and '{other}' are one tied weight, but their values differ"
                    )
        self.missing = tuple(name for name in weights if name not in self.values)
        self.unexpected = tuple(key for key in self.keys if key not in used)

    def verdict(self) -> str:
        """The error message of a strict load, in MAX's wording."""
        parts = []
        if self.missing:
            missing = sorted(self.missing)
            parts.append(f"Missing required weights: {', '.join(missing)}")
            parts += self._suggestion(missing)
        if self.unexpected:
            parts.append(
                f"Unexpected keys in state_dict: {', '.join(sorted(map(str, self.unexpected)))}"
            )
        return f"load_state_dict() strict=True validation failed. {'; '.join(parts)}"

    def _suggestion(self, missing: list[str]) -> list[str]:
        """A key that was probably meant for a missing weight; MAX looks only at the first missing name."""
        for name in missing:
            if name in self.unexpected:
                return [f"The value of '{name}' is None"]
            if like := closest(name, map(str, self.unexpected)):
                return [f"For '{name}', did you mean '{like}'?"]
        like = closest(missing[0], map(str, self.keys))
        return [f"For '{missing[0]}', did you mean '{like}'?"] if like else []


def _data(value: Any) -> Any:
    """The data at a position of a Weights cursor, as in ``weights.items()``; other values are returned unchanged."""
    return value._lazy_data() if isinstance(value, FileWeights) else value


def _error(problems: list[str], state_dict: Any) -> ValueError:
    text = (
        problems[0] if len(problems) == 1 else f"{len(problems)} problems: " + " | ".join(problems)
    )
    if isinstance(state_dict, FileWeights):
        return CheckpointMismatchError(text, path=state_dict._path)
    return ValueError(text)


def _zeros(name: str, weight: Weight) -> jax.Array:
    leaf = weight.leaf
    if leaf is None:
        advice = (
            f"of shape {weight.shape!r} cannot be filled with zeros: "
            "its symbolic dimensions have no size before a value is loaded"
        )
        raise ValueError(weight.no_value(name, advice))
    return jnp.zeros(leaf.shape, leaf.dtype, device=weight.spec.leaf_sharding)


def _load(
    fits: list[Fit], single: list[Fit], stacks: Sequence[tuple[StackedWeight, list[Fit]]]
) -> None:
    """Reads and converts all values, then stores them."""
    with jax.ensure_compile_time_eval():  # the arrays belong to no trace that is running
        arrays, stacked = read(single, stacks)
        pairs = zip((one.weight for one in single), arrays, strict=True)
        for holder, leaves in by_stack(pairs):  # one update for each stack
            if isinstance(holder, StackedWeight):
                holder.put_many(leaves)
            else:
                holder.put(leaves[0])
    for one in fits:
        _store(one)
    for (stack, _), array in zip(stacks, stacked, strict=True):
        stack.put(array)


def _store(one: Fit) -> None:
    """Updates the declaration of the weight from its value."""
    weight = one.weight
    weight.change(dtype=one.dtype, dims=one.dims, encoding=one.encoding, align=one.align)
    if one.original is not None:
        weight.original_dtype_and_shape = one.original
    weight.loaded_shape, weight.source = one.loaded_shape, None
    weight.finalise(one.name)
    if one.loaded_shape is not None and weight.spec.form is None:
        one.value.shape = Shape(one.dims)  # as in MAX: the metadata describes the loaded weight
