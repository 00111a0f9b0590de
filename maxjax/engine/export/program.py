"""Loaded exported programs: functions of weights by name and of the model's arguments."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ...errors import CheckpointMismatchError, UserInputError, printable
from ...graph import compile_cache
from ...paths import local_path
from ...rendering.row import counted, short
from ...storage.limits import Limits, in_force
from .arguments import Arguments, Binder, ModelArrays, Path
from .file import ProgramHeader, open_program, unreadable


def load_exported(
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> ExportedProgram:
    """Loads the program in a file that :func:`maxjax.export` wrote.

    Checksums detect any damage to the file, but not who wrote it: a program can do whatever
    compiled code can, so load only files that you trust.

    Args:
        path: path of the file.
        limits: limits for reading the file; None for those in force.

    Raises:
        CheckpointError: the file does not exist, is damaged, has another format version, or is not
            an exported program; the class says which.
        CheckpointMismatchError: this version of JAX cannot run the program.

    Example:
        >>> load_exported("no/such/model.jaxport")
        Traceback (most recent call last):
        maxjax.errors.CheckpointMissingError: no/such/model.jaxport: no such file. Check the path.
    """
    compile_cache.enable()
    name = local_path(path)
    return ExportedProgram(*open_program(name, in_force(limits)), name)


class ExportedProgram:
    """An exported model: a function of weights by name and of the model's arguments.

    :func:`maxjax.load_exported` returns it. It is compiled once for each set of shapes. It works
    under ``jax.jit``, and under ``jax.grad`` as many times as it was exported for (``vjp_order``).

    Attributes:
        name: class name of the model.
        names: names of the weights, as in checkpoints.
        weights: shapes and dtypes of the weights by name, each a ``jax.ShapeDtypeStruct``.
        inputs, outputs: shapes and dtypes of the arguments and of the result, in plain containers.
        platforms: platforms that it runs on.
        vjp_order: number of times it can be differentiated in reverse mode.

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

    def __init__(self, header: ProgramHeader, exported: Any, path: str):
        count = len(header.weights.leaves)
        types, arguments = exported.in_avals[:count], exported.in_avals[count:]
        self.name, self.names = header.name, list(header.weights.weights)
        self.platforms, self.vjp_order = tuple(exported.platforms), header.vjp_order
        self._binder = Binder(header.weights, types)
        self.weights = self._binder.types
        self.inputs = header.inputs.restore(map(_type, arguments))
        self.outputs = header.outputs.restore(map(_type, exported.out_avals))
        takes = header.inputs.show(arguments)[1:-1].rstrip(",")
        self._shown = (
            f"{short(takes, 300)}) -> {short(header.outputs.show(exported.out_avals), 300)}"
        )
        self._header, self._path = header, path
        self._arguments = Arguments(header.name, header.inputs, arguments)
        self._run = jax.jit(exported.call)
        self._dtypes = [aval.dtype for aval in exported.in_avals]
        self._last: tuple[Any, list[Callable[[], Any]], list[Any]] | None = None

    def bind(self, arrays: ModelArrays) -> BoundProgram:
        """Binds weights to the program: puts them on the device, stacked where the program needs it.

        Args:
            arrays: arrays by name, such as ``Module.state_dict()``, NumPy arrays, WeightData or
                anything else that ``Module.load_state_dict`` takes; a cursor of ``load_weights``; or
                a Module. A tied weight may have any of its names. Other names are ignored.

        Raises:
            ValueError: weights are missing, or have another shape or dtype; the message lists
                all of them. For a cursor it is a CheckpointMismatchError, which names the file.
        """
        return BoundProgram(self, self._values(arrays))

    def __call__(self, arrays: ModelArrays, *args: Any) -> Any:
        """Binds ``arrays`` and runs; the last binding is used again for the same arrays.

        Arrays are the same if they are the same objects: after writing to a NumPy array in place,
        call :meth:`bind` again.

        Raises:
            ValueError: as for :meth:`bind` and :class:`BoundProgram`.
        """
        at, found = self._binder.identity(arrays)
        last = self._last
        if last is not None and last[0] == at:
            if all(ref() is value for ref, value in zip(last[1], found, strict=True)):
                return self._execute(last[2], args)
        values = self._values(arrays)
        if not any(isinstance(value, Tracer) for value in values):
            self._last = at, [_reference(value) for value in found], values
        return self._execute(values, args)

    def _values(self, arrays: ModelArrays) -> list[Any]:
        compile_cache.enable()
        for dtype in self._dtypes:
            if isinstance(dtype, np.dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype:
                raise ValueError(
                    f"{self.name} was exported with jax_enable_x64, for {dtype}: set jax_enable_x64 here too"
                )
        return self._binder.values(arrays, f"the exported {self.name}")

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
        """A clearer error for one that JAX raises when it lowers or compiles the program, or None."""
        platform = _platform_of(values)
        if platform not in self.platforms:
            platforms = ", ".join(repr(name) for name in (*self.platforms, platform))
            return CheckpointMismatchError(
                "the program was exported for another platform than it is run on",
                path=self._path, expected=" or ".join(self.platforms), found=platform,
                hint=f"Export it with platforms=({platforms}).",
            )  # fmt: skip
        said = str(error)
        if "StableHLO" in said or "Cannot lower" in said or isinstance(error, KeyError):
            return unreadable(self._header, self._path)
        if said.startswith(("UNKNOWN", "INVALID_ARGUMENT")):  # XLA does not accept the program
            return unreadable(self._header, self._path)
        if "refining shapes" in said:
            return UserInputError(f"{self.name}: sizes break the constraints it was exported with")
        return None

    def __repr__(self) -> str:
        count = counted(len(self.names), "weight")
        where = ", ".join(self.platforms)
        return printable(f"{type(self).__name__}({self.name}({self._shown}, {count}, {where})")


class BoundProgram:
    """An exported program with its weights, called with the arguments alone.

    Attributes:
        program: the ExportedProgram.
    """

    def __init__(self, program: ExportedProgram, values: list[Any]):
        self.program, self._values = program, values

    def __call__(self, *args: Any) -> Any:
        """Runs the program.

        Args:
            args: the model's arguments: NumPy or JAX arrays or TensorValues, in the same
                containers. A dict of its fields may stand for an instance of a registered class,
                and a tuple for a namedtuple; for a Module, what :meth:`ExportedProgram.bind` takes.

        Returns:
            The model's result, with plain arrays for TensorValues, tuples for namedtuples, and
            dicts of their fields for instances of other registered classes; of a Module, its state dict.

        Raises:
            ValueError: the arguments have another structure, shape or dtype.
            CheckpointMismatchError: the program was exported for other platforms.
        """
        return self.program._execute(self._values, args)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.program!r})"


def _type(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference if possible: a program keeps the bound values, not the arrays given to it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _platform_of(values: Sequence[Any]) -> str:
    """The platform on which a program with these weights runs, by its name in jax.export."""
    from jax import export as jax_export

    default = jax_export.default_export_platform()
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    placed = [value for value in values if not isinstance(value, Tracer)]
    if placed:
        chosen = next(iter(placed[0].devices()))
    platform = default if chosen is None else getattr(chosen, "platform", chosen)
    return default if platform == "gpu" and default != "cpu" else platform
