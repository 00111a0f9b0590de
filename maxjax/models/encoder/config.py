"""The settings of a text encoder that most families share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ...errors import CheckpointFormatError, UnsupportedModelError
from ..config import ModelConfig, labels_of, setting
from ..decoder.config import check_activation, own
from ..parts.rotary import Rope


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """The settings of an encoder, with Hugging Face's defaults for keys that old files lack.

    Attributes:
        hidden_act: activation function of the MLP.
        num_labels: number of scores of a classification head.
        rope, local_rope: rotary position embedding of layers with full attention, and of those with a
            window; None: there is none.
    """

    # No call reads it: the head's weights have the number.
    _mx_unread: ClassVar[frozenset[str]] = frozenset({"num_labels"})

    vocab_size: int = setting(minimum=1, held="axis")
    hidden_size: int = setting(minimum=1, held="axis")
    intermediate_size: int = setting(minimum=1, held="axis")
    num_hidden_layers: int = setting(minimum=1, maximum=1000, held="layers")
    num_attention_heads: int = setting(minimum=1, held="axis")
    max_position_embeddings: int = setting(default=512, minimum=1)
    type_vocab_size: int = setting(default=2, minimum=0, held="axis")
    layer_norm_eps: float = setting(default=1e-12)
    hidden_act: str = setting(default="gelu")
    is_decoder: bool = setting(default=False)
    num_labels: int = own(2)
    rope: Rope | None = own(None)
    local_rope: Rope | None = own(None)

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"'{self.key_of('hidden_size')}' {self.hidden_size} is not a multiple of "
                f"'{self.key_of('num_attention_heads')}' {self.num_attention_heads}"
            )
        check_activation(self.key_of("hidden_act"), self.hidden_act)
        if self.is_decoder:
            what = type(self).__name__.removesuffix("Config")
            raise UnsupportedModelError(f"{what} as a decoder ('is_decoder') is not supported")
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                rope.check(self.width)

    @property
    def width(self) -> int:
        """D, the width of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """The number of KV heads: as many as query heads."""
        return self.num_attention_heads

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        return self.max_position_embeddings

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
    ) -> Self:
        """:meth:`ModelConfig.from_dict` with :meth:`derived` settings.

        Raises:
            CheckpointFormatError: as for :meth:`ModelConfig.from_dict`.
            UnsupportedModelError: a setting changes results and is not supported; the message
                names it.
        """
        hidden = {field.name for field in dataclasses.fields(cls) if field.metadata.get("own")}
        given = {key: value for key, value in raw.items() if key not in hidden}
        try:
            given |= {"num_labels": labels_of(raw), **cls.derived({**cls.unsaid, **raw})}
        except (ValueError, OverflowError) as error:
            raise CheckpointFormatError(str(error), path=path) from None
        return super().from_dict(given, path=path)

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Values, by key, that replace those of the file: fixed by the family or computed from other values.

        Raises:
            ValueError: a value in the file is wrong.
        """
        return {}


def refuse(raw: Mapping[str, Any], usual: Mapping[str, Any], what: str) -> None:
    """Refuses settings that change results and whose value is not supported.

    Args:
        raw: content of ``config.json``.
        usual: key → the only supported value, or a tuple of such values. null counts as absent.
        what: name of the model, for the message.

    Raises:
        UnsupportedModelError: a setting has another value; the message names the setting.

    Example:
        >>> refuse({"prenorm": True}, {"prenorm": False}, "Nomic")
        Traceback (most recent call last):
        ...
        maxjax.errors.UnsupportedModelError: Nomic with 'prenorm' True: only False is supported
    """
    for key, value in usual.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if raw.get(key) is not None and raw[key] not in allowed:
            known = " or ".join(map(repr, allowed))
            raise UnsupportedModelError(
                f"{what} with '{key}' {str(raw[key])[:60]}: only {known} is supported"
            )
