"""``GGUFTable``: the GGUF files of a model family, as data that ``register`` takes.

It says how llama.cpp names the architecture, its tensors and its settings. A family without one is
neither read from GGUF files nor written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...graph.weights import WeightData
from ..config import ModelConfig
from .config.llama_cpp import describe
from .config.read import MODELS, WINDOWS, Architecture, Config, Shapes
from .config.rope import ATTENTION_FACTOR, LOG_MULTIPLIER
from .metadata import Settings
from .names import ARCHITECTURES, KEYS, QUERIES, Rule, decoder_table

Tensors = Mapping[str, WeightData]

# Hugging Face's model_type → GGUF's architecture. The model type also names the configuration class.
ARCHITECTURE_OF: MutableMapping[str, str] = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama",
    "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "gpt2": "gpt2", "bert": "bert",
}  # fmt: skip

# Queries and keys whose rows are permuted, because llama.cpp rotates neighbouring features.
PERMUTED: Mapping[str, Rule] = {
    ".attn_q": Rule("self_attn.q_proj", QUERIES),
    ".attn_k": Rule("self_attn.k_proj", KEYS),
}
# The tensors of a model with LayerNorm and biases everywhere.
PLAIN_BIASES = (
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_up", "ffn_down", "attn_norm",
    "ffn_norm", "output_norm",
)  # fmt: skip
# One linear layer for gate and up.
GATE_UP: Mapping[str, str | None] = {".ffn_gate": None, ".ffn_up": "mlp.gate_up_proj"}

# The names of encoders, in place of those that Llama-like decoders share.
ENCODER_NAMES: Mapping[str, str | None] = {
    "token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings",
    "output": None, "output_norm": None, ".attn_norm": None, ".ffn_norm": None,
    ".attn_q": None, ".attn_k": None, ".attn_v": None,
}  # fmt: skip
# The tensors of encoders that llama.cpp reads a bias of.
ENCODER_BIASES = (
    "token_embd_norm", "attn_qkv", "attn_output", "attn_output_norm", "ffn_gate", "ffn_up", "ffn_down",
    "layer_output_norm",
)  # fmt: skip


@dataclass(frozen=True)
class GGUFTable:
    """How a GGUF file names a family's architecture, tensors and settings.

    Attributes:
        architecture: llama.cpp's name of the architecture, ``general.architecture``.
        tensors: GGUF's name of a tensor, without ``.weight`` and with a dot in front for one of a
            layer → the checkpoint's name, or a ``Rule`` with a change of the values. It adds to the
            names that Llama-like decoders share; None takes one away.
        keys: metadata keys of numbers and flags, without the architecture → keys of ``config.json``.
            It adds to those that Llama-like decoders share.
        fixed: settings that are the same in every file, because llama.cpp's code has them.
        read: further settings, from the file's metadata, the shapes of its tensors and the
            configuration so far.
        write: further metadata, from the family's config; it raises UnsupportedModelError for one
            that a file cannot hold.
        biases: the tensors of a layer that llama.cpp reads a bias of.
        epsilon: metadata key of the norms' epsilon, and its key in ``config.json``.
        layer: beginning of the checkpoint's names of a layer's tensors, ``*`` being its number.
        period: n, where every n-th layer sees all tokens if there is a sliding window.
        has_rope: whether attention has RoPE; without it files have no settings of it.
        attends: whether there is attention; without it there are no MLPs either.
        lists_windows: whether files list the layers with a sliding window, so that any may have one.
        listed: keys that may differ between layers; the configuration so far has the first layer's, and
            ``read`` reads the others.
        is_partial: whether RoPE may rotate a part of each head.
        is_tied: whether the head is always the embedding table.
        has_head: whether llama.cpp needs a head that is not the embedding table.
        is_square: whether it needs heads that are together as wide as the hidden states.
        is_divided: whether RoPE's frequencies may have divisors, as in Llama 3.
        is_long: whether they may have divisors that depend on the length, as in LongRoPE.
        unused: those of ``keys`` that llama.cpp has no use for.
        written: metadata keys that ``write`` gives and llama.cpp reads.
        truncates: whether the range of YaRN's interpolated pairs is rounded to whole pairs.
        computed: settings that others are computed from, and that the file holds in their place.
        model_types: ``model_type`` of further configurations that are written as this architecture.
        width: metadata key of the width of a head; None: that of a key, which a value shares.
        log_multiplier: what files hold of YaRN's ``mscale_all_dim``, which ``mscale`` equals then, as a
            multiple of it; 0: nothing.
        numbers: metadata keys, complete ones, of lists with one number for each layer → the tensor of
            a layer that is that number, and its shape.
        join: tensors by the checkpoint's names → those of a checkpoint, where a file holds other parts
            of them, or other numbers; the first argument is the file's metadata.
        split: the inverse, before tensors are renamed; the first argument is the family's config.
        instead: what the family's config is written as, if not as this architecture: another that has a
            table, and settings, by names of the config's fields, that have other values then; None: as this one.

    Example:
        >>> GGUFTable("mine", {".ffn_norm": "norm_2"}).names["blk.*.ffn_norm"]
        (Rule(name='model.layers.*.norm_2', layout=Same(), only=''),)
    """

    architecture: str
    tensors: Mapping[str, str | Rule | Sequence[Rule] | None] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Settings, Shapes, Config], Config] | None = None
    write: Callable[[Any], Mapping[str, Any]] | None = None
    biases: Collection[str] = ("attn_q", "attn_k", "attn_v")
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    layer: str = "model.layers.*."
    period: int | None = None
    has_rope: bool = True
    attends: bool = True
    lists_windows: bool = False
    listed: Collection[str] = ()
    is_partial: bool = False
    is_tied: bool = False
    is_divided: bool = False
    is_long: bool = False
    has_head: bool = False
    is_square: bool = False
    unused: Collection[str] = ()
    written: Collection[str] = ()
    truncates: bool = True
    computed: Collection[str] = ()
    model_types: Collection[str] = ()
    width: str | None = None
    log_multiplier: float = 0.0
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    join: Callable[[Settings, Tensors], Tensors] | None = None
    split: Callable[[Any, Tensors], Tensors] | None = None
    instead: Callable[[Any], tuple[str, Mapping[str, Any]] | None] | None = None

    @property
    def names(self) -> Mapping[str, Sequence[Rule]]:
        """GGUF's names of all tensors, with ``blk.*`` for a layer → the checkpoint's."""
        return decoder_table(self.tensors, layer=self.layer)


TABLES: dict[str, GGUFTable] = {}
"""The tables that were added, by architecture."""


def add_table(table: GGUFTable, model_type: str, architecture: str) -> None:
    """Makes the GGUF files of a family known.

    Args:
        table: the table.
        model_type, architecture: the family's names as in ``config.json``.
    """
    name = table.architecture
    TABLES[name] = table
    ARCHITECTURES[name] = table.names
    MODELS[name] = Architecture(
        model_type, architecture, dict(table.fixed), table.read, has_rope=table.has_rope,
        attends=table.attends, epsilon=table.epsilon,
        keys=table.keys, is_partial=table.is_partial, period=table.period, width=table.width,
        log_multiplier=table.log_multiplier, listed=table.listed,
    )  # fmt: skip
    window = ["attention.sliding_window"] if table.period else []
    window += [WINDOWS] if table.lists_windows else []
    rope = [LOG_MULTIPLIER] if table.log_multiplier else []
    rope += [ATTENTION_FACTOR] if table.is_long else []
    keys = {table.epsilon[0], *table.keys, *table.written, *window, *rope} - set(table.unused)
    describe(name, keys, table.biases, is_tied=table.is_tied, is_divided=table.is_divided)
    for kind in (model_type, *table.model_types):
        ARCHITECTURE_OF[kind] = name
        ModelConfig.by_model_type.setdefault(kind, ModelConfig.by_model_type[model_type])
