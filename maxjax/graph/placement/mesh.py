"""Meshes: grids of devices whose axes have the names that strategies use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import jax
import numpy as np

from ...errors import UserInputError, some

# Names of axes in other libraries → names in maxjax.
ALIASES = {
    "dp": "data", "batch": "data", "tp": "model", "tensor": "model", "mp": "model",
    "ep": "expert", "sp": "seq", "cp": "seq", "context": "seq",
}  # fmt: skip
AXES = ("data", "fsdp", "expert", "seq", "model")
# Kinds of axes that split weights: strategies of tensors over the first, those of experts over both.
TENSOR, EXPERTS = ("model",), ("expert", "model")


def axis_name(name: str) -> str:
    """The name in maxjax of a mesh axis.

    Example:
        >>> axis_name("tp"), axis_name("data"), axis_name("mine")
        ('model', 'data', 'mine')
    """
    return ALIASES.get(name, name)


def axis_of(mesh: Any, kind: str) -> str | None:
    """The mesh's name for a kind of axis, or None: ``model`` may be called ``tp``, or be the only axis of any name.

    Example:
        >>> import maxjax
        >>> axis_of(maxjax.make_mesh(tp=1), "model"), axis_of(maxjax.make_mesh(tp=1), "data")
        ('model', None)
    """
    names = mesh.axis_names
    if kind in names:
        return kind
    if kind == "model" and len(names) == 1 and axis_name(names[0]) not in AXES:
        return names[0]
    return next((name for name in names if axis_name(name) == axis_name(kind)), None)


def axes_of(mesh: Any, kinds: Sequence[str]) -> tuple[str, ...]:
    """The mesh's axes of these kinds, without those of one device."""
    axes = (axis_of(mesh, kind) for kind in kinds)
    return tuple(axis for axis in axes if axis is not None and mesh.shape[axis] > 1)


def sizes_text(mesh: Any, axes: Sequence[str], between: str = ", ") -> str:
    """Axes of a mesh with their sizes.

    Example:
        >>> sizes_text(abstract_mesh({"data": 2, "model": 4}), ("data", "model"))
        'data=2, model=4'
    """
    return between.join(f"{axis}={mesh.shape[axis]}" for axis in axes)


def check_mesh(mesh: Any) -> None:
    """Checks that a mesh has a known axis, or only one.

    Raises:
        UserInputError: it has several axes, and none is data, fsdp, expert, seq or model, or an alias of these.
    """
    if not any(axis_of(mesh, kind) for kind in AXES):
        raise UserInputError(
            f"the mesh has the axes {', '.join(map(str, mesh.axis_names)) or '()'}, and strategies know "
            f"{known_axes()}: use these names (a single axis may have any), "
            "or pass rules, which maxjax.load, model.to(mesh, rules=…) and maxjax.plan take"
        )


def known_axes() -> str:
    """The names of axes that strategies know, each with its other names.

    Example:
        >>> known_axes()
        'data (dp, batch), fsdp, expert (ep), seq (sp, cp, context), model (tp, tensor, mp)'
    """
    names = {kind: [one for one, of in ALIASES.items() if of == kind] for kind in AXES}
    return ", ".join(
        f"{kind} ({', '.join(also)})" if also else kind for kind, also in names.items()
    )


def similar_axis(name: str) -> str | None:
    """The usual name that the name of an axis is nearly, but not exactly; None for all other names.

    Example:
        >>> similar_axis("modle"), similar_axis("model"), similar_axis("x")
        ('model', None, None)
    """
    known = (*AXES, *ALIASES)
    like = [] if name in known or not name.isalpha() else get_close_matches(name, known, 1, 0.75)
    return next(iter(like), None)


def check_distinct(devices: Iterable[Any], what: str) -> None:
    """Checks that no device occurs twice.

    Raises:
        UserInputError: one does; the message begins with ``what``.
    """
    found = list(devices)
    if len(set(found)) < len(found):
        ids = some([f"{device.platform}:{device.id}" for device in found], 8)
        raise UserInputError(f"{what} was given one device several times: {ids}")


def make_mesh(
    *,
    devices: Sequence[Any] | None = None,
    axis_types: Any = jax.sharding.AxisType.Auto,
    **sizes: int,
) -> jax.sharding.Mesh:
    """Makes a mesh of devices from the sizes of its axes: ``make_mesh(data=2, model=4)``.

    Args:
        devices: devices, of which the first are used, as many as the sizes need, also ``mesh.devices``; by
            default ``jax.devices()``.
        axis_types: ``jax.sharding.AxisType`` of all axes, or a list with one for each axis.
        sizes: number of devices along each axis; one may be -1, for all remaining devices. The
            usual names are data, fsdp, expert, seq and model; dp, tp, ep and sp are
            accepted too.

    Raises:
        UserInputError: there is no axis, a size is not positive, two axes have the same name,
            there are too few devices, one is given twice, or one is no device.

    Example:
        >>> import maxjax
        >>> dict(maxjax.make_mesh(data=1, tp=1).shape)
        {'data': 1, 'model': 1}
    """
    if not sizes:
        raise UserInputError(
            f"make_mesh() needs the size of an axis, as in make_mesh(model=2); axes are {', '.join(AXES)}"
        )
    for name in sizes:
        if like := similar_axis(name):
            raise UserInputError(f"make_mesh(): there is no axis {name!r}: did you mean {like!r}?")
    names = [axis_name(name) for name in sizes]
    if len(set(names)) < len(names):
        raise UserInputError(f"make_mesh(): {', '.join(sizes)} contain one axis twice")
    given = jax.devices() if devices is None else devices
    available = np.asarray(given, object).ravel().tolist()
    if not all(isinstance(device, jax.Device) for device in available):
        raise UserInputError(
            f"make_mesh({_arguments(sizes)}): devices are those of jax.devices(), such as jax.devices()[:2]"
        )
    counts = _counts(sizes, len(available))
    needed = math.prod(counts)
    if needed > len(available):
        ids = some([f"{device.platform}:{device.id}" for device in available], 8)
        raise UserInputError(
            f"make_mesh({_arguments(sizes)}) needs {needed} devices, but there are {len(available)}: {ids}. "
            "Ask for fewer, or write -1 for all that remain; JAX_NUM_CPU_DEVICES=8 makes eight of a CPU"
        )
    check_distinct(available, f"make_mesh({_arguments(sizes)})")
    types = axis_types if isinstance(axis_types, (tuple, list)) else [axis_types] * len(names)
    return jax.make_mesh(
        tuple(counts), tuple(names), axis_types=tuple(types), devices=available[:needed]
    )


def abstract_mesh(sizes: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    """Makes a mesh without devices, whose axes are Auto in every version of JAX.

    Args:
        sizes: name of each axis → its size.

    Example:
        >>> dict(abstract_mesh({"data": 2, "model": 4}).shape)
        {'data': 2, 'model': 4}
    """
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), types)


def _counts(sizes: dict[str, int], available: int) -> list[int]:
    counts = [int(n) if isinstance(n, np.integer) else n for n in sizes.values()]
    if any(type(n) is not int or (n < 1 and n != -1) for n in counts) or counts.count(-1) > 1:
        raise UserInputError(
            f"make_mesh({_arguments(sizes)}): a size must be positive, or -1 for one of them"
        )
    if -1 in counts:
        others = math.prod(n for n in counts if n != -1)
        if available % others:
            raise UserInputError(
                f"make_mesh({_arguments(sizes)}): {available} devices are not a multiple of {others}"
            )
        counts[counts.index(-1)] = available // others
    return counts


def _arguments(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
