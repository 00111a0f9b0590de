"""Sharding rules by tensor names, for checkpoints with Hugging Face's names.

Models of maxjax's own families are sharded by the rules of their Modules; this table is for all
others. It follows Megatron-LM (arXiv:1909.08053): the first linear layer of a pair is split by rows,
the second by columns, and attention between heads.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..dtype import DType
from ..graph.placement.mesh import EXPERTS, TENSOR
from ..graph.placement.split import Segment, Split

# For each kind of linear layer: which side is split (its outputs are the rows of a weight, its
# inputs the columns), what that side consists of, the mesh axes, and the layers' names. The first
# row that matches is used.
TABLE = (
    ("out", "values", EXPERTS, "experts.*.gate_proj experts.*.up_proj experts.*.w1 experts.*.w3"),
    ("in", "values", EXPERTS, "experts.*.down_proj experts.*.w2"),
    ("out", "queries", TENSOR, "q_proj wq query q_lin q_b_proj SelfAttention.q EncDecAttention.q"),
    ("out", "keys", TENSOR, "k_proj wk key k_lin SelfAttention.k EncDecAttention.k"),
    ("out", "contents", TENSOR, "v_proj wv value v_lin SelfAttention.v EncDecAttention.v"),
    ("out", "stacked", TENSOR, "qkv_proj c_attn"),
    ("out", "triples", TENSOR, "query_key_value"),
    ("in", "results", TENSOR, "o_proj wo out_proj out_lin attention.output.dense attention.dense"),
    ("in", "results", TENSOR, "attn.c_proj SelfAttention.o EncDecAttention.o"),
    ("out", "halves", TENSOR, "gate_up_proj"),
    ("out", "values", TENSOR, "gate_proj up_proj w1 w3 fc1 c_fc intermediate.dense lin1 wi wi_0"),
    ("out", "values", TENSOR, "wi_1 dense_h_to_4h kv_b_proj"),
    ("in", "values", TENSOR, "down_proj w2 fc2 c_proj output.dense lin2 dense_4h_to_h"),
    ("table", "values", TENSOR, "embed_tokens word_embeddings wte tok_embeddings embed_in shared"),
    ("head", "values", TENSOR, "lm_head output embed_out"),
)  # fmt: skip
# The names of embedding tables, of tables that are never tied to the head, and of heads.
TABLES = (*(name for row in TABLE if row[0] == "table" for name in row[3].split()), "embeddings")
UNTIED_TABLES = ("embed_tokens_per_layer",)
HEADS = tuple(name for row in TABLE if row[0] == "head" for name in row[3].split())
# Tensors that hold all experts of a layer: they are split between experts, along the first axis.
STACKED_EXPERTS = "experts.gate_up_proj* experts.down_proj*"
# Models whose linear layers have weights [inputs, outputs], and the names of these layers.
TRANSPOSED = frozenset({"gpt2", "openai-gpt"})
TRANSPOSED_MAPS = ("c_attn", "c_fc", "c_proj", "attn.c_proj")
# Parts of multimodal models: pattern of their tensor names → key of their settings.
PARTS = {"*vision*.": "vision_config", "*audio*.": "audio_config", "": "text_config"}
# The keys of each number; the first is today's.
KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
}
# Encoders, which process all input at once and therefore have no KV cache.
ENCODERS = frozenset(
    "bert roberta xlm-roberta camembert distilbert albert electra deberta deberta-v2 mpnet "
    "modernbert nomic_bert esm vit".split()
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Heads(NamedTuple):
    """The sizes of attention in a configuration; None for each that the configuration does not give.

    Attributes:
        layers: number of layers with attention.
        heads, kv_heads: H query heads and K KV heads.
        head_dim, value_dim: width of a head of queries and keys, and of a head of values.
        window: maximum number of tokens that the KV cache keeps; None: all.
    """

    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    value_dim: int | None
    window: int | None = None


class Fixed(NamedTuple):
    """A recurrent state of a sequence, whose size does not depend on the number of tokens.

    Attributes:
        layers: number of layers that have it.
        shape, dtype: shape and dtype of one layer's state of one sequence.
        axis: index of the axis that is split over the mesh axis "model" if that divides it evenly;
            None: the state is replicated.
    """

    layers: int
    shape: tuple[int, ...]
    axis: int | None
    dtype: DType


def rules(config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The rules for ``model.to(mesh, rules=...)``: patterns of names and how such tensors are split.

    Args:
        config: content of ``config.json``, for the numbers of heads. Without these numbers,
            queries, keys and values are split by rows, also inside heads.

    Returns:
        Pattern → ``Split``. There is no rule for a tensor that matches no pattern.

    Example:
        >>> found = rules({"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64})
        >>> found["*.k_proj.weight"].segments
        (Segment(size=16, num_heads=2),)
        >>> found["*.down_proj.weight"].axis, "norm.weight" in found
        (1, False)
    """
    config = {} if config is None else config
    found: dict[str, Any] = {}
    for mark, key in PARTS.items():
        part = config.get(key)
        if isinstance(part, Mapping) or not mark:
            part = part if isinstance(part, Mapping) else config
            model = part.get("model_type", config.get("model_type"))
            transposed = TRANSPOSED_MAPS if isinstance(model, str) and model in TRANSPOSED else ()
            for name, rule in _entries(heads(part), transposed):
                for start in (mark,) if mark else ("", "*."):
                    found[f"{start}{name}"] = rule
    return found


def _entries(counts: Heads, transposed: tuple[str, ...]) -> Iterator[tuple[str, Split]]:
    """(Name, Split) for the weight and the bias of every layer in the table."""
    for pattern in STACKED_EXPERTS.split():
        yield pattern, Split(0, over=EXPERTS)
    for side, what, over, layers in TABLE:
        for layer in layers.split():
            split = Split(int(side == "in"), _segments(what, counts), what == "halves", over=over)
            if side in ("table", "head"):
                split = dataclasses.replace(split, fallback=1, fsdp=1 if side == "table" else None)
            for name, one in split.of_linear(int(layer in transposed)).items():
                yield f"{layer}.{name}", one


def _segments(what: str, counts: Heads) -> tuple[Segment, ...]:
    """The heads along one side of a linear layer; empty if their numbers are not known."""
    q, k, d, v = counts.heads, counts.kv_heads, counts.head_dim, counts.value_dim
    if what in ("values", "halves") or not (q and k and d and v):
        return ()
    parts = {
        "queries": [(q, d)], "keys": [(k, d)], "contents": [(k, v)], "results": [(q, v)],
        "stacked": [(q, d), (k, d), (k, v)], "triples": [(q, 3 * d)],
    }  # fmt: skip
    return tuple(Segment.head_aware(count, width) for count, width in parts[what])


def generic(name: str) -> str:
    """A tensor name with each number replaced by ``*``: equal for the tensors of all layers and experts.

    Example:
        >>> generic("layers.3.experts.10.w1.weight")
        'layers.*.experts.*.w1.weight'
    """
    return _NUMBER.sub("*", name)


def layer_of(name: str) -> str:
    """The own name of the layer that a tensor belongs to.

    Example:
        >>> layer_of("model.layers.3.self_attn.q_proj.weight")
        'q_proj'
    """
    return name.rpartition(".")[0].rpartition(".")[2]


# --- what a configuration says ----------------------------------------------------------------


def heads(config: Any) -> Heads:
    """Reads the Heads of a configuration: the content of a ``config.json``, or a dataclass.

    Example:
        >>> heads({"n_layer": 2, "n_head": 4, "n_embd": 32})
        Heads(layers=2, heads=4, kv_heads=4, head_dim=8, value_dim=8, window=None)
    """
    settings = text_part(config)
    found = {what: count(settings, keys) for what, keys in KEYS.items()}
    h, k, d = found["heads"], found["kv_heads"], found["head_dim"]
    if k is None:
        k = 1 if settings.get("multi_query") is True else h
    latent = [count(settings, (key,)) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(latent):
        d = sum(n or 0 for n in latent)
    elif d is None and h and found["hidden"]:
        d = found["hidden"] // h
    return Heads(found["layers"], h, k, d, count(settings, ("v_head_dim",)) or d)


def text_part(config: Any) -> Mapping[str, Any]:
    """The settings of the text model: ``text_config``, or the configuration itself without one."""
    if dataclasses.is_dataclass(config):
        config = vars(config)
    if not isinstance(config, Mapping):
        return {}
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def count(settings: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of these settings that is a positive integer; None if none is (a file may hold anything)."""
    return next((n for n in map(settings.get, keys) if type(n) is int and n > 0), None)
