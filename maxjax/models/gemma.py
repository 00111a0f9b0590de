"""Gemma 1, 2 and 3 (text). Attributes are named as in Hugging Face's checkpoints.

All three scale their embeddings by √hidden_size, rounded to the model's dtype, and have norms that
multiply by ``1 + weight``. Gemma 2 adds norms after attention and MLP, soft caps, and a sliding
window in every other layer. Gemma 3 adds norms of queries and keys, and a separate RoPE for the
layers with a sliding window, which are five of every six layers.

Sources: arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..errors import CheckpointFormatError, UnsupportedModelError
from .config import setting
from .decoder.attention import DecoderAttention
from .decoder.block import BothWays, DecoderLayer
from .decoder.config import DecoderConfig, all_but_every, own, slides_of
from .decoder.model import KNOWN, Decoder, DecoderFamily
from .multimodal import SIGHT
from .parts.rotary import Rope, both_ropes

_GELU = "gelu_pytorch_tanh"
# transformers' defaults for Gemma 3's base frequencies.
_THETA, _LOCAL_THETA = 1e6, 1e4


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """The settings of a Gemma, with Hugging Face's defaults for missing keys.

    ``embedding_scale`` is always computed from ``hidden_size``; a value that is passed is ignored.

    Raises:
        UnsupportedModelError: a file sets bidirectional attention, which only Gemma 3 has.
    """

    model_type = "gemma"
    fixed = {"mlp_bias": False, "sliding_window": None}

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 16}
    may_see_both_ways: ClassVar[bool] = False

    head_dim: int | None = setting(default=256, minimum=1, held="axis")
    max_position_embeddings: int = setting(default=8192, minimum=1)
    hidden_act: str = setting(default=_GELU)
    tie_word_embeddings: bool = setting(default=True)
    norm_offset: float = own(1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "embedding_scale", self.hidden_size**0.5)
        super().__post_init__()

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The activation function; files with bidirectional attention may be refused."""
        if raw.get("use_bidirectional_attention") and not cls.may_see_both_ways:
            raise UnsupportedModelError(
                "'use_bidirectional_attention': only causal attention is supported"
            )
        # The first releases say "gelu" and mean its tanh approximation.
        act = _GELU if raw.get("hidden_act") == "gelu" else raw.get("hidden_act")
        return {"hidden_act": act}


@dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """The settings of a Gemma 2: every other layer has the sliding window, starting with the first.

    Attributes:
        query_pre_attn_scalar: number by whose square root queries are divided; ``query_scale`` is
            computed from it.

    Raises:
        ValueError: layers have a sliding window, and ``sliding_window`` is None.
    """

    model_type = "gemma2"
    fixed = {"mlp_bias": False}

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4}
    # Fields that null in a file sets to None; without the key they keep their defaults.
    taken_away: ClassVar[Mapping[str, str]] = {
        "attn_logit_softcapping": "attn_soft_cap",
        "final_logit_softcapping": "logit_soft_cap",
        "sliding_window": "sliding_window",
    }

    hidden_act: str = setting("hidden_activation", default=_GELU)
    sliding_window: int | None = setting(default=4096, minimum=1)
    attn_soft_cap: float | None = setting("attn_logit_softcapping", default=50.0, minimum=1e-3)
    logit_soft_cap: float | None = setting("final_logit_softcapping", default=30.0, minimum=1e-3)
    query_pre_attn_scalar: float = setting(default=256.0, minimum=1e-3)
    post_norms: bool = own(True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "query_scale", self.query_pre_attn_scalar**-0.5)
        if not self.slides:
            object.__setattr__(self, "slides", all_but_every(self.period, self.num_hidden_layers))
        if not any(self.slides):  # A window that no layer uses is dropped.
            object.__setattr__(self, "sliding_window", None)
        super().__post_init__()

    @property
    def period(self) -> int:
        """n, where every n-th layer has full attention, unless ``layer_types`` lists the layers."""
        return 2

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
    ) -> Self:
        """:meth:`DecoderConfig.from_dict`, in which null means no soft cap and no window."""
        found = super().from_dict(raw, path=path)
        taken = [field for key, field in cls.taken_away.items() if raw.get(key, 0) is None]
        try:
            return dataclasses.replace(found, **dict.fromkeys(taken))
        except ValueError as error:
            raise CheckpointFormatError(str(error), path=path) from None

    def spelled(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The scale of queries as an integer, which transformers requires if it is one."""
        scale = raw.get("query_pre_attn_scalar")
        return raw if scale is None else {**raw, "query_pre_attn_scalar": int(scale)}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with a sliding window, if the file lists them."""
        super().derived(raw)  # it refuses some files
        return {"slides": slides_of(raw, ())}


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """The settings of a Gemma 3's text model: all but every sixth layer have the sliding window.

    Attributes:
        sliding_window_pattern: n, where every n-th layer has full attention, unless ``layer_types``
            lists the layers.
        local_rope: RoPE of the layers with the sliding window.
        use_bidirectional_attention: whether tokens also attend to those after them, as in
            EmbeddingGemma (arXiv:2509.20354); half of the sliding window is then on each side.
    """

    model_type = "gemma3_text"

    # Published multimodal files leave out many settings of the text model.
    unsaid: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip

    may_see_both_ways: ClassVar[bool] = True

    max_position_embeddings: int = setting(default=131_072, minimum=1)
    sliding_window_pattern: int = setting(default=6, minimum=1, maximum=1000)
    use_bidirectional_attention: bool = setting(default=False)
    # transformers reads this key too, but never uses it.
    unused: ClassVar[Collection[str]] = ("attn_logit_softcapping",)
    attn_soft_cap: float | None = own(None)
    logit_soft_cap: float | None = setting("final_logit_softcapping", default=None, minimum=1e-3)
    qk_norm: bool = own(True)
    rope: Rope = own(Rope(_THETA))
    local_rope: Rope | None = own(Rope(_LOCAL_THETA))

    @property
    def period(self) -> int:
        """``sliding_window_pattern``."""
        return self.sliding_window_pattern

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """The RoPE of layers with full attention and that of sliding layers, in both spellings."""
        return both_ropes(raw, context, _THETA, _LOCAL_THETA, "rope_local_base_freq")


class Gemma(Decoder):
    """A Gemma 1 language model.

    Example:
        >>> Gemma(GemmaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)).lm_head.weight.shape
        [Dim(100), Dim(8)]
    """


class Gemma2(Decoder):
    """A Gemma 2 language model.

    Example:
        >>> config = Gemma2Config(100, 8, 16, num_hidden_layers=4, num_attention_heads=2)
        >>> config.slides, Gemma2(config).lm_head.weight is None
        ((True, False, True, False), False)
    """


class Gemma3Layer(DecoderLayer):
    """A layer whose attention is bidirectional if the configuration says so."""

    @staticmethod
    def attention_class(config: Any, slides: bool, dtype: Any) -> DecoderAttention:  # type: ignore[override]
        """Makes the attention of a layer."""
        if not config.use_bidirectional_attention:
            return DecoderAttention(config, slides, dtype)
        return BothWays(config, slides, dtype, reach=(config.sliding_window or 0) // 2)


class Gemma3(Decoder):
    """The text model of a Gemma 3. The vision part of multimodal checkpoints is ignored.

    Example:
        >>> config = Gemma3Config(100, 8, 16, num_hidden_layers=7, num_attention_heads=2)
        >>> "".join("LG"[not slides] for slides in config.slides)
        'LLLLLGL'
    """

    layer_class: ClassVar[Any] = Gemma3Layer


GEMMA = Gemma.family = DecoderFamily.of(Gemma, GemmaConfig)
GEMMA2 = Gemma2.family = DecoderFamily.of(Gemma2, Gemma2Config)
GEMMA3 = Gemma3.family = DecoderFamily.of(
    Gemma3, Gemma3Config, "Gemma3ForCausalLM", "Gemma3TextModel",
    # EmbeddingGemma's dense layers in GGUF files belong to its pooling.
    ignored=(*KNOWN, "dense_2.*", "dense_3.*"),
    sight=SIGHT,
)  # fmt: skip
