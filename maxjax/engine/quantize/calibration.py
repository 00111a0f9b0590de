"""``calibrate``: runs texts through a model, and sums the squared inputs of its linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UserInputError, checked_integer
from ...graph.weight.weight import Weight
from ...models.gguf.config.families import has_architecture
from ...models.gguf.tensors.write import gguf_places
from ...models.parts.language_model import LanguageModel
from ...models.weights import check_loaded
from ...nn.layer import Module, layer_hook
from ...nn.layer.walk import check_module
from ...nn.linear import ColumnParallelLinear, Linear
from ...nn.moe import Experts
from ...nn.moe.algorithms import between
from ...nn.stacked_linear import StackedLinear
from ...nn.transposed_linear import TransposedLinear
from ...progress import compiling, task
from ...text.tokenizer.arguments import check_is_tokenizer
from ..isolation import isolated
from .importance import Importance

_LINEAR = (Linear, ColumnParallelLinear, StackedLinear, TransposedLinear)


@isolated()
def calibrate(
    model: Module,
    tokenizer: Any,
    texts: str | Iterable[str | Sequence[int]],
    *,
    length: int | None = None,
) -> Importance:
    """Computes a language model's importance matrix: mean squared inputs of its linear layers.

    ``maxjax.quantize(..., importance=...)`` and ``maxjax convert --importance`` weight the
    quantisation errors by it, so that the inputs that occur in the texts are quantised more
    accurately. As for ``llama-imatrix``, a few hundred chunks of typical text are enough. For an
    expert, only the tokens routed to it count. The texts are joined and split into chunks; an
    incomplete last chunk is ignored, unless it is the only one.

    Args:
        model: a decoder whose weights are loaded; weights may be sharded, stacked, or quantised.
        tokenizer: the model's tokenizer; None if ``texts`` are token ids.
        texts: one or more texts, or lists of token ids.
        length: number of tokens in a chunk, by default 512, or the model's context length if that is
            shorter; chunks are run separately.

    Returns:
        The matrix, by the checkpoint's names of the weights; ``save`` writes it in llama.cpp's
        format.

    Raises:
        UserInputError: the model is not a decoder, is not loaded, or has inputs that are not
            finite; or there is no text, no tokenizer for it, or a token id outside the vocabulary.
        TypeError: a token id is not an integer, or ``texts`` is neither a text nor such a list.

    Example:
        >>> import maxjax
        >>> model, tokenizer = maxjax.load("tiny")
        >>> matrix = calibrate(model, tokenizer, "What is 37 + 48? 37 + 48 = 85.")
        >>> matrix["model.layers.0.mlp.down_proj.weight"].shape
        (512,)
    """
    check_module(model, "calibrate")
    check_is_tokenizer(tokenizer)
    if not isinstance(model, LanguageModel):
        raise UserInputError(
            f"only language models are calibrated, and this is a {type(model).__name__}"
        )
    check_loaded(model)
    chunks = _chunks(tokenizer, texts, min(512, model.max_length) if length is None else length)
    size = model.config.vocab_size
    if wrong := [token for ids in chunks for token in ids if not 0 <= token < size]:
        raise UserInputError(
            f"the texts have the token id {wrong[0]}, which is outside the model's vocabulary of {size} tokens"
        )
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    run = jax.jit(_sums)
    with task(f"calibrating {type(model).__name__}", len(chunks), unit=" chunks") as shown:
        for ids in chunks:
            with compiling("calibrate"):
                found = run(model, jnp.asarray(ids, jnp.int32)[None])
            for name, (total, count) in found.items():
                sums[name] = sums.get(name, 0) + np.asarray(total, np.float64)
                counts[name] = counts.get(name, 0) + np.asarray(count, np.float64)
            shown.add(1)
    if bad := [name for name, total in sums.items() if not np.isfinite(total).all()]:
        raise UserInputError(f"the inputs of '{bad[0]}' are not finite: see maxjax.first_nan")
    config, names = model.hf_config, {}
    if config is not None and has_architecture(config):
        weights = model.raw_state_dict()
        shapes = {name: tuple(map(int, weights[name].logical_shape)) for name in sums}
        names = {n: (p.tensor, p.expert) for n, p in gguf_places(config, shapes).items()}
    return Importance(sums, counts, names, len(chunks), len(chunks[0]))


def _chunks(tokenizer: Any, texts: Any, length: int) -> list[list[int]]:
    ids: list[int] = []
    for text in [texts] if isinstance(texts, str) else _items(texts):
        if isinstance(text, str):
            if tokenizer is None:
                raise UserInputError("texts need a tokenizer; without one, give lists of token ids")
            ids += tokenizer.encode(text)
        else:
            ids += [index(token) for token in _items(text)]
    length = checked_integer("length", length)
    if not ids:
        raise UserInputError("there are no tokens to calibrate with: give at least one text")
    whole = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    return whole or [ids]


def _items(given: Any) -> Iterable[Any]:
    if not isinstance(given, Iterable):
        raise TypeError(
            f"texts are a text, or a list of texts or of lists of token ids; one is a {type(given).__name__}"
        )
    return given


def _sums(model: Module, ids: jax.Array) -> dict[str, tuple[jax.Array, Any]]:
    """For each linear layer the sum of its squared inputs, and the number of tokens."""
    names = {id(weight): name for name, weight in model.raw_state_dict().items()}
    found: dict[str, tuple[jax.Array, Any]] = {}

    def add(layer: Any, total: jax.Array, count: Any) -> None:
        name = names.get(id(layer.weight))
        if name is not None:
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + total, before[1] + count

    inside: list[Any] = []

    def hook(layer: Any, args: tuple, kwargs: dict, outputs: Any) -> None:
        if inside:
            return  # a layer of a mixture of experts, which _add_experts handles
        if type(layer) in _LINEAR and isinstance(getattr(layer, "weight", None), Weight):
            x = jnp.asarray(args[0], jnp.float32).reshape(-1, args[0].shape[-1])
            add(layer, jnp.sum(x * x, axis=0), float(x.shape[0]))
        elif isinstance(layer, Experts):
            inside.append(layer)
            try:
                tokens, chosen = (one.reshape(-1, one.shape[-1]) for one in args[:2])
                _add_experts(layer, tokens, chosen, add)
            finally:
                inside.pop()

    with layer_hook(hook):
        model(ids)
    return found


def _add_experts(experts: Experts, tokens: jax.Array, chosen: jax.Array, add: Any) -> None:
    """Adds the squared inputs of each expert's layers, for the tokens ``[N, E]`` that chose it, by ``[N, k]``."""
    for number, expert in enumerate(experts):
        wide = tokens.astype(jnp.float32)
        mask = jnp.any(chosen == number, axis=-1).astype(jnp.float32)  # [N]
        *inputs, down = expert.linears
        inner = between(expert.act, *(one(tokens) for one in inputs)).astype(jnp.float32)
        count = jnp.sum(mask)
        for one, x in (*((one, wide) for one in inputs), (down, inner)):
            add(one, mask @ (x * x), count)
