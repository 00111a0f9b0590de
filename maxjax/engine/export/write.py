"""``maxjax.export``: writes a model's program to one file that runs without the model's classes.

The model's call is traced as a function of flat lists of arrays and serialised by ``jax.export``;
the names of its weights are stored beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...dtype import DType
from ...errors import checked_integer, first_line
from ...graph.kind import to_value
from ...graph.symbolic import naming, sizes_of
from ...graph.tensor_type import TensorType
from ...nn.layer import Module
from ...storage.save.durable import replace_file, writable_path
from ...storage.strict_json import load_json
from .file import MAGIC, PREFIX, ProgramHeader
from .signature import Signature, declared, describe, names_in, weights_of

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    model: Module,
    spec: Any,
    path: str | os.PathLike[str],
    *,
    platforms: Sequence[str] | str | None = None,
    vjp_order: int = 0,
) -> None:
    """Writes a model's program to a file that :func:`maxjax.load_exported` loads.

    The file holds no weights, only their names, shapes and dtypes: values come from a
    checkpoint or a state dict. A process that runs it needs none of the model's classes.

    Static data of an argument (metadata of a dataclass) is fixed by the spec, and constants of the
    model that are not Weights are part of the program.

    Args:
        model: the model, loaded or not; it is not changed.
        spec: shapes and dtypes of the arguments of ``model.__call__``: one spec, or a tuple with
            one for each argument. A spec is a ``jax.ShapeDtypeStruct`` (whose sizes may be
            symbolic ones of ``jax.export``), an array, a TensorType, or a pytree of them. For a
            TensorType, whose sizes may be names, the model gets a TensorValue, else an array. A Module,
            loaded or not, is given to the program as ``model``'s own weights are: by names.
        path: path of the file; an existing file is replaced once the new one is on disk.
        platforms: platforms to run on, of "cpu", "cuda", "rocm" and "tpu"; JAX's default
            backend if not given.
        vjp_order: number of times the program can be differentiated in reverse mode.

    Raises:
        TypeError: ``model`` is not a Module, a leaf of ``spec`` is not a spec, or a key of a dict is
            neither a string nor an integer.
        ValueError: a platform is unknown, ``vjp_order`` is negative, a weight has no known shape, or the
            model has to know more about a named size.
        CheckpointSaveError: the file cannot be written; an existing file is unchanged.
        CheckpointMissingError: the directory does not exist.
        CheckpointAccessError: the file may not be written.

    Example:
        >>> import os, tempfile
        >>> import jax, jax.numpy as jnp
        >>> from maxjax import nn
        >>> from maxjax.engine.export.write import export
        >>> from maxjax.engine.export.program import load_exported
        >>> from maxjax.graph import DeviceRef
        >>> path = os.path.join(tempfile.mkdtemp(), "linear.jaxport")
        >>> model = nn.Linear(3, 2, "float32", DeviceRef.CPU())
        >>> export(model, jax.ShapeDtypeStruct((1, 3), jnp.float32), path, platforms="cpu")
        >>> program = load_exported(path)
        >>> program
        ExportedProgram(Linear(float32[1, 3]) -> float32[1, 2], 1 weight, cpu)
        >>> program({"weight": jnp.ones((2, 3))}, jnp.ones((1, 3))).shape
        (1, 2)
    """
    if not isinstance(model, Module):
        raise TypeError(f"export() takes a Module, not {type(model).__name__}")
    vjp_order = checked_integer("vjp_order", vjp_order, 0)
    path = writable_path(path)
    chosen = _platforms(platforms)
    model, specs = _as_types((model, spec if type(spec) is tuple else (spec,)))
    weights, types = weights_of(model)
    flat: list[Any] = []
    arguments = describe(specs, flat)
    for held, leaves in [(weights, types), *Signature(arguments, ()).models(flat)]:
        for names, leaf in zip(held.leaves, leaves, strict=True):
            _require_type(names_in(names)[0], leaf)
    with _without_paths():
        program, results = _trace((model, *specs), types, flat, chosen)
        blob = bytes(program.serialize(vjp_order=vjp_order))
    inputs = tuple(map(declared, flat, program.in_avals[len(types) :]))
    outputs = tuple(str(aval.dtype) for aval in program.out_avals)
    # Read from sys.modules: the package is always loaded, and this file must not import it.
    version = sys.modules[__name__.partition(".")[0]].__version__
    header = ProgramHeader(
        type(model).__name__, version, jax.__version__, vjp_order, weights,
        Signature(arguments, inputs), Signature(results, outputs),
        len(blob), hashlib.sha256(blob).hexdigest(),
    )  # fmt: skip
    _write(path, header, blob)


def _as_types(tree: Any) -> Any:
    """Models without their values, and as on one device, because files have no mesh; other leaves as they are."""

    def typed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf

    def without_values(value: Any) -> Any:
        if not isinstance(value, Module):
            return value
        free = jax.tree.map(typed, value)
        if any(holder.sharding is not None for holder in free._mx_definition()[1]):
            free.to(jax.devices()[0])
        return free

    return jax.tree.map(without_values, tree, is_leaf=lambda value: isinstance(value, Module))


def _platforms(names: Sequence[str] | str | None) -> tuple[str, ...]:
    from jax import export as jax_export  # takes a while to import

    if names is None:
        return (jax_export.default_export_platform(),)
    found = [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if not found or any(not isinstance(name, str) or name not in PLATFORMS for name in found):
        raise ValueError(f"platforms must be among {', '.join(PLATFORMS)}, not {found}")
    return tuple(dict.fromkeys(found))


# --- the program ----------------------------------------------------------------------------


def _require_type(name: str, leaf: Any) -> None:
    if not hasattr(leaf, "shape"):
        raise ValueError(
            f"weight '{name}' has no shape: its dimensions are symbolic, or it is not an array"
        )
    try:
        DType.of(leaf.dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"weight '{name}': {error}") from None


def _trace(
    called: tuple[Any, ...], weights: Sequence[Any], flat: Sequence[Any], platforms: Sequence[str]
) -> tuple[Any, Any]:
    """The ``jax.export.Exported`` of a model's call, and the tree of its results.

    Args:
        called: the model, and the specs of its arguments.
        weights, flat: types of the arrays that the program takes for them.
    """
    from jax import export as jax_export

    kinds, tree = jax.tree.flatten(called)
    trees = []

    def run(weights: list[Any], leaves: list[Any]) -> list[Any]:
        given = [_as_leaf(*both) for both in zip([*weights, *leaves], kinds, strict=True)]
        module, *args = jax.tree.unflatten(tree, given)
        results: list[Any] = []
        trees.append(describe(module(*args), results))
        return [jnp.asarray(result) for result in results]

    run.__name__ = type(called[0]).__name__
    with naming(_sizes(flat)):
        types = [_type_of_spec(i, kind) for i, kind in enumerate(flat)]
        try:
            exported = jax_export.export(jax.jit(run), platforms=platforms)(list(weights), types)
        except jax.errors.InconclusiveDimensionOperation as error:
            raise ValueError(
                f"{run.__name__} has to know more about a size than its name: {first_line(error)} Give "
                'the size a limit, as in jax.export.symbolic_shape("batch, n", constraints=["n <= 512"])'
            ) from error
    return exported, trees[-1]


def _sizes(flat: Sequence[Any]) -> dict[str, Any]:
    """The named sizes of all specs as symbolic sizes of one scope."""
    from jax import export as jax_export

    plain = [spec for spec in flat if not isinstance(spec, TensorType)]
    given = [size for spec in plain for size in getattr(spec, "shape", ())]
    given = [size for size in given if jax_export.is_symbolic_dim(size)]
    known = {str(size): size for size in given}
    names = {str(p) for spec in flat if isinstance(spec, TensorType) for p in spec.parameters}
    with naming(known):
        return {**sizes_of(names - set(known)), **known}


def _as_leaf(array: Any, kind: Any) -> Any:
    """An array of the program as a leaf of what is called: a TensorValue, or a stack of stacks."""
    if isinstance(kind, TensorType):
        return to_value(array)
    return array if array.ndim == len(kind.shape) else array.reshape(kind.shape)


def _type_of_spec(i: int, spec: Any) -> jax.ShapeDtypeStruct:
    if isinstance(spec, TensorType):
        return spec.to_jax()
    if not isinstance(spec, (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic)):
        raise TypeError(
            f"leaf {i} of spec must be a ShapeDtypeStruct, an array or a TensorType, "
            f"not {type(spec).__name__}"
        )
    extended = jnp.issubdtype(spec.dtype, jax.dtypes.extended)  # random keys
    dtype = spec.dtype if extended else jax.dtypes.canonicalize_dtype(spec.dtype)
    return jax.ShapeDtypeStruct(spec.shape, dtype)


_LOCATIONS = "jax_traceback_in_locations_limit"
_lock = threading.RLock()


@contextlib.contextmanager
def _without_paths() -> Iterator[None]:
    """Keeps JAX from writing file names into a program, so that equal models make equal files."""
    with _lock:  # the option is global to the process, and is restored afterwards
        before = getattr(jax.config, _LOCATIONS)
        jax.config.update(_LOCATIONS, 0)
        try:
            yield
        finally:
            jax.config.update(_LOCATIONS, before)


# --- writing --------------------------------------------------------------------------------


def _write(path: str, header: ProgramHeader, program: bytes) -> None:
    """Writes the file atomically and flushes it to the disk."""
    text = json.dumps(header.json(), separators=(",", ":")).encode()
    # A tree too deep to be read back fails here, not when the file is needed.
    ProgramHeader.read(load_json(text, name=path))
    replace_file(
        path, (PREFIX.pack(MAGIC, len(text), hashlib.sha256(text).digest()), text, program)
    )
