"""Chooses the encoding of each tensor in a quantised GGUF file: llama.cpp's mixtures as a table.

Sources: ``llama_tensor_get_type`` and ``tensor_type_fallback`` of llama.cpp's llama-quant.cpp for the
mixtures, ``prepare_tensors`` of its converter for what stays float32.

A mixture gives most weights its main encoding, and more bits to the most sensitive ones: the values
of attention (``attn_v``), the last linear layer of the MLP (``ffn_down``) in some layers, and the
output head. The name of a single type, such as "q4_k", gives that type to all weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ....storage.blocks import ENCODERS, LAYOUTS

# Tensors that llama.cpp's converter keeps in float32, besides vectors: norms, routers, small tables, taps.
_WIDE = re.compile(
    r".*_norm|.*attn_sinks|.*\.ffn_gate_inp(_shexp)?|position_embd|token_types"
    r"|.*\.ssm_(conv1d|a|d)|.*\.shortconv\.conv|.*\.altup_(correct|predict)_coef"
)
# Tensors that llama.cpp never quantises; in files that are not quantised they have the file's type.
_PLAIN = re.compile(r".*altup_.*|.*\.laurel_[lr]|per_layer_model_proj")
# The encoding for rows whose length is not a multiple of the block size of a mixture's encoding.
_SMALLER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# The same encoding for choices that name a single type.
_SMALLEST = "Q8_0"
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Traits:
    """The facts about a model that the rules of mixtures depend on.

    Attributes:
        layers: number of layers.
        experts: number of experts of a layer; 0 if there are none.
        heads_per_kv: query heads for each KV head.
        is_70b: whether llama.cpp counts it as a 70B model: a Qwen2, or a Llama with grouped KV heads,
            of 80 layers.
    """

    layers: int
    experts: int = 0
    heads_per_kv: int = 1
    is_70b: bool = False

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any]) -> Traits:
        """The traits of the model that the metadata of a GGUF file describes."""
        architecture = metadata.get("general.architecture")
        of = lambda key: metadata.get(f"{architecture}.{key}", 0)
        # Some models list a number for each layer; the first one is used, as in llama.cpp.
        first = lambda key: int(np.ravel(of(key))[0])
        layers, heads = int(of("block_count")), first("attention.head_count")
        kv_heads = first("attention.head_count_kv") or heads
        return cls.of(architecture, layers, int(of("expert_count")), heads, kv_heads)

    @classmethod
    def of(
        cls, architecture: str | None, layers: int, experts: int, heads: int, kv_heads: int
    ) -> Traits:
        """The traits of a model with these numbers; ``architecture`` is GGUF's name."""
        is_large = layers == 80 and (
            architecture == "qwen2" or (architecture == "llama" and heads != kv_heads)
        )
        return cls(layers, experts, heads // max(kv_heads, 1), is_large)


class _Tensor(NamedTuple):
    """A tensor to choose an encoding for; ``order`` is its index among the ``count`` tensors of values."""

    order: int
    count: int
    layer: int


# (the tensor, the model) → encoding, or None for the mixture's main encoding.
_Rule = Callable[[_Tensor, Traits], str | None]


def _more_bits(number: int, count: int) -> bool:
    """Whether a layer is in the first or last eighth of the layers, or is every third between."""
    return number < count // 8 or number >= 7 * count // 8 or (number - count // 8) % 3 == 2


def _always(encoding: str) -> _Rule:
    return lambda tensor, model: encoding


def _first(part: int, encoding: str) -> _Rule:
    return lambda tensor, model: encoding if tensor.layer < model.layers // part else None


def _values_with_more_bits(tensor: _Tensor, model: Traits) -> str | None:
    return "Q6_K" if _more_bits(tensor.order, tensor.count) else None


def _down_with_more_bits(tensor: _Tensor, model: Traits) -> str | None:
    return "Q6_K" if _more_bits(tensor.layer, model.layers) else None


def _shared_values(encoding: str | None) -> _Rule:
    """More bits where many query heads share values, since the tensor of values is then small."""
    return lambda tensor, model: "Q4_K" if model.heads_per_kv >= 4 else encoding


@dataclass(frozen=True)
class Mixture:
    """A choice of encodings.

    Attributes:
        encoding: the main encoding.
        file_type: ``general.file_type`` of a file (``enum llama_ftype``).
        rules: category of a tensor → rule; None: every weight has the main encoding.
        wide_attention: whether attention's output projection is Q5_K in models with 8 experts.
    """

    encoding: str
    file_type: int
    rules: Mapping[str, _Rule] | None = None
    wide_attention: bool = False


MIXTURES: dict[str, Mixture] = {
    # All weights in one type.
    "q4_0": Mixture("Q4_0", 2),
    "q4_1": Mixture("Q4_1", 3),
    "q5_0": Mixture("Q5_0", 8),
    "q5_1": Mixture("Q5_1", 9),
    "q8_0": Mixture("Q8_0", 7),
    "mxfp4": Mixture("MXFP4", 38),
    "q3_k": Mixture("Q3_K", 12),
    "q4_k": Mixture("Q4_K", 15),
    "q5_k": Mixture("Q5_K", 17),
    # llama.cpp's mixtures.
    "q2_k": Mixture("Q2_K", 10, {"v": _shared_values("Q3_K"), "down": _always("Q3_K"),
                                 "o": _always("Q3_K")}, True),
    "q2_k_s": Mixture("Q2_K", 21, {"v": _shared_values(None), "down": _first(8, "Q4_K")}),
    "q3_k_s": Mixture("Q3_K", 11, {}, True),
    "q3_k_m": Mixture("Q3_K", 12, {"v": lambda tensor, model: "Q5_K" if tensor.order < 2 else "Q4_K",
                                   "down": lambda tensor, model: (
                                       "Q5_K" if tensor.layer < model.layers // 16 else "Q4_K"),
                                   "o": _always("Q4_K")}, True),
    "q3_k_l": Mixture("Q3_K", 13, {"v": _always("Q5_K"), "down": _always("Q5_K"),
                                   "o": _always("Q5_K")}),
    "q4_k_s": Mixture("Q4_K", 14, {"v": lambda tensor, model: "Q5_K" if tensor.order < 4 else None,
                                   "down": _first(8, "Q5_K")}, True),
    "q4_k_m": Mixture("Q4_K", 15, {"v": _values_with_more_bits, "down": _down_with_more_bits},
                      True),
    "q5_k_s": Mixture("Q5_K", 16, {}),
    "q5_k_m": Mixture("Q5_K", 17, {"v": _values_with_more_bits, "down": _down_with_more_bits}),
    "q6_k": Mixture("Q6_K", 18, {}),
    "mxfp4_moe": Mixture("MXFP4", 38, {}),
}  # fmt: skip
"""The choices of ``quantize=``, by name: single types, and llama.cpp's mixtures."""


def encodings(
    shapes: Mapping[str, Sequence[int]], choice: str, model: Traits
) -> dict[str, str | None]:
    """Chooses the encodings of the tensors of a GGUF file; None for tensors without one.

    Linear layers and embedding tables are quantised. Tensors that llama.cpp keeps in float32 (:func:`is_wide`)
    have no encoding, nor have tensors whose rows are not whole blocks of any type.

    Args:
        shapes: logical shapes ``[..., out, in]`` of all tensors in the file, by name, in the file's order.
        choice: a key of ``MIXTURES``.
        model: traits of the model.

    Example:
        >>> shapes = {"output.weight": (512, 256), "blk.0.ffn_up.weight": (512, 256),
        ...           "blk.0.ffn_down.weight": (256, 512), "blk.0.attn_norm.weight": (256,)}
        >>> encodings(shapes, "q4_k_m", Traits(layers=1))  # doctest: +NORMALIZE_WHITESPACE
        {'output.weight': 'Q6_K', 'blk.0.ffn_up.weight': 'Q4_K', 'blk.0.ffn_down.weight': 'Q6_K',
         'blk.0.attn_norm.weight': None}
        >>> encodings({"blk.0.ffn_up.weight": (512, 96)}, "q4_k", Traits(layers=1))
        {'blk.0.ffn_up.weight': 'Q8_0'}
    """
    mixture = MIXTURES[choice]
    weights = [name for name, shape in shapes.items() if takes_blocks(name, shape)]
    # Ordered as llama.cpp orders them: by layer.
    values = sorted((n for n in weights if _category(n) in ("v", "qkv")), key=_layer)
    is_tied = "output.weight" not in weights
    found: dict[str, str | None] = dict.fromkeys(shapes)
    for name in weights:
        category, shape = _category(name), shapes[name]
        if category == "embedding" and is_tied:
            category = "output"
        order = values.index(name) if name in values else -1
        tensor = _Tensor(order, len(values), _layer(name))
        encoding = _chosen(mixture, category, shape, tensor, model)
        smaller = _SMALLEST if mixture.rules is None else _SMALLER.get(encoding)
        for one in (encoding, smaller):
            if one is not None and shape[-1] % LAYOUTS[one].elements == 0:
                found[name] = one
                break
    return found


def _chosen(
    mixture: Mixture, category: str, shape: Sequence[int], tensor: _Tensor, model: Traits
) -> str:
    """The encoding that the mixture chooses for a weight, before the block size is checked."""
    main = mixture.encoding
    if mixture.rules is None:
        return main
    if category == "output":
        divides = shape[-1] % LAYOUTS[main].elements == 0
        return "Q6_K" if divides and main != "MXFP4" else "Q8_0"
    if main == "MXFP4":
        return "MXFP4" if len(shape) > 2 and shape[0] > 1 else "Q8_0"
    if model.experts == 8 and category in ("v", "qkv", "k"):
        return "Q8_0"
    if model.experts == 8 and category == "o":
        return "Q5_K" if mixture.wide_attention else main
    # A fused matrix of queries, keys and values is treated as values.
    rule = mixture.rules.get("v" if category == "qkv" else category)
    encoding = (rule(tensor, model) if rule else None) or main
    if model.is_70b and category in ("v", "qkv") and encoding in ("Q3_K", "Q4_K"):
        return "Q5_K"  # eight heads share the values, so the tensor is small
    return encoding


def _category(name: str) -> str:
    """The category of a tensor: output, embedding, qkv, v, k, o, down or other."""
    for part, category in _CATEGORIES:
        if part in name:
            return category
    return "other"


_CATEGORIES = (
    ("attn_qkv.weight", "qkv"),
    ("attn_v.weight", "v"),
    ("attn_k.weight", "k"),
    ("attn_output.weight", "o"),
    ("ffn_down", "down"),
    ("token_embd.weight", "embedding"),
    ("output.weight", "output"),
)


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found.group(1)) if found else -1


def is_wide(name: str, shape: Sequence[int]) -> bool:
    """Whether llama.cpp keeps a tensor of a GGUF file in float32, whatever the file's type.

    Example:
        >>> is_wide("blk.0.ffn_gate_inp.weight", (8, 64)), is_wide("output.weight", (64, 64))
        (True, False)
    """
    return (
        len(shape) < 2
        or name.endswith(".bias")
        or _WIDE.fullmatch(name.removesuffix(".weight")) is not None
    )


def takes_blocks(name: str, shape: Sequence[int]) -> bool:
    """Whether llama.cpp quantises a tensor of a GGUF file.

    Example:
        >>> takes_blocks("blk.0.laurel_l.weight", (64, 64)), takes_blocks("output.weight", (64, 64))
        (False, True)
    """
    return not is_wide(name, shape) and _PLAIN.fullmatch(name.rpartition(".")[0]) is None


assert {mixture.encoding for mixture in MIXTURES.values()} <= ENCODERS.keys()
