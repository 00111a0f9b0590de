"""StableLM 2: LayerNorm, RoPE of a quarter of each head, and in some sizes attention and MLP in parallel.

Source: arXiv:2402.17834; transformers' ``modeling_stablelm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..dtype import DType
from ..errors import UnsupportedModelError
from .config import setting
from .decoder.block import DecoderLayer, ParallelLayer
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder
from .family import Family
from .gguf.architectures.stablelm import STABLELM_GGUF
from .names import DECODER, Names
from .parts.rotary import Rope


@dataclass(frozen=True)
class StableLMConfig(DecoderConfig):
    """The settings of a StableLM 2.

    Attributes:
        use_parallel_residual: whether attention and MLP are added to the same hidden states.

    Raises:
        UnsupportedModelError: a file has a norm for each head (``qk_layernorm``).
    """

    model_type = "stablelm"

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32}

    max_position_embeddings: int = setting(default=4096, minimum=1)
    rms_norm_eps: float = setting("layer_norm_eps", default=1e-5)
    attention_bias: bool = setting("use_qkv_bias", default=False)
    output_bias: bool | None = own(False)
    use_parallel_residual: bool = setting(default=False)
    norm: str = own("layer")
    rope: Rope = own(Rope(part=0.25))

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """No sliding window, and no biases in the MLP.

        Raises:
            UnsupportedModelError: the model has a norm for each head.
        """
        if raw.get("qk_layernorm"):
            raise UnsupportedModelError("'qk_layernorm' of a StableLM, a norm for each head")
        return {"mlp_bias": False, "sliding_window": None}


def layer(config: StableLMConfig, number: int, dtype: DType) -> DecoderLayer:
    """Makes a layer, with attention and MLP one after the other or in parallel."""
    kind = ParallelLayer if config.use_parallel_residual else DecoderLayer
    return kind(config, number, dtype)


class StableLM(Decoder):
    """A StableLM 2 language model.

    Example:
        >>> config = StableLMConfig(100, 32, 16, num_hidden_layers=1, num_attention_heads=2, use_parallel_residual=True)
        >>> [n for n in StableLM(config).raw_state_dict() if "0.post" in n]
        []
    """

    layer_class: ClassVar[Any] = staticmethod(layer)


STABLELM = StableLM.family = Family.of(
    StableLM,
    StableLMConfig,
    "StableLmForCausalLM",
    "StableLmModel",
    names=Names(*DECODER),
    gguf=STABLELM_GGUF,
)
