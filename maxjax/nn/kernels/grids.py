"""MAX's kernels for patches of images and videos: reordering into blocks, pooling, and position embeddings.

A grid ``(t, h, w)`` has t frames of h rows and w columns; the patches of all grids are concatenated. The sizes of the
results depend on the values of the grids, which must therefore be concrete: they cannot be tracers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...graph.ops.interpolation import resize_bicubic
from ...graph.ops.lift import lift
from ...graph.value import TensorValue


def _known(op: str, grids: Any) -> list[tuple[int, int, int]]:
    """The grids as Python integers.

    Raises:
        NotImplementedError: the grids are a tracer.
        ValueError: their shape is not ``[N, 3]``.
    """
    grids = grids.value if isinstance(grids, TensorValue) else grids
    if isinstance(grids, Tracer):
        raise NotImplementedError(
            f"{op} takes grids that are known while a program is traced: the sizes of its result depend on them"
        )
    array = np.asarray(grids)
    if array.ndim != 2 or array.shape[1] != 3:
        raise ValueError(f"{op} takes grids [N, 3], not {list(array.shape)}")
    return [(int(t), int(h), int(w)) for t, h, w in array]


@lift
def _lifted(function: Callable[..., Any], *arrays: Any) -> Any:
    """Calls a function of arrays as an op. Grids are not among its arguments, because they would then be traced."""
    return function(*arrays)


def _in_blocks(x: jax.Array, h: int, w: int, rows: int, columns: int, op: str) -> jax.Array:
    """Patches ``[h w, D]`` in row-major order → block by block, with row-major order in each block."""
    if h % rows or w % columns:
        raise ValueError(f"{op}: {h} × {w} patches do not form blocks of {rows} × {columns}")
    apart = x.reshape(h // rows, rows, w // columns, columns, -1)
    return apart.transpose(0, 2, 1, 3, 4).reshape(h * w, -1)


def _joined(parts: list[jax.Array], x: jax.Array) -> jax.Array:
    """The parts made of ``x``, concatenated; no rows if there are no grids."""
    return jnp.concatenate(parts) if parts else x[:0]


def _split(x: jax.Array, sizes: list[int], op: str) -> list[jax.Array]:
    if x.ndim != 2 or x.shape[0] != sum(sizes):
        raise ValueError(f"{op} takes [{sum(sizes)}, D] for its grids, not {list(x.shape)}")
    return [x[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]


def spatial_merge(
    input: Any, grid_thw: Any, hidden_size: int, merge_size: int, *, out_rows: Any
) -> Any:
    """Reorders the patches of each grid into blocks, and repeats them for each of its frames.

    Args:
        input: ``[sum of h w, hidden_size]``, one frame for each grid, in row-major order.
        grid_thw: ``[N, 3]``, concrete.
        hidden_size: number D of features of a patch.
        merge_size: number of rows, and of columns, of a block.
        out_rows: number of rows of the result, the sum of t h w; checked if it is an int.

    Returns:
        ``[sum of t h w, hidden_size]``.

    Raises:
        NotImplementedError: the grids are a tracer.
        ValueError: the sizes do not fit.

    Example:
        >>> x = jnp.arange(8.0)[:, None]
        >>> spatial_merge(x, np.array([[1, 2, 4]]), 1, 2, out_rows=8)[:, 0].tolist()
        [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]
    """
    op = "spatial_merge"
    grids = _known(op, grid_thw)
    total = sum(t * h * w for t, h, w in grids)
    if isinstance(out_rows, int) and out_rows != total:
        raise ValueError(f"{op}: the grids have {total} patches, not {out_rows}")

    def run(x: jax.Array) -> jax.Array:
        if x.ndim != 2 or x.shape[1] != hidden_size:
            raise ValueError(f"{op} takes patches of {hidden_size} features, not {list(x.shape)}")
        parts = _split(x, [h * w for _, h, w in grids], op)
        found = [
            jnp.tile(_in_blocks(part, h, w, merge_size, merge_size, op), (t, 1))
            for part, (t, h, w) in zip(parts, grids, strict=True)
        ]
        return _joined(found, x)

    return _lifted(run, input)


def tpool_patch_merger(
    input: Any, grid_thws: Any, kH: int, kW: int, max_h: Any = None, max_w: Any = None
) -> Any:
    """The mean over the frames of each grid, with the patches reordered into blocks (Kimi K2.5).

    Args:
        input: ``[sum of t h w, D]``, frame by frame, each in row-major order.
        grid_thws: ``[N, 3]``, concrete.
        kH, kW: number of rows and of columns of a block.
        max_h, max_w: arguments of MAX's kernel; ignored.

    Returns:
        ``[sum of h w, D]`` in the dtype of ``input``; the means are computed in float32.

    Raises:
        NotImplementedError: the grids are a tracer.
        ValueError: the sizes do not fit.

    Example:
        >>> x = jnp.arange(8.0)[:, None]
        >>> tpool_patch_merger(x, np.array([[2, 1, 4]]), 1, 2)[:, 0].tolist()
        [2.0, 3.0, 4.0, 5.0]
    """
    op = "tpool_patch_merger"
    grids = _known(op, grid_thws)

    def run(x: jax.Array) -> jax.Array:
        found = []
        parts = _split(x, [t * h * w for t, h, w in grids], op)
        for part, (t, h, w) in zip(parts, grids, strict=True):
            mean = part.reshape(t, h * w, -1).astype(jnp.float32).mean(axis=0)
            found.append(_in_blocks(mean, h, w, kH, kW, op).astype(x.dtype))
        return _joined(found, x)

    return _lifted(run, input)


def learnable_2d_interp_pos_emb(x: Any, weight: Any, grid_thws: Any, time_weight: Any) -> Any:
    """Adds position embeddings, resized to each grid, to patches (Kimi K2.5).

    Args:
        x: patches ``[sum of t h w, D]``, frame by frame, each in row-major order.
        weight: embeddings of positions ``[H, W, D]``, resized by ``ops.resize_bicubic``.
        grid_thws: ``[N, 3]``, concrete.
        time_weight: embeddings of frames ``[frames, D]``, added only for grids with more than one frame.

    Returns:
        ``[sum of t h w, D]`` in the dtype of ``x``, summed in float32.

    Raises:
        NotImplementedError: the grids are a tracer.
        ValueError: the sizes do not fit.

    Example:
        >>> frames, grid = jnp.array([[10.0], [20.0]]), np.array([[2, 1, 1]])
        >>> learnable_2d_interp_pos_emb(jnp.zeros((2, 1)), jnp.ones((1, 1, 1)), grid, frames).tolist()
        [[11.0], [21.0]]
    """
    op = "learnable_2d_interp_pos_emb"
    grids = _known(op, grid_thws)

    def run(x: jax.Array, weight: jax.Array, time_weight: jax.Array) -> jax.Array:
        wide, found = weight.astype(jnp.float32), []
        parts = _split(x, [t * h * w for t, h, w in grids], op)
        for part, (t, h, w) in zip(parts, grids, strict=True):
            if t > time_weight.shape[0]:
                raise ValueError(f"{op}: {t} frames, and positions of {time_weight.shape[0]}")
            place = resize_bicubic(wide, (h, w, weight.shape[2])).reshape(1, h * w, -1)
            place = jnp.broadcast_to(place, (t, *place.shape[1:]))
            if t > 1:
                place = place + time_weight[:t, None].astype(jnp.float32)
            found.append((part.astype(jnp.float32) + place.reshape(part.shape)).astype(x.dtype))
        return _joined(found, x)

    return _lifted(run, x, weight, time_weight)
