"""Mistral: a Llama with sliding-window attention and fewer KV heads than query heads; and Ministral 3.

In a Ministral 3, queries beyond the original context length are multiplied by a factor that grows with
the position. Mistral Small 3.1 and later and Ministral 3 are published as parts of multimodal models.

Source: arXiv:2310.06825; transformers' ``modeling_ministral3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import DecoderConfig
from .decoder.model import Decoder, DecoderFamily
from .gguf.architectures.mistral import MINISTRAL3_GGUF
from .multimodal import SIGHT
from .parts.rotary import QueryScaling, rope_or, rope_settings

_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True)
class Ministral3Config(DecoderConfig):
    """The settings of a Ministral 3."""

    model_type = "ministral3"
    fixed = {"attention_bias": False, "mlp_bias": False}
    causal_only: ClassVar[bool] = False

    unsaid: ClassVar[Mapping[str, Any]] = {}
    unsaid_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _LENGTH: 16384, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip

    num_key_value_heads: int | None = setting(default=8, minimum=1, held="axis")
    head_dim: int | None = setting(default=128, minimum=1, held="axis")
    max_position_embeddings: int = setting(default=262144, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """The RoPE, and the scaling of queries, which is among RoPE's settings."""
        found = super().ropes(raw, context)
        name, given = rope_settings(rope_or(raw, cls.unsaid_rope))
        beta, length = given.get("llama_4_scaling_beta"), given.get(_LENGTH)
        if beta is not None:
            good = isinstance(beta, (int, float)) and beta >= 0
            if not (good and isinstance(length, (int, float)) and 0 < length < float("inf")):
                raise ValueError(
                    f"'llama_4_scaling_beta' in '{name}' needs two numbers, itself and '{_LENGTH}'"
                )
            found["query_scaling"] = QueryScaling(float(beta), float(length))
        return found

    def spelled(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The scaling of queries, among RoPE's settings."""
        if self.query_scaling is None:
            return raw
        own = {
            "llama_4_scaling_beta": self.query_scaling.beta,
            _LENGTH: int(self.query_scaling.length),
        }
        return {**raw, "rope_scaling": {**raw["rope_scaling"], **own}}


class Ministral3(Decoder):
    """A Ministral 3 language model."""


MINISTRAL3 = Ministral3.family = DecoderFamily.of(
    Ministral3, Ministral3Config, gguf=MINISTRAL3_GGUF, sight=SIGHT
)
