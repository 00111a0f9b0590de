"""What text encoders share: the base class of their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ...errors import UnsupportedModelError
from ..config import label_names, labels_of
from .config import ArchitectureConfig


class EncoderConfig(ArchitectureConfig):
    """Base class of the configurations of text encoders. It declares no fields."""

    # An encoder is never causal, whatever a file says.
    unused = ("is_causal",)
    # No call reads it: the head's weights have the number.
    _mx_unread: ClassVar[frozenset[str]] = frozenset({"num_labels"})

    def _check(self) -> None:
        """Raise ValueError if fields contradict each other."""
        size, heads = self.hidden_size, self.num_attention_heads  # type: ignore[attr-defined]
        if size % heads:
            raise ValueError(
                f"'{self.key_of('hidden_size')}' {size} is not a multiple of "
                f"'{self.key_of('num_attention_heads')}' {heads}"
            )
        super()._check()

    @property
    def head_dim(self) -> int:
        """D, the width of a head."""
        return self.hidden_size // self.num_attention_heads  # type: ignore[attr-defined]

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        return self.max_position_embeddings  # type: ignore[attr-defined]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, with the number of labels of a classification head.

        Raises:
            UnsupportedModelError: the model is a decoder; or as the architecture says.
        """
        if raw.get("is_decoder"):
            what = cls.__name__.removesuffix("Config")
            raise UnsupportedModelError(f"{what} as a decoder ('is_decoder') is not supported")
        return super().from_hf(raw, **{"num_labels": labels_of(raw), **values})

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with names of labels."""
        return {**super().to_hf(), **label_names(self.num_labels)}  # type: ignore[attr-defined]
