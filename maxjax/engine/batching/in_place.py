"""Whether the devices of a model read pages where they lie, so that any token of any text can be a row of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ...graph.placement.specs import mesh_of
from ...kernels.cache_read import PAGES_NAME
from ...kernels.decode_attention import PAGED_NAME, copies_pages
from ...nn.kv_cache.pages import PagedCache
from .memory import in_groups, page_size_of


def why_copied(
    model: Any, slots: int, rows: int, width: int, cache_dtype: Any = None, device: Any = None
) -> str:
    """Why a call with one token in each row copies the pages of the rows' texts; "" if kernels read them in place.

    The model is traced, not compiled: kernels say whether they support what its layers ask for.

    Args:
        model: a decoder whose weights are loaded.
        slots: number of slots of the pool.
        rows: number of rows of the call.
        width: number of pages of each row's table.
        cache_dtype: dtype of keys and values; None for the model's.
        device: the device; by default one that the model is on.
    """
    slots, groups = in_groups(model, slots)
    pool = model.page_pool(groups, page_size_of(model), slots, cache_dtype, abstract=True)
    each: Any = np.zeros(rows, np.int32)
    table: Any = np.zeros((rows, width), np.int32)
    lengths = each if model.config.ropes_by_length else None
    cache = PagedCache(pool, table, each, each, lengths, is_ragged=True)
    if device is None:
        where = model._sharding
        mesh = mesh_of([where])
        device = next(iter(where.device_set if mesh is None else mesh.devices.flat))
    traced = _one_token.trace(model, each, cache)
    for equation in _equations(traced.jaxpr.jaxpr):
        if equation.primitive.name == PAGES_NAME:
            return "layers read all pages of a text"
        if equation.primitive.name == PAGED_NAME:
            operands = [one.aval for one in equation.invars]
            if why := copies_pages(device, equation.params["static"], *operands):
                return why
    return ""


@jax.jit
def _one_token(model: Any, ids: jax.Array, cache: PagedCache) -> Any:
    return model(ids[:, None], cache, last=True)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of those inside."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)
