"""flax nnx: any checkpoint into an nnx module, and Modules as nnx State.

``load`` fills a module, ``tensors`` gives what it holds by the names of a checkpoint, and
``torch_rules`` makes the table for both out of the module's own layers; ``to_state``,
``from_state`` and ``as_nnx`` bring a maxjax Module over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...errors import UnsupportedModelError, UserInputError
from ...graph.weights import WeightData, Weights, load_weights
from ...graph.weights.given import dtype_of, host_or_jax, shape_of
from ...models import family
from ...nn.layer.state import LoadResult
from ...storage.limits import Limits
from ...storage.table import Verify
from ..renaming import Renaming
from .filling import arrays
from .matching import Matching
from .state import Packed as Packed
from .state import as_nnx as as_nnx
from .state import from_state as from_state
from .state import to_state as to_state
from .torch_layers import torch_rules as torch_rules
from .variables import targets
from .writing import written

# Layouts by name: a map as torch stores it, a weight that stays as it is, an image filter.
T = "o i -> i o"
AS_IS = "i o -> i o"
OIHW_TO_HWIO = "o i h w -> h w i o"

__all__ = [
    "AS_IS", "OIHW_TO_HWIO", "T", "Packed", "as_nnx", "from_state", "load", "tensors", "to_state",
    "torch_rules",
]  # fmt: skip


def load(
    module: Any,
    weights: str | os.PathLike[str] | Weights | Mapping[str, Any],
    *,
    rename: Any = None,
    transform: Mapping[str, Any] | None = None,
    cast: bool = False,
    strict: bool = True,
    verify: Verify = "auto",
    limits: Limits | None = None,
) -> LoadResult:
    """Fills the Variables of an nnx module from a checkpoint. All of them, or none.

    Each array goes where the Variable's value lies, or where its sharding says if it has none
    yet (``nnx.eval_shape``): of what is split each device reads its own part.

    Args:
        module: An nnx module; paths of its Variables are dotted: ``blocks.0.attn.query.kernel``.
        weights: A path or cursor of any format (a GGUF file has Hugging Face's names where
            maxjax knows the architecture), or arrays by name.
        rename: Pattern of the checkpoint's names → name in the module; or (name, layout); or a
            list of these where a tensor is several arrays; or None for what is not wanted.
            ``*`` is a part of a name between dots, ``**`` any text; stars carry over in order,
            and the first pattern that fits counts. Names that none fits stay. Or a function of
            the name. :func:`torch_rules` makes such a table.
        transform: Pattern of the module's names → layout, where ``rename`` gives none.
        cast: Convert between float widths, and between integers that fit; decode packed
            blocks. Otherwise dtypes must be equal.
        strict: Refuse what is missing or unexpected.
        verify: Of a path, when checksums are compared (see ``load_weights``).
        limits: Of a path, what its files may ask of this process (see ``load_weights``).

    A layout says how the axes lie, ``"o i -> i o"`` (:data:`T`), ``"(h d) e -> e h d"``; see
    ``interop.layouts``. A function of an array stands in its place where none will do, and a
    pair of functions is the way there and back.

    Every Param must get a value, and every Variable that has none; others (BatchStat) keep
    theirs where the checkpoint has nothing for them. State of random numbers is left alone.

    Returns:
        What was missing (paths) and unexpected (names); both empty when strict.

    Raises:
        CheckpointMismatchError: Anything does not fit; its ``diff`` has all of it.
        CheckpointError: The checkpoint cannot be read.
        UserInputError: A table that cannot be used.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> weights = {"weight": np.ones((3, 2), np.float32), "bias": np.zeros(3, np.float32)}
        >>> load(model, weights, rename={"weight": ("kernel", T)})
        LoadResult(missing=(), unexpected=())
        >>> model.kernel.shape
        (2, 3)
    """
    renaming = Renaming(rename, transform)
    with _opened(weights, verify, limits) as (named, path):
        data = {name: _data(name, value) for name, value in named.items()}
        match = Matching(targets(module), renaming, data, cast)
        if match.is_refused(strict):
            raise match.error(path, strict)
        found = arrays(match.fillings)
    for filling, array in zip(match.fillings, found, strict=True):
        filling.target.put(array)
    return LoadResult(match.diff.missing, match.diff.unexpected)


@contextmanager
def _opened(
    weights: Any, verify: Verify, limits: Limits | None
) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """The tensors by name, and the path; files opened here are closed here."""
    if isinstance(weights, (str, bytes, os.PathLike)):
        with load_weights(weights, verify=verify, limits=limits) as opened:
            yield _named(opened), opened._path
    elif isinstance(weights, Weights):
        yield _named(weights), weights._path
    elif isinstance(weights, Mapping):
        yield weights, None
    else:
        raise UserInputError(f"weights are a path, a cursor or arrays by name, not "
                             f"{type(weights).__name__}")  # fmt: skip


def _named(weights: Weights) -> dict[str, WeightData]:
    try:
        return family.tensors(weights)
    except UnsupportedModelError:  # a GGUF file of another architecture, by its own names
        return dict(weights._named_data())


def _data(name: str, value: Any) -> WeightData:
    if isinstance(value, WeightData):
        return value
    try:
        return WeightData(host_or_jax(value), name, dtype_of(value), tuple(shape_of(value)))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserInputError(
            f"'{name}' is a {type(value).__name__} and no array of a dtype that maxjax has"
        ) from error


def tensors(
    module: Any, *, rename: Any = None, transform: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a module holds, by the names and in the layouts of a checkpoint: the way back.

    Args:
        module: An nnx module.
        rename, transform: The tables that :func:`load` takes.

    Returns:
        Arrays by name. Those in the same layout there are the module's own, not copies. State
        of random numbers is left out.

    Raises:
        UserInputError: A table that cannot be inverted: a function, two arrays for one name.
        ValueError: A Variable has no value.

    Example:
        >>> from flax import nnx
        >>> model = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
        >>> {name: a.shape for name, a in tensors(model, rename=torch_rules(model)).items()}
        {'weight': (5, 3)}
    """
    return written(targets(module), Renaming(rename, transform))
