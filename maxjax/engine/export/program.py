"""Exported programs, loaded: functions of any weights of the right names."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...errors import CheckpointError, CheckpointMismatchError, closest
from ...graph import compile_cache
from ...graph.device import DeviceRef
from ...graph.value import TensorValue, unwrap
from ...graph.weight.stacked import Span, StackedWeight
from ...graph.weight.weight import Weight
from ...graph.weights import WeightData, Weights
from ...graph.weights.same import same_content
from ...nn.layer.load.fit import Fit, fit, is_lazy
from ...nn.layer.load.stacks import StackLoad, read
from ...storage.limits import Limits, in_force
from .file import Entry, Header, names_in, open_program, unreadable
from .signature import Arguments, Path, cut


def load_exported(
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> ExportedProgram:
    """The program in a file that :func:`maxjax.export` wrote.

    The file is checked to be what was written, byte by byte. That says nothing of who wrote
    it: a program may do whatever compiled code can, so run those you trust.

    Raises:
        CheckpointError: There is no such file, or it is damaged, of a later version, or not of
            this kind; the class says which.
        CheckpointMismatchError: This version of JAX cannot run it.

    Example:
        >>> load_exported("no/such/model.jaxport")
        Traceback (most recent call last):
        maxjax.errors.CheckpointMissingError: no/such/model.jaxport: no such file
    """
    compile_cache.enable()
    return ExportedProgram(*open_program(os.fsdecode(path), in_force(limits)), os.fsdecode(path))


class ExportedProgram:
    """What a model computes, without the model: a function of weights by name and arguments.

    Made by :func:`maxjax.load_exported`. It is compiled once for each set of shapes, and
    works under ``jax.jit`` and, as often as it was exported for (``vjp_order``), ``jax.grad``.

    Attributes:
        name: The class of the model.
        names: Of the weights, as checkpoints have them.
        weights: Their types by name, each a ``jax.ShapeDtypeStruct``.
        inputs, outputs: The types of the arguments and of the result, in plain containers.
        platforms: Where it runs.
        vjp_order: How often it can be differentiated in reverse mode.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> from maxjax import nn
        >>> from maxjax.engine.export.write import export
        >>> from maxjax.engine.export.program import load_exported
        >>> from maxjax.graph import DeviceRef, TensorType
        >>> path = os.path.join(tempfile.mkdtemp(), "linear.jaxport")
        >>> model = nn.Linear(3, 2, "float32", DeviceRef.CPU(), has_bias=True)
        >>> export(model, TensorType("float32", ["batch", 3], DeviceRef.CPU()), path)
        >>> program = load_exported(path)
        >>> program.names, program.inputs
        (['weight', 'bias'], (ShapeDtypeStruct(shape=(batch, 3), dtype=float32),))
        >>> bound = program.bind({"weight": jnp.ones((2, 3)), "bias": jnp.ones(2)})
        >>> bound(jnp.ones((1, 3))).shape, bound(jnp.ones((5, 3))).shape
        ((1, 2), (5, 2))
    """

    def __init__(self, header: Header, exported: Any, path: str):
        count = len(header.leaves)
        self._types, arguments = exported.in_avals[:count], exported.in_avals[count:]
        self.name, self.names = header.name, list(header.weights)
        self.platforms, self.vjp_order = tuple(exported.platforms), header.vjp_order
        self.weights = {
            name: jax.ShapeDtypeStruct(aval.shape[not isinstance(leaf, str) :], aval.dtype)
            for leaf, aval in zip(header.leaves, self._types, strict=True)
            for name in names_in(leaf)
        }
        self.inputs = header.inputs.restore(map(_type, arguments))
        self.outputs = header.outputs.restore(map(_type, exported.out_avals))
        takes = header.inputs.show(arguments)[1:-1].rstrip(",")
        self._shown = f"{cut(takes)}) -> {cut(header.outputs.show(exported.out_avals))}"
        self._header, self._path = header, path
        self._arguments = Arguments(header.name, header.inputs, arguments)
        self._run = jax.jit(exported.call)
        self._known = [n for name, e in header.weights.items() for n in (name, *e.aliases)]
        self._last: tuple[Any, list[Callable[[], Any]], list[Any]] | None = None

    def bind(self, arrays: Mapping[str, Any] | Weights) -> BoundProgram:
        """The program with its weights, on the device and stacked where it takes them so.

        Args:
            arrays: By name what ``Module.state_dict()`` gives, or NumPy arrays, WeightData or
                whatever else ``Module.load_state_dict`` takes; or a cursor of ``load_weights``.
                Of a tied weight any of its names will do. Other names are ignored.

        Raises:
            ValueError: Weights are missing, or have another shape or dtype; the message lists
                all of them. For a cursor it is a CheckpointMismatchError, which names the file.
        """
        return BoundProgram(self, self._values(arrays))

    def __call__(self, arrays: Mapping[str, Any] | Weights, *args: Any) -> Any:
        """Binds ``arrays`` and runs; what was bound last is used again for the same arrays.

        The same are those that are the same objects: bind anew a NumPy array that was written
        to in place.

        Raises:
            ValueError: As for :meth:`bind` and :class:`BoundProgram`.
        """
        at, found = _identity(arrays, self._known)
        last = self._last
        if last is not None and last[0] == at:
            if all(ref() is value for ref, value in zip(last[1], found, strict=True)):
                return self._execute(last[2], args)
        values = self._values(arrays)
        if not any(isinstance(value, Tracer) for value in values):
            self._last = at, [_reference(value) for value in found], values
        return self._execute(values, args)

    def _values(self, arrays: Mapping[str, Any] | Weights) -> list[Any]:
        """The arrays that the program takes, fitted, read and placed."""
        compile_cache.enable()
        traced = any(isinstance(value, Tracer) for value in _identity(arrays, self._known)[1])
        # Inside a trace of something else, what is no part of it is computed now and only once.
        with contextlib.nullcontext() if traced else jax.ensure_compile_time_eval():
            if not isinstance(arrays, Weights):
                return _place(self._header, self._fits(arrays))
            try:
                return _place(self._header, self._fits(dict(arrays._named_data())))
            except CheckpointError:
                raise
            except ValueError as error:
                raise CheckpointMismatchError(str(error), path=arrays._path) from None

    def _fits(self, source: Mapping[str, Any]) -> dict[str, Fit]:
        """A Fit for each weight; one error about all that have none."""
        fits, missing = {}, []
        problems = _narrowed([k.dtype for k in self._types] + self._arguments.dtypes)
        for name in (name for leaf in self._header.leaves for name in names_in(leaf)):
            entry = self._header.weights[name]
            given = {key: _array(source.get(key)) for key in (name, *entry.aliases)}
            given = {key: value for key, value in given.items() if value is not None}
            if not given:
                missing.append(name)
                continue
            found = _fit(name, entry, self.weights[name], next(iter(given.values())))
            if isinstance(found, Fit):
                fits[name] = found
            else:
                problems.append(found)
            problems += _different(given)
        if missing:
            problems.append(f"Missing required weights: {', '.join(missing)}")
            others = [str(key) for key in source if key not in self._known]
            if like := closest(missing[0], others):
                problems.append(f"For '{missing[0]}', did you mean '{like}'?")
        if problems:
            text = "; ".join(problems)
            raise ValueError(f"the weights do not fit the exported {self.name}: {text}")
        return fits

    def _execute(self, values: list[Any], args: Path) -> Any:
        leaves = self._arguments(args)
        try:
            results = self._run(values, leaves)
        except (ValueError, RuntimeError, KeyError) as error:
            if (explained := self._explain(error, values)) is not None:
                raise explained from error
            raise
        return self._header.outputs.restore(results)

    def _explain(self, error: Exception, values: list[Any]) -> ValueError | None:
        """What JAX says when it lowers or compiles the program, in words of ours."""
        here = _platform_of(values)
        if here not in self.platforms:
            wanted = ", ".join(repr(name) for name in (*self.platforms, here))
            return CheckpointMismatchError(
                "the program was exported for another platform than it is run on",
                path=self._path, expected=" or ".join(self.platforms), found=here,
                hint=f"Export it with platforms=({wanted}).",
            )  # fmt: skip
        if "StableHLO" in str(error):
            return unreadable(self._header, self._path)
        if "refining shapes" in str(error):
            return ValueError(f"{self.name}: sizes break the constraints it was exported with")
        return None

    def __repr__(self) -> str:
        count = f"{len(self.names)} weight{'s' * (len(self.names) != 1)}"
        where = ", ".join(self.platforms)
        return f"{type(self).__name__}({self.name}({self._shown}, {count}, {where})"


class BoundProgram:
    """An exported program with its weights: called with the arguments alone.

    Attributes:
        program: The ExportedProgram.
    """

    def __init__(self, program: ExportedProgram, values: list[Any]):
        self.program, self._values = program, values

    def __call__(self, *args: Any) -> Any:
        """Runs it.

        Args:
            args: As the model takes them: NumPy or JAX arrays or TensorValues, in the same
                containers. For an instance of a registered class a dict of its fields will
                do, and a tuple for a named one.

        Returns:
            What the model returns, with plain arrays for TensorValues, tuples for named ones
            and dicts of their fields for instances of other registered classes.

        Raises:
            ValueError: Arguments of another structure, shape or dtype.
            CheckpointMismatchError: The program was exported for other platforms.
        """
        return self.program._execute(self._values, args)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.program!r})"


def _type(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _platform_of(values: Sequence[Any]) -> str:
    """Where a program with these weights runs, in the words of jax.export."""
    from jax import export as jax_export

    default = jax_export.default_export_platform()
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    placed = [value for value in values if not isinstance(value, Tracer)]
    if placed:
        chosen = next(iter(placed[0].devices()))
    platform = default if chosen is None else getattr(chosen, "platform", chosen)
    return default if platform == "gpu" and default != "cpu" else platform


# --- weights --------------------------------------------------------------------------------


_ABSENT = object()


def _identity(arrays: Any, names: Sequence[str]) -> tuple[Any, list[Any]]:
    """What tells these arrays from others: a place in a checkpoint, and the objects themselves."""
    if isinstance(arrays, Weights):
        return arrays.name, [arrays._family]
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"weights come as a mapping from names to arrays, as model.state_dict(), not {type(arrays).__name__}"
        )
    found = [_array(arrays.get(name)) for name in names]
    return None, [_ABSENT if value is None else value for value in found]


def _array(value: Any) -> Any:
    """What a mapping has under a name, None where it has nothing: a Weight may be unfilled."""
    if isinstance(value, Weight) and value.stored.is_missing:
        return None
    return unwrap(value) if isinstance(value, TensorValue) else value


def _reference(value: Any) -> Callable[[], Any]:
    """Weak where it can be: a program keeps what it made of arrays, and not the arrays."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _narrowed(dtypes: Sequence[Any]) -> list[str]:
    wide = [d for d in dtypes if isinstance(d, np.dtype) and jax.dtypes.canonicalize_dtype(d) != d]
    said = "it was exported with jax_enable_x64, for {}, and JAX runs in 32 bits here"
    return [said.format(wide[0])] if wide else []


def _fit(name: str, entry: Entry, wanted: jax.ShapeDtypeStruct, value: Any) -> Fit | str:
    """As ``load_state_dict`` fits values, but for traced arrays too."""
    dtype, shape = wanted.dtype, wanted.shape
    if isinstance(value, (np.ndarray, np.generic)):
        value = np.asarray(value).astype(value.dtype.newbyteorder("="), copy=False)
    if isinstance(value, (jax.Array, np.ndarray)):
        try:
            value = WeightData(value, name, value.dtype, value.shape)
        except (TypeError, ValueError) as error:
            return f"the value of weight '{name}': {error}"
    weight = Weight(name.rpartition(".")[2], dtype, shape, DeviceRef.CPU())
    # Integers of 64 bits where JAX has 32, if that is what the model declared.
    wide = str(getattr(value, "dtype", "")).rpartition(".")[2] == entry.dtype != str(dtype)
    found = fit(name, weight, value, override=False, alignment=1, cast=wide)
    if isinstance(found, Fit) and tuple(map(int, found.dims)) != shape:  # bytes may be packed
        actual = tuple(map(int, found.dims))
        return f"weight '{name}' had different shape (expected={shape}, actual={actual})"
    return found if isinstance(found, Fit) else found.rstrip(".")


def _different(given: Mapping[str, Any]) -> Iterator[str]:
    """The names of one tied weight whose values are not the same."""
    (owner, first), *others = given.items()
    for key, other in others:
        traced = isinstance(first, Tracer) or isinstance(other, Tracer)
        if first is not other and (traced or not same_content(first, other)):
            yield f"'{owner}' and '{key}' are one tied weight, but their values differ"


def _place(header: Header, fits: Mapping[str, Fit]) -> list[Any]:
    """Reads, converts and places what fits; one array for each leaf."""
    stacked: dict[int, list[Fit]] = {}
    single: list[Fit] = []
    for i, leaf in enumerate(header.leaves):
        group = [fits[name] for name in names_in(leaf)]
        if isinstance(leaf, str) or any(map(_on_device, group)):
            single += group
        else:
            stacked[i] = group
    taken = {id(one.value) for one in single}
    loads = {
        i: StackLoad(StackedWeight(group[0].weight, Span("*", 0, 1, len(group))), group, taken)
        for i, group in stacked.items()
    }
    arrays, stacks = map(iter, read(single, list(loads.values())))
    values = []
    for i, leaf in enumerate(header.leaves):
        if i in loads:
            values.append(next(stacks))
        elif isinstance(leaf, str):
            values.append(next(arrays))
        else:
            values.append(jnp.stack([next(arrays) for _ in leaf]))
    return values


def _on_device(one: Fit) -> bool:
    return not is_lazy(one) and isinstance(getattr(one.value, "data", None), jax.Array)
