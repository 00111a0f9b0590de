"""``first_nan`` finds the first layer of a model whose output has a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedModelError, UserInputError
from ...nn.layer import layer_hook
from ..isolation import isolated
from .checks import check_model


@isolated()
def first_nan(model: Any, ids: Sequence[int] | jax.Array) -> str | None:
    """Finds the first layer whose output has a NaN or an infinity for a prompt.

    The model runs layer by layer, without ``jax.jit``. If its layers are stacked, they are in
    memory twice during the call.

    Args:
        model: a language model.
        ids: the token ids of the prompt; or ``[B, T]``, as of a batch in training.

    Returns:
        The layer's name and those of its weights that are not finite; None if every output is
        finite.

    Raises:
        UserInputError: the token ids are not valid for the model.
        UnsupportedModelError: the weights are sharded over the devices of several processes.

    Example:
        >>> import maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> first_nan(model, [1, 2, 3]) is None
        True
        >>> weight = model.raw_state_dict()["model.layers.1.mlp.down_proj.weight"]
        >>> weight.value = weight.value.at[0, 0].set(jnp.inf)
        >>> first_nan(model, [1, 2, 3])
        'model.layers.1.mlp.down_proj, whose weight has 1 value that is not finite'
    """
    check_model(model)
    rows = _rows(ids)
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(model)):
        raise UnsupportedModelError(
            "looking for NaN in a model whose weights are sharded over several processes"
        )
    flat = jax.tree.map(lambda leaf: leaf, model)  # a copy that shares the arrays
    if hasattr(flat, "unstack"):
        flat.unstack()
    names = {id(module): name.rstrip(".") for name, module in flat.named_modules()}
    found: list[Any] = []

    def watch(layer: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        if not found and id(layer) in names and any(map(_count, jax.tree.leaves(outputs))):
            found.append(layer)

    with layer_hook(watch), jax.disable_jit():
        flat(rows[None] if rows.ndim == 1 else rows)
    if not found:
        return None
    bad = [
        f"whose {name} has {count} value{'s' * (count > 1)} that {'are' if count > 1 else 'is'} not finite"
        for name, weight in found[0].raw_state_dict().items()
        if (count := _count(weight.value))
    ]
    return ", ".join([names[id(found[0])] or type(model).__name__, *bad])


def _rows(ids: Any) -> jax.Array:
    """The token ids as an array."""
    try:
        found = np.asarray(ids)
    except ValueError:  # rows of several lengths
        found = np.empty(0)
    if not found.size or found.ndim not in (1, 2) or not np.issubdtype(found.dtype, np.integer):
        raise UserInputError(
            "ids are token ids, [T] or [B, T] integers, such as those of tokenizer.encode(text); got "
            + (
                f"{found.dtype}{list(found.shape)}"
                if found.size
                else "none, or rows of several lengths"
            )
        )
    return jnp.asarray(found, jnp.int32)


def _count(leaf: Any) -> int:
    """How many numbers of an array of floats are not finite; 0 for anything else."""
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return 0
    return int(jnp.sum(~jnp.isfinite(leaf.astype(jnp.float32))))
