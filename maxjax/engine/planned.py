"""Floor 6. Plan: what a model takes on each device, as plain data and as a table to read.

Below: columns. Above: plan, which makes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..columns import columns, visible


@dataclass(frozen=True)
class Kind:
    """Tensors that differ only in the numbers of their names.

    Attributes:
        name: With ``*`` for the numbers.
        count: How many there are.
        dtype, shape: Of each.
        spec: For each axis the axes of the mesh that it is split over, as text.
        bytes, bytes_per_device: Of all of them.
        why: Why they are split so.
    """

    name: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    spec: str
    bytes: int
    bytes_per_device: int
    why: str


@dataclass(frozen=True)
class Suggestion:
    """What fits: a mesh, and the dtype of floats where another one is needed.

    Attributes:
        mesh: Sizes by axis.
        devices: Their product.
        dtype: Its name, or None: as planned.
        bytes_per_device, cache_bytes_per_device: What it takes there.
    """

    mesh: dict[str, int]
    devices: int
    dtype: str | None
    bytes_per_device: int
    cache_bytes_per_device: int

    def __str__(self) -> str:
        dtype = f" with dtype={self.dtype}" if self.dtype else ""
        total = self.bytes_per_device + self.cache_bytes_per_device
        return f"{_mesh_text(self.mesh, self.devices)}{dtype}: {_bytes(total)} on each device"


@dataclass(frozen=True)
class Plan:
    """What a model takes on each device. ``print`` shows it as a table.

    Every device holds the same number of bytes: an axis that a mesh does not divide evenly is
    not split. Weights and cache are counted; activations and what a compiler needs are not.

    Attributes:
        devices: How many there are.
        mesh: Size of each axis; empty for one device.
        bytes_per_device: Of weights.
        total_bytes: One copy of all weights.
        kinds: One :class:`Kind` for tensors that differ only in numbers.
        largest: (name, bytes) of the ten largest tensors.
        replicated: Those kinds that every device of several has whole, the largest first.
        cache_bytes_per_device: Of keys and values for ``batch`` sequences of ``length`` tokens.
        basis: By what rules tensors are split.
        hbm: Bytes of memory of a device, where it is known.
        fits: Whether weights and cache are no more; None where memory or sizes are not known.
        suggestion: What fits, on the fewest devices, where this does not.
        notes: What else is to be said.
    """

    devices: int
    mesh: dict[str, int]
    bytes_per_device: int
    total_bytes: int
    kinds: tuple[Kind, ...]
    largest: tuple[tuple[str, int], ...]
    replicated: tuple[Kind, ...]
    cache_bytes_per_device: int
    basis: str
    hbm: int | None = None
    fits: bool | None = None
    suggestion: Suggestion | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, text and numbers, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# --- as a table -------------------------------------------------------------------------------


def _lines(plan: Plan) -> Iterator[str]:
    yield f"{_mesh_text(plan.mesh, plan.devices)}; {plan.basis}"
    yield ""
    rows = [
        ["weights", _bytes(plan.total_bytes)],
        ["on each device", _bytes(plan.bytes_per_device)],
    ]
    if plan.cache_bytes_per_device:
        rows.append(["and its cache", _bytes(plan.cache_bytes_per_device)])
    if plan.hbm is not None:
        rows.append(["a device has", _bytes(plan.hbm)])
        rows.append(["fits", {True: "yes", False: "no", None: "not known"}[plan.fits]])
    if plan.fits is False:
        rows.append(["what fits", str(plan.suggestion or "no mesh or dtype that was tried")])
    yield from columns(rows, right=())
    yield ""
    head = ["name", "count", "dtype", "shape", "spec", "bytes", "per device", "why"]
    table = [
        [visible(k.name), f"{k.count:,}", k.dtype, "x".join(map(str, k.shape)) or "scalar",
         k.spec, f"{k.bytes:,}", f"{k.bytes_per_device:,}", k.why]
        for k in plan.kinds
    ]  # fmt: skip
    yield from columns([head, *table], right=(1, 5, 6))
    if plan.replicated:
        yield from ("", "whole on every device")
        rows = [[f"  {visible(k.name)}", f"{k.bytes:,}", k.why] for k in plan.replicated]
        yield from columns(rows, right=(1,))
    if plan.largest:
        yield from ("", "largest")
        rows = [[f"  {visible(name)}", f"{nbytes:,}"] for name, nbytes in plan.largest]
        yield from columns(rows, right=(1,))
    yield from (f"\nnote: {note}" for note in plan.notes)


def _mesh_text(mesh: dict[str, int], devices: int) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    count = f"{devices:,} device" + "s" * (devices != 1)
    return f"mesh {axes} ({count})" if mesh else count


def _bytes(n: int) -> str:
    unit, size = ("GiB", 1 << 30) if n >= 1 << 30 else ("MiB", 1 << 20)
    return f"{n:,} bytes ({n / size:,.2f} {unit})"
