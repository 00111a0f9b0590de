"""``GGUFTable``: a description of a model family's GGUF files, which ``Family(gguf=…)`` takes.

It describes how llama.cpp names the architecture, its tensors and its settings. Models of a family without
a table cannot be read from GGUF files or written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

from ...graph.weights import WeightData
from .by_architecture import ByArchitecture
from .config.read import DEEPSTACK, SECTIONS, WINDOWS, MetadataTable
from .config.rope import ATTENTION_FACTOR, LOG_MULTIPLIER
from .metadata import Settings
from .names import KEYS, QUERIES, Rule, decoder_table, plain_table

Tensors = Mapping[str, WeightData]

# Names of queries and keys whose rows are permuted, because llama.cpp rotates neighbouring features.
PERMUTED: Mapping[str, Rule] = {
    ".attn_q": Rule("self_attn.q_proj", QUERIES),
    ".attn_k": Rule("self_attn.k_proj", KEYS),
}
# The tensors with a bias in a model with LayerNorm and biases everywhere.
PLAIN_BIASES = (
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_up", "ffn_down", "attn_norm",
    "ffn_norm", "output_norm",
)  # fmt: skip
# Names of one linear layer for gate and up.
GATE_UP: Mapping[str, str | None] = {".ffn_gate": None, ".ffn_up": "mlp.gate_up_proj"}

# The names of encoders, in place of those that Llama-like decoders share.
ENCODER_NAMES: Mapping[str, str | None] = {
    "token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings",
    "output": None, "output_norm": None, ".attn_norm": None, ".ffn_norm": None,
    ".attn_q": None, ".attn_k": None, ".attn_v": None,
}  # fmt: skip
# The tensors of encoders whose biases llama.cpp reads.
ENCODER_BIASES = (
    "token_embd_norm", "attn_qkv", "attn_output", "attn_output_norm", "ffn_gate", "ffn_up", "ffn_down",
    "layer_output_norm",
)  # fmt: skip


@dataclass(frozen=True)
class GGUFTable(MetadataTable):
    """A description of how GGUF files name a family's architecture, tensors and settings.

    Attributes:
        architecture: llama.cpp's name of the architecture, ``general.architecture``.
        tensors: GGUF's name of a tensor, without ``.weight`` and with a dot in front for a layer's
            tensor → the checkpoint's name, or a ``Rule`` with a change of the values. These names
            are added to those that Llama-like decoders share; None removes a name.
        keys: metadata keys of numbers and flags, without the architecture → keys of ``config.json``.
            They are added to those that Llama-like decoders share.
        constants: settings that are in llama.cpp's code: the same in every file, or in those without their
            key.
        read: function (metadata, shapes of the tensors, configuration so far) → further settings.
        write: function of the family's config → further metadata; it raises UnsupportedModelError
            for a config that a file cannot represent.
        biases: tensors of a layer whose biases llama.cpp reads; None: all.
        epsilon: metadata key of the norms' epsilon, and its key in ``config.json``.
        layer: prefix of the checkpoint's names of a layer's tensors, with ``*`` for the layer's number.
        period: n, where every n-th layer has full attention if there is a sliding window.
        is_decoder: whether files have the names and settings that Llama-like decoders share. If not,
            ``tensors``, ``read`` and ``write`` have all of them.
        required: settings that GGUF has no key for → the only value that a file can stand for.
        has_rope: whether attention has RoPE; without it files have no settings of it.
        attends: whether there are attention and MLPs.
        has_windows: whether llama.cpp may give layers a sliding window.
        lists_windows: whether files list the layers with a sliding window, so that any may have one.
        listed: keys that may differ between layers; the configuration so far has the first layer's
            value, and ``read`` reads the others.
        is_partial: whether RoPE may rotate a part of each head.
        is_tied: whether the head is always the embedding table.
        has_head: whether llama.cpp requires a head that is not tied to the embedding table.
        is_square: whether llama.cpp requires heads that are together as wide as the hidden states.
        is_divided: whether RoPE's frequencies may have divisors, as in Llama 3.
        is_long: whether there may be divisors that depend on the length, as in LongRoPE.
        unused: those of ``keys`` that llama.cpp does not read.
        written: metadata keys that ``write`` returns and llama.cpp reads.
        truncates: whether llama.cpp rounds the range of YaRN's interpolated pairs to whole pairs.
        computed: settings that are not compared when the metadata is read back, since the file holds
            other settings that determine them.
        width: metadata key of the width of a head; None: the width of keys, which values must share.
        log_multiplier: ratio of the number that files hold for YaRN to its ``mscale_all_dim``, which
            then equals ``mscale``; 0: files do not hold it.
        numbers: complete metadata key of a list with one number for each layer → name and shape of the
            layer's tensor that has this number as its value.
        join: function (metadata, tensors by the checkpoint's names) → tensors of a checkpoint, for
            files that hold parts of tensors, or other values.
        split: function (family's config, tensors of a checkpoint), the inverse of ``join``; it is
            applied before tensors are renamed.
        instead: function of the family's config for models that are written as another architecture:
            it returns (architecture, changed config fields), or None to keep this architecture.
        variants: tables of further architectures whose files hold models of this family.
        has_sections: whether it is the architecture of the text half of multimodal models, whose files have the
            sections of M-RoPE.

    Example:
        >>> GGUFTable("mine", {".ffn_norm": "norm_2"}).names["blk.*.ffn_norm"]
        (Rule(name='model.layers.*.norm_2', layout=Same(), only=''),)
    """

    architecture: str
    tensors: Mapping[str, str | Rule | Sequence[Rule] | None] = field(default_factory=dict)
    _: KW_ONLY
    write: Callable[[Any], Mapping[str, Any]] | None = None
    biases: Collection[str] | None = ("attn_q", "attn_k", "attn_v")
    layer: str = "model.layers.*."
    lists_windows: bool = False
    has_windows: bool = True
    is_tied: bool = False
    is_divided: bool = False
    is_long: bool = False
    has_head: bool = False
    is_square: bool = False
    unused: Collection[str] = ()
    written: Collection[str] = ()
    truncates: bool = True
    computed: Collection[str] = ()
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    join: Callable[[Settings, Tensors], Tensors] | None = None
    split: Callable[[Any, Tensors], Tensors] | None = None
    instead: Callable[[Any], tuple[str, Mapping[str, Any]] | None] | None = None
    variants: Sequence[GGUFTable] = ()

    def multimodal(self, architecture: str) -> GGUFTable:
        """Return the table of the text half of multimodal models, whose files have the sections of M-RoPE."""
        return replace(self, architecture=architecture, has_sections=True, variants=())

    @cached_property
    def names(self) -> Mapping[str, Sequence[Rule]]:
        """GGUF's names of all tensors, with ``blk.*`` for a layer → rules for the checkpoint's tensors."""
        make = decoder_table if self.is_decoder else plain_table
        return make(self.tensors, self.layer)

    @property
    def keys_read(self) -> set[str]:
        """The metadata keys that llama.cpp reads beside those of all decoders."""
        window = ["attention.sliding_window"] if self.period else []
        window += [WINDOWS] if self.lists_windows else []
        rope = [LOG_MULTIPLIER] if self.log_multiplier else []
        rope += [ATTENTION_FACTOR] if self.is_long else []
        rope += [SECTIONS, DEEPSTACK] if self.has_sections else []
        return {self.epsilon[0], *self.keys, *self.written, *window, *rope} - set(self.unused)


GGUF_TABLES = ByArchitecture(lambda family: family.gguf)
"""The table of each GGUF architecture."""
