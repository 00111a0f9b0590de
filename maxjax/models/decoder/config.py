"""The settings of a Llama-like decoder; most differences between families are fields here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from ...errors import CheckpointFormatError, UnsupportedModelError
from ...nn.activation import ACTIVATIONS
from ...nn.kv_cache.kinds import KeysValues, Shared, States
from ..config import ModelConfig, setting
from ..multimodal import text_settings
from ..parts.config import LanguageModelConfig
from ..parts.rotary import QueryScaling, Rope, read_rope, rope_or
from ..unread import ReadTracker, warn_of_unread

_Kind = TypeVar("_Kind")
_SLIDES = {"full_attention": False, "sliding_attention": True}


def own(default: Any) -> Any:
    """A field that is never read from a file: each family sets its value."""
    return dataclasses.field(default=default, metadata={"own": True})


@dataclass(frozen=True)
class DecoderConfig(LanguageModelConfig):
    """The settings of a decoder. A field is read from the key of its name, unless it is declared with another key.

    Attributes:
        num_key_value_heads: number of KV heads; ``num_attention_heads`` by default.
        head_dim: ``hidden_size / num_attention_heads`` by default.
        attention_bias, output_bias: whether the projections of queries, keys and values have
            biases, and whether the output projection has one (by default as the others).
        head_bias: whether the head, which computes the logits, has a bias.
        qk_norm: whether each head of queries and keys is normalised before RoPE; "all": all heads
            are normalised together.
        post_norms: whether attention and MLP are normalised after as well as before, as in Gemma 2.
        norm: kind of all norms, a key of ``NORMS`` (``decoder/norm.py``); ``rms_norm_eps`` is the
            epsilon of every kind.
        norm_offset: number added to the weights of norms: 1 in Gemma.
        embedding_scale, residual_scale, logit_scale: factors of the embeddings, of the results that
            attention and MLP add to the hidden states, and of the logits.
        query_scale: factor of the attention scores, instead of ``1/√head_dim``.
        attn_soft_cap, logit_soft_cap: caps of scores and logits, which become
            ``cap · tanh(x / cap)``.
        is_causal: whether a token attends only to those before it. Decoders that were fine-tuned to
            embed texts may attend in both directions (gte-Qwen2).
        sliding_window: number of tokens, itself included, that a token attends to in a sliding layer.
        slides: whether each layer has a sliding window; by default all do if there is a window.
        rotates: whether each layer has RoPE; empty if all do.
        rope, local_rope: rotary position embedding; and that of sliding layers if it differs, else None.
        query_scaling: factor of the queries that grows with their position; None: none.
    """

    # Keys that files of the family may have and that transformers does not use either.
    unused: ClassVar[Collection[str]] = ()
    # Whether all models of the family are causal; files of other families may have ``is_causal: false``.
    causal_only: ClassVar[bool] = True
    # Settings, by key, that are the same in every model of the family, whatever a file says.
    fixed: ClassVar[Mapping[str, Any]] = {}
    # RoPE's settings, for files that have no object with such settings.
    unsaid_rope: ClassVar[Mapping[str, Any]] = {}

    vocab_size: int = setting(minimum=1, held="axis")
    hidden_size: int = setting(minimum=1, held="axis")
    intermediate_size: int = setting(minimum=1, held="axis")
    num_hidden_layers: int = setting(minimum=1, maximum=1000, held="layers")
    num_attention_heads: int = setting(minimum=1, held="axis")
    num_key_value_heads: int | None = setting(default=None, minimum=1, held="axis")
    head_dim: int | None = setting(default=None, minimum=1, held="axis")
    max_position_embeddings: int = setting(default=2048, minimum=1)
    rms_norm_eps: float = setting(default=1e-6)
    hidden_act: str = setting(default="silu")
    tie_word_embeddings: bool = setting(default=False)
    attention_bias: bool = setting(default=False)
    mlp_bias: bool = setting(default=False)
    sliding_window: int | None = setting(default=None, minimum=1)
    is_causal: bool = setting(default=True)
    output_bias: bool | None = own(None)
    head_bias: bool = own(False)
    qk_norm: bool | str = own(False)
    post_norms: bool = own(False)
    norm: str = own("rms")
    norm_offset: float = own(0.0)
    embedding_scale: float = own(1.0)
    residual_scale: float = own(1.0)
    logit_scale: float = own(1.0)
    query_scale: float | None = own(None)
    attn_soft_cap: float | None = own(None)
    logit_soft_cap: float | None = own(None)
    slides: tuple = own(())
    rotates: tuple = own(())
    rope: Rope = own(Rope())
    local_rope: Rope | None = own(None)
    query_scaling: QueryScaling | None = own(None)

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"'{self.key_of('hidden_size')}' {self.hidden_size} is not a multiple of "
                f"'{self.key_of('num_attention_heads')}' {self.num_attention_heads}"
            )
        slides = self.slides or (self.sliding_window is not None,) * self.num_hidden_layers
        derived = {
            "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads or self.num_attention_heads,
            "intermediate_size": self.inner_size,
            "output_bias": self.attention_bias if self.output_bias is None else self.output_bias,
            "slides": tuple(slides),
            "rotates": () if all(self.rotates) else tuple(self.rotates),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if self.causal_only and not self.is_causal:
            raise UnsupportedModelError(f"'is_causal' false of a {self.model_type or 'decoder'}")
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"'num_attention_heads' {self.num_attention_heads} is not a multiple of "
                f"'num_key_value_heads' {self.kv_heads}"
            )
        check_activation(self.key_of("hidden_act"), self.hidden_act)
        check_kinds(self.slides, self.num_hidden_layers)
        if self.rotates and len(self.rotates) != self.num_hidden_layers:
            raise ValueError(
                f"{len(self.rotates)} entries say which of {self.num_hidden_layers} layers have RoPE "
                "('no_rope_layers')"
            )
        if any(self.slides) and self.sliding_window is None:
            raise ValueError("layers have a sliding window, but 'sliding_window' is missing")
        for rope, width in zip((self.rope, self.local_rope), self.rope_widths, strict=True):
            if rope is not None:
                rope.check(width)

    @property
    def width(self) -> int:
        """D, the width of a head."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def inner_size(self) -> int:
        """The inner features of an MLP; 4 · hidden size for the older families whose files may leave it out."""
        given: int | None = self.intermediate_size
        return 4 * self.hidden_size if given is None else given

    @property
    def kv_heads(self) -> int:
        """K, the number of KV heads."""
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def embedding_size(self) -> int:
        """The width of the embedding table, and of the hidden states that the head takes."""
        return self.hidden_size

    def of_layer(self, number: int) -> Self:
        """The settings of layer ``number``, for families whose layers differ in heads or sizes."""
        return self

    @property
    def rope_widths(self) -> tuple[int, int]:
        """The widths of heads that ``rope`` and ``local_rope`` rotate."""
        return self.width, self.width

    @property
    def ropes_by_length(self) -> list[Rope]:
        """The Ropes whose frequencies depend on the length of the text (LongRoPE, dynamic NTK)."""
        ropes = (self.rope, self.local_rope)
        return [rope for rope in ropes if rope is not None and rope.depends_on_length]

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer; None: it has none."""
        return self.sliding_window if self.slides[layer] else None

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """What the cache holds for layer ``number``, by the name of the layer's group in the cache."""
        near = self.slides[number]
        window = self.sliding_window if near else None
        kept = KeysValues(self.kv_heads, self.width, window, self.num_attention_heads)
        return {"sliding" if near else "full": kept}

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
    ) -> Self:
        """:meth:`ModelConfig.from_dict` with :meth:`derived` settings and RoPE in both spellings.

        For a multimodal model, the settings of its text model are read.

        Raises:
            CheckpointFormatError: as for :meth:`ModelConfig.from_dict`.
            UnsupportedModelError: a setting changes results and is not supported; the message
                names it.
        """
        try:
            raw = text_settings(raw)
        except ValueError as error:
            raise CheckpointFormatError(str(error), path=path) from None
        if raw.get("quantization_config"):
            method = raw["quantization_config"]
            method = method.get("quant_method") if isinstance(method, Mapping) else None
            raise UnsupportedModelError(
                f"'quantization_config' (quant_method {str(method)[:60]!r}): weights that are quantised so cannot be "
                "written as GGUF, calibrated, or quantised again"
            )
        if raw.get("per_layer_config"):
            raise UnsupportedModelError(
                f"'per_layer_config', settings of single layers, of a {cls.model_type or cls.__name__}"
            )
        raw = {**cls.unsaid, **raw}
        looked = ReadTracker(raw)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        hidden = {name for name, field in fields.items() if field.metadata.get("own")}
        given = {key: value for key, value in raw.items() if key not in hidden}
        try:
            # The context length is read before the other settings, since RoPE's settings refer to it.
            context = given.get("max_position_embeddings")
            context = fields["max_position_embeddings"].default if context is None else context
            if type(context) is int and context > 0:
                given |= cls.ropes(looked, context)
            given |= {**cls.fixed, **cls.derived(looked)}
        except (ValueError, OverflowError) as error:
            raise CheckpointFormatError(str(error), path=path) from None
        found = ModelConfig.from_dict.__func__(cls, given, path=path)  # type: ignore[attr-defined]
        read = [field for field in fields.values() if not field.metadata.get("own")]
        known = {field.metadata.get("key") or field.name for field in read}
        known |= {key for field in read for key in field.metadata.get("aliases", ())}
        known |= {*cls.unused, *looked.keys_seen}
        warn_of_unread(cls.model_type or cls.__name__, raw, known)
        return found

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """:meth:`ModelConfig.bounded_sizes`; for a multimodal model, the text model's settings."""
        try:
            return text_settings(raw)
        except ValueError:  # from_dict says so
            return {}

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """The RoPE fields of a file, by name; ``context`` is ``max_position_embeddings``.

        Base, rotated part and order of features that a file does not give are those of the field's default.

        Raises:
            ValueError, UnsupportedModelError: as for ``read_rope``.
        """
        raw, theta = rope_or(raw, cls.unsaid_rope), cls.unsaid.get("rope_theta", cls.rope.theta)
        part = cls.rope.part if cls.rope.part < 1 else None
        found = read_rope(raw, context, theta, part=part, interleaved=cls.rope.interleaved)
        return {"rope": found}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Values, by key, that are computed from others and replace those of the file and of ``fixed``.

        Raises:
            ValueError: a value in the file is wrong.
        """
        return {}


def check_activation(key: str, name: str) -> None:
    """Checks that the activation function under a key of a configuration is known.

    Raises:
        ValueError: there is no function of that name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"'{key}' is {name[:80]!r}: it must be one of {', '.join(ACTIVATIONS)}")


def all_but_every(n: int, layers: int) -> tuple[bool, ...]:
    """For each layer: True unless it is the n-th, the 2n-th, and so on.

    Example:
        >>> all_but_every(3, 4)
        (True, True, False, True)
    """
    return tuple(bool((i + 1) % n) for i in range(layers))


def count_of(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of a file; the default if the file does not have the key.

    Raises:
        ValueError: the value is not a positive integer.

    Example:
        >>> count_of({"interval": 0}, "interval", 4)
        Traceback (most recent call last):
        ...
        ValueError: 'interval' is 0, not a positive integer
    """
    found = default if raw.get(key) is None else raw[key]
    if type(found) is not int or found < 1:
        raise ValueError(f"'{key}' is {str(found)[:60]}, not a positive integer")
    return found


def layers_of(raw: Mapping[str, Any]) -> int:
    """``num_hidden_layers`` of a file; 0 if it is missing or out of the range of :class:`DecoderConfig`."""
    layers = raw.get("num_hidden_layers")
    return layers if type(layers) is int and 0 < layers <= 1000 else 0


def kinds_of(
    raw: Mapping[str, Any], kinds: Mapping[str, _Kind], default: Sequence[_Kind] = (),
    key: str = "layer_types",
) -> tuple[_Kind, ...]:  # fmt: skip
    """The kind of each layer: from the list under a key, or the default if the file does not have the key.

    Args:
        raw: content of the file.
        kinds: name of a kind of layer in files → its value in the result.
        default: the result for a file without the key.
        key: key of the list.

    Raises:
        ValueError: the value is not a list of strings.
        UnsupportedModelError: the list names an unknown kind of layer.

    Example:
        >>> kinds_of({"layer_types": ["conv", "full_attention"]}, {"conv": 1, "full_attention": 0})
        (1, 0)
    """
    listed = raw.get(key)
    if listed is None:
        return tuple(default)
    if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
        raise ValueError(f"'{key}' is not a list of strings")
    for kind in listed:
        if kind not in kinds:
            raise UnsupportedModelError(
                f"'{key}' with {kind[:80]!r}: supported are {', '.join(kinds)}"
            )
    return tuple(kinds[kind] for kind in listed)


def check_kinds(kinds: Sequence[Any], layers: int) -> None:
    """Checks that there is one kind for each layer.

    Raises:
        ValueError: there are more or fewer.
    """
    if len(kinds) != layers:
        raise ValueError(f"'layer_types' has {len(kinds)} entries for {layers} layers")


def slides_of(raw: Mapping[str, Any], default: Sequence[bool]) -> tuple[bool, ...]:
    """Whether each layer has a sliding window: as ``layer_types`` says, or the default without it.

    Raises:
        ValueError, UnsupportedModelError: as for :func:`kinds_of`.
    """
    return kinds_of(raw, _SLIDES, default)
