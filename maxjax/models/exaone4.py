"""EXAONE 4: norms after attention and MLP and of each head; if there are sliding layers, only they have RoPE.

Source: arXiv:2507.11407; transformers' ``modeling_exaone4``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.block import PostNormLayer
from .decoder.config import DecoderConfig, all_but_every, layers_of, own, slides_of, windowed
from .decoder.model import Decoder, DecoderFamily
from .gguf.architectures.exaone4 import EXAONE4_GGUF


@dataclass(frozen=True)
class Exaone4Config(DecoderConfig):
    """The settings of an EXAONE 4."""

    model_type = "exaone4"

    unsaid: ClassVar[Mapping[str, Any]] = {
        "sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32,
    }  # fmt: skip

    rms_norm_eps: float = setting(default=1e-5)
    qk_norm: bool | str = own(True)

    def spelled(self, raw: dict[str, Any]) -> dict[str, Any]:
        """A window without a layer that has it: then no layer has RoPE."""
        return raw if any(self.rotates or (True,)) else {**raw, "sliding_window": 4096}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with the sliding window. If the model has a window, the other layers have no RoPE."""
        layers, window = layers_of(raw), raw.get("sliding_window")
        slides = slides_of(raw, _pattern(raw.get("sliding_window_pattern"), layers))
        found = {"attention_bias": False, "mlp_bias": False}
        if window is None:
            return {**found, "slides": (False,) * layers}
        # If a window is set but no layer uses it, no layer has RoPE.
        return {**found, "rotates": slides, **windowed(slides, window)}


def _pattern(given: Any, layers: int) -> Sequence[bool]:
    """Whether each layer slides: all but every n-th, or by letters ("LLLG": three local layers, one global)."""
    if given is None or given == 0:
        return [False] * layers
    if isinstance(given, str) and given and set(given) <= set("LG"):
        return [given[i % len(given)] == "L" for i in range(layers)]
    if type(given) is not int or given < 1:
        raise ValueError(
            f"'sliding_window_pattern' is {str(given)[:60]}, neither a number nor letters"
        )
    return all_but_every(given, layers)


class Exaone4(Decoder):
    """An EXAONE 4 language model.

    Example:
        >>> config = Exaone4Config(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> [n for n in Exaone4(config).raw_state_dict() if "0.post" in n]
        ['model.layers.0.post_attention_layernorm.weight',
         'model.layers.0.post_feedforward_layernorm.weight']
    """

    layer_class: ClassVar[Any] = PostNormLayer


EXAONE4 = Exaone4.family = DecoderFamily.of(Exaone4, Exaone4Config, gguf=EXAONE4_GGUF)
