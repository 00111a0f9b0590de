"""Matches a checkpoint with an nnx module: finds the tensors of each Variable, and all differences.

Matching uses names, shapes and dtypes only, before any value is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from ...dtype import DType
from ...errors import CheckpointMismatchError, UserInputError, closest, some
from ...graph.weights import WeightData
from ...graph.weights.same import same_content
from ..layouts import AxisLayout
from ..renaming import Function, Renaming, Route
from .filling import Filling
from .variables import TargetVariable

# Maximum number of differences of each kind in a message; the error's `diff` has all of them.
_SHOWN = 10
# Maximum number of names that are searched for a similar one.
_COMPARED = 1000


class Different(NamedTuple):
    """A tensor that does not fit its Variable.

    Attributes:
        name: path of the Variable.
        tensor: name of the tensor in the checkpoint.
        expected, found: expected and found shape in the file, or dtype.
    """

    name: str
    tensor: str
    expected: Any
    found: Any


class Diff(NamedTuple):
    """All differences between a checkpoint and a module.

    Attributes:
        missing: paths of Variables for which the checkpoint has no tensor.
        unexpected: names of tensors that belong to no Variable.
        shapes, dtypes: tensors whose shape or dtype differs.
        others: other reasons, as text.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[Different, ...]
    dtypes: tuple[Different, ...]
    others: tuple[str, ...]


def _path_of(name: str) -> str:
    """The path of a Variable from the name of its array in an ``nnx.State`` that orbax wrote.

    Example:
        >>> _path_of("blocks.0.kernel.value")
        'blocks.0.kernel'
    """
    return name.removesuffix(".value")


class Matching:
    """Finds the tensors of each Variable, and all differences.

    Args:
        targets: Variables by path.
        renaming: renaming table.
        data: tensors by name.
        cast: whether dtypes may differ.
        kept: paths of the state of random number generators, whose tensors are ignored.

    Attributes:
        fillings: Variables with their tensors.
        diff: all differences.
    """

    def __init__(
        self,
        targets: Mapping[str, TargetVariable],
        renaming: Renaming,
        data: Mapping[str, WeightData],
        cast: bool,
        kept: Set[str] = frozenset(),
    ):
        self._kept = kept
        self._targets, self._renaming, self._cast = targets, renaming, cast
        self._paths = {name: target for target in targets.values() for name in target.names}
        self._shapes: list[Different] = []
        self._dtypes: list[Different] = []
        self._others: list[str] = []
        # By Variable: index of the layer (0 if layers are not stacked) → (tensor's name, its data, route).
        self._given: dict[str, dict[int, tuple[str, WeightData, Route]]] = {}
        unexpected = [name for name, value in data.items() if not self._take(name, value)]
        missing = [
            name for name, one in targets.items() if one.is_needed and name not in self._given
        ]
        self.fillings = [one for name in self._given if (one := self._filling(name)) is not None]
        self.diff = Diff(
            tuple(missing), tuple(unexpected), tuple(self._shapes), tuple(self._dtypes),
            tuple(self._others),
        )  # fmt: skip

    def _take(self, name: str, value: WeightData) -> bool:
        """Assigns a tensor to its Variables; False if there is none."""
        routes = self._renaming.routes(name)
        taken = not routes
        for route in routes:
            target = self._paths.get(route.target) or self._paths.get(_path_of(route.target))
            taken = taken or target is not None or _path_of(route.target) in self._kept
            if target is None:
                continue
            layers = self._given.setdefault(target.name, {})
            other = layers.setdefault(route.index or 0, (name, value, route))
            if other[0] != name and not _agree(other, (name, value, route)):
                self._others.append(f"'{other[0]}' and '{name}' are both for '{target.name}', "
                                    "but differ")  # fmt: skip
        return taken

    def _filling(self, name: str) -> Filling | None:
        target, given = self._targets[name], self._given[name]
        tensor, _, route = given[min(given)]
        change: Any = route.change
        if isinstance(change, AxisLayout):
            bound = change.of(target.shape)
            if bound is None:
                self._others.append(f"'{name}' has {len(target.shape)} axes, and '{change}' gives it "
                                    f"{len(change.axes)}")  # fmt: skip
                return None
            change = bound
        elif change is None and _wants_layout(tensor, target):
            self._others.append(f"'{tensor}' as '{name}': give its layout in the table, 'o i -> i o' for a "
                                "weight as torch stores it, 'i o -> i o' as flax does")  # fmt: skip
            return None
        filling = Filling(target, change)
        for number in self._numbers(target, change, given):
            one = given.get(number)
            if one is None:
                continue
            value = self._fitting(target, change, one[0], one[1])
            if value is not None:
                filling.sources.append((one[0], value))
        return filling

    def _numbers(self, target: TargetVariable, change: Any, given: Mapping[int, Any]) -> list[int]:
        axis = getattr(getattr(change, "layout", None), "stacks", None)
        if axis is None:
            return [0]
        numbers = list(range(target.shape[axis]))
        lacking = [number for number in numbers if number not in given]
        beyond = [given[number][0] for number in sorted(given) if number not in numbers]
        if lacking:
            self._others.append(f"'{target.name}' has {len(numbers)} layers, and there is no tensor for "
                                f"layers {some(lacking, _SHOWN)}")  # fmt: skip
        if beyond:
            self._others.append(f"'{target.name}' has {len(numbers)} layers, and there are tensors for "
                                f"more: {some(beyond, _SHOWN)}")  # fmt: skip
        return numbers

    def _fitting(
        self, target: TargetVariable, change: Any, tensor: str, value: WeightData
    ) -> WeightData | None:
        """The data, cast lazily to the Variable's dtype if needed; None if it does not fit."""
        dtype = DType.of(target.dtype)
        packed = value.is_packed and dtype.is_float()
        sizes = tuple(int(size) for size in (value.logical_shape if packed else value.shape))
        if not isinstance(change, Function):
            expected = target.shape if change is None else change.file_shape
            if sizes != expected:
                self._shapes.append(Different(target.name, tensor, expected, sizes))
                return None
        if value.dtype is dtype or isinstance(change, Function) and self._cast:
            return value
        same_kind = value.dtype.is_float() and dtype.is_float() or packed
        integers = value.dtype.is_integral() and dtype.is_integral()
        if not (self._cast and (same_kind or integers)):
            found = value.quantization_encoding if packed else value.dtype
            self._dtypes.append(Different(target.name, tensor, str(dtype), str(found)))
            return None
        return value.astype(dtype) if same_kind else value

    # -- the error

    def is_refused(self, strict: bool) -> bool:
        """Whether the differences are an error."""
        diff = self.diff
        unmatched = diff.missing or diff.unexpected
        return bool(diff.shapes or diff.dtypes or diff.others or (strict and unmatched))

    def error(self, path: str | None, strict: bool) -> CheckpointMismatchError:
        """Makes one error for all differences."""
        diff = self.diff
        groups = []
        if strict and diff.missing:
            groups.append(
                f"{len(diff.missing)} missing: {some(diff.missing, _SHOWN, self._missing)}"
            )
        if strict and diff.unexpected:
            listed = some(diff.unexpected, _SHOWN, "'{}'".format)
            groups.append(f"{len(diff.unexpected)} unexpected: {listed}")
        if diff.shapes:
            listed = some(diff.shapes, _SHOWN, self._differing)
            groups.append(f"{len(diff.shapes)} of another shape: {listed}")
        if diff.dtypes:
            listed = some(diff.dtypes, _SHOWN, self._differing)
            groups.append(f"{len(diff.dtypes)} of another dtype: {listed}")
        groups += [f"also: {some(diff.others, _SHOWN)}"] if diff.others else []
        problem = f"the checkpoint does not fit the module: {'; '.join(groups)}"
        error = CheckpointMismatchError(problem, path=path, hint=self._hint())
        error.diff = diff  # type: ignore[attr-defined]
        return error

    def _hint(self) -> str:
        hint = "Nothing was changed."
        if self.diff.dtypes and not self._cast:
            hint += " cast=True converts floats, and dequantises quantised weights."
        if any(sorted(one.expected) == sorted(one.found) for one in self.diff.shapes):
            hint += (
                " Sizes agree in another order: a layout in the table ('o i -> i o') transposes."
            )
        return hint

    def _missing(self, name: str) -> str:
        try:
            origin = self._renaming.origin(name).name
        except UserInputError:
            origin = name
        left = self.diff.unexpected[:_COMPARED]
        by_mapped_name = {self._mapped_name(tensor): tensor for tensor in left}
        like = closest(origin, left) or by_mapped_name.get(closest(name, by_mapped_name) or "")
        text = f"'{name}'" if origin == name else f"'{name}' (from '{origin}')"
        return text if like is None else f"{text} (is it '{like}'?)"

    def _mapped_name(self, tensor: str) -> str:
        """The name in the module to which the table maps an unexpected tensor."""
        routes = self._renaming.routes(tensor)
        return routes[0].target if routes else tensor

    @staticmethod
    def _differing(one: Different) -> str:
        expected, found = (
            list(v) if isinstance(v, tuple) else v for v in (one.expected, one.found)
        )
        name = f"'{one.name}'" + ("" if one.tensor == one.name else f" (from '{one.tensor}')")
        return f"{name} is {found} and must be {expected}"


def _agree(one: tuple[str, WeightData, Route], other: tuple[str, WeightData, Route]) -> bool:
    """Whether two tensors for the same array have equal contents and conversions."""
    return one[2].change == other[2].change and same_content(one[1], other[1])


def _wants_layout(tensor: str, target: TargetVariable) -> bool:
    """Whether a `weight` would become a `kernel` without a layout.

    Flax stores kernels transposed to torch's weights, and for a square weight the shape does not show the
    difference.
    """
    last = tensor.rpartition(".")[2]
    return last == "weight" and target.name.rpartition(".")[2] == "kernel"
