"""Mamba 2 (also Codestral Mamba): layers with a recurrence, without attention and MLP.

Source: arXiv:2405.21060; transformers' ``modeling_mamba2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..nn.kv_cache.kinds import KeysValues, Shared, States
from .config import setting
from .decoder.attention import Cached, Step
from .decoder.config import DecoderConfig, own
from .decoder.mamba2 import Mamba2Mixer, Mamba2Settings, limits_of
from .decoder.mixer import MixerLayer
from .decoder.model import Decoder, DecoderFamily, DecoderModel
from .gguf.architectures.mamba2 import MAMBA2_GGUF
from .parts.aliases import alias


@dataclass(frozen=True)
class Mamba2Config(DecoderConfig):
    """The settings of a Mamba 2, which has no attention, no MLPs and no maximum length of a text.

    Attributes:
        ssm_heads, ssm_head_dim, n_groups, state_size, conv_kernel: sizes of a layer.
        residual_in_fp32: whether residual sums are float32 for every dtype of the model.
        mamba: the settings of the layers.
    """

    model_type = "mamba2"
    fixed = {"attention_bias": False, "mlp_bias": False}

    hidden_size: int = setting(default=4096, minimum=1, held="axis")
    vocab_size: int = setting(default=32768, minimum=1, held="axis")
    intermediate_size: int = own(1)
    num_hidden_layers: int = setting(default=64, minimum=1, maximum=1000, held="layers")
    num_attention_heads: int = own(1)
    num_key_value_heads: int | None = own(1)
    head_dim: int | None = own(1)
    rope: Any = own(None)
    max_position_embeddings: int = setting(default=2**20, minimum=1)
    rms_norm_eps: float = setting("layer_norm_epsilon", default=1e-5)
    ssm_heads: int = setting(default=128, minimum=1, held="axis", also=("num_heads",))
    ssm_head_dim: int = setting(default=64, minimum=1, held="axis", also=("head_dim",))
    n_groups: int = setting(default=8, minimum=1, held="axis")
    state_size: int = setting(default=128, minimum=1, held="axis")
    conv_kernel: int = setting(default=4, minimum=2, held="axis")
    use_bias: bool = setting(default=False)
    use_conv_bias: bool = setting(default=True)
    residual_in_fp32: bool = setting(default=True)
    time_steps: tuple = own((0.0, float("inf")))

    def __post_init__(self) -> None:
        mamba = Mamba2Settings(
            self.ssm_heads, self.ssm_head_dim, self.n_groups, self.state_size, self.conv_kernel,
            self.use_bias, self.use_conv_bias, self.time_steps, self.hidden_act, self.rms_norm_eps,
        )  # fmt: skip
        object.__setattr__(self, "mamba", mamba)
        super().__post_init__()

    def spelled(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The heads under the names that attention's have in other families."""
        names = {"ssm_heads": "num_heads", "ssm_head_dim": "head_dim"}
        return {names.get(key, key): value for key, value in raw.items()}

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """The states of Mamba 2."""
        return {Mamba2Mixer.group: Mamba2Mixer.kept(self)}

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """Returns no RoPE."""
        return {}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The limits of time steps, and the heads, for which files have the keys ``num_heads`` and ``head_dim``."""
        heads = {"ssm_heads": raw.get("num_heads"), "ssm_head_dim": raw.get("head_dim")}
        heads = {key: value for key, value in heads.items() if value is not None}
        return {"time_steps": limits_of(raw), "sliding_window": None, **heads}


class Mamba2Layer(MixerLayer):
    """``x + mixer(norm(x))``, where the norm is computed in the dtype of the weights."""

    def make_mixer(self, config: Mamba2Config, number: int, dtype: DType) -> Mamba2Mixer:
        """Makes the mixer."""
        self.dtype = dtype
        return Mamba2Mixer(config, dtype)

    def normed(self, x: jax.Array) -> jax.Array:
        """The norm of hidden states, which are first converted to the dtype of the weights."""
        return super().normed(x.astype(self.dtype.np))


class Mamba2Backbone(DecoderModel):
    """The model without its head, with the names of its files: ``embeddings``, ``layers``, ``norm_f``."""

    embed_tokens, norm = alias("embeddings"), alias("norm_f")

    def __init__(self, config: Mamba2Config, dtype: DType, layer_class: Any):
        super().__init__(config, dtype, layer_class)
        self.is_wide = config.residual_in_fp32

    def run_layers(self, x: Any, step: Step, cached: Cached) -> tuple[Any, Cached]:
        """Runs all layers, with residual sums in float32 if the configuration says so."""
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if self.is_wide else x
        x, cached = super().run_layers(x, step, cached)
        return x.astype(self.dtype.np), cached


class Mamba2(Decoder):
    """A Mamba 2 language model.

    Example:
        >>> config = Mamba2Config(100, 8, num_hidden_layers=2, ssm_heads=4, ssm_head_dim=4, n_groups=2, state_size=6)
        >>> cache = Mamba2(config).cache(batch=1, capacity=16)
        >>> {name: a.shape for name, a in cache.more["mamba"].arrays.items()}
        {'conv': (2, 1, 3, 40), 'ssm': (2, 1, 4, 4, 6)}
    """

    layer_class: ClassVar[Any] = Mamba2Layer
    model_class: ClassVar[Any] = Mamba2Backbone
    model = alias("backbone")


MAMBA2 = Mamba2.family = DecoderFamily.of(
    Mamba2, Mamba2Config,
    renamed=(("backbone.embedding.weight", "backbone.embeddings.weight"),),
    tied=("lm_head.weight", "backbone.embeddings.weight"),
    bare=("backbone.", ("embeddings.", "layers.", "norm_f.")),
    gguf=MAMBA2_GGUF,
)  # fmt: skip
