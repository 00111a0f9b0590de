"""Nemotron-H (also Nemotron Nano 2): each layer is Mamba 2, attention without RoPE, or an MLP.

Source: arXiv:2504.03624; transformers' ``modeling_nemotron_h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..nn.kv_cache.kinds import KeysValues, Shared, States
from .config import setting
from .decoder.attention import Cached, DecoderAttention, Step
from .decoder.block import PlainMLP
from .decoder.config import DecoderConfig, kinds_of, own
from .decoder.mamba2 import Mamba2Mixer, Mamba2Settings
from .decoder.mixer import MixerLayer
from .decoder.model import KNOWN, Decoder, DecoderFamily, DecoderModel
from .gguf.architectures.mamba2 import NEMOTRON_H_GGUF
from .parts.aliases import alias

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention",
    "full_attention": "attention", "mlp": "mlp",
}  # fmt: skip
_OF_EXPERTS = ("n_routed_experts", "n_shared_experts", "routed_scaling_factor", "num_local_experts")
_DEFAULT = ["linear_attention", "moe", "full_attention", "mlp"]


@dataclass(frozen=True)
class NemotronHConfig(DecoderConfig):
    """The settings of a Nemotron-H without experts.

    Attributes:
        mamba_num_heads, mamba_head_dim, n_groups, ssm_state_size, conv_kernel: sizes of Mamba 2.
        time_step_min: minimum length of a time step.
        kinds: kind of each layer: "mamba", "attention" or "mlp".
        mamba: the settings of Mamba 2.
    """

    model_type = "nemotron_h"
    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8}

    norm: str = own("wide_rms")
    rms_norm_eps: float = setting("layer_norm_epsilon", default=1e-5)
    max_position_embeddings: int = setting(default=4096, minimum=1)
    head_dim: int | None = setting(default=128, minimum=1, held="axis")
    hidden_act: str = setting("mlp_hidden_act", default="relu2")
    mamba_hidden_act: str = setting(default="silu")
    mamba_num_heads: int = setting(default=128, minimum=1, held="axis")
    mamba_head_dim: int = setting(default=64, minimum=1, held="axis")
    n_groups: int = setting(default=8, minimum=1, held="axis", also=("mamba_n_groups",))
    ssm_state_size: int = setting(default=128, minimum=1, held="axis")
    conv_kernel: int = setting(default=4, minimum=2, held="axis", also=("mamba_d_conv",))
    use_conv_bias: bool = setting(default=True, also=("mamba_conv_bias",))
    use_bias: bool = setting(default=False)
    time_step_min: float = setting(default=0.001, also=("mamba_dt_min",))
    rope: Any = own(None)
    kinds: tuple = own(())

    def __post_init__(self) -> None:
        kinds = tuple(self.kinds) or ("mamba",) * self.num_hidden_layers
        object.__setattr__(self, "kinds", kinds)
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(f"{len(kinds)} entries say what {self.num_hidden_layers} layers are")
        mamba = Mamba2Settings(
            self.mamba_num_heads, self.mamba_head_dim, self.n_groups, self.ssm_state_size,
            self.conv_kernel, self.use_bias, self.use_conv_bias,
            (self.time_step_min, float("inf")), self.mamba_hidden_act, self.rms_norm_eps,
        )  # fmt: skip
        object.__setattr__(self, "mamba", mamba)
        super().__post_init__()

    @property
    def layer_kinds(self) -> tuple:
        """A kind for each layer; layers of one kind have the same tensors."""
        return self.kinds

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """The states of Mamba 2, the keys and values of attention, or nothing for an MLP."""
        if self.kinds[number] == "mamba":
            return {Mamba2Mixer.group: Mamba2Mixer.kept(self)}
        return super().states(number) if self.kinds[number] == "attention" else {}

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """Returns no RoPE."""
        return {}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The kinds of the layers, which may be given as letters."""
        key, letters = "layers_block_type", raw.get("hybrid_override_pattern")
        given = raw.get("layer_types") if raw.get(key) is None else raw[key]
        if given is None and letters is not None:
            if not isinstance(letters, str):
                raise ValueError("'hybrid_override_pattern' is not a string")
            given = [_LETTERS.get(letter, letter) for letter in letters]
        kinds = kinds_of({key: _DEFAULT if given is None else given}, _KINDS, key=key)
        for key in _OF_EXPERTS:  # read, so that no warning names them: no layer has experts
            raw.get(key)
        return {
            "kinds": kinds, "attention_bias": False, "num_hidden_layers": len(kinds), "sliding_window": None,
        }  # fmt: skip


class NemotronHLayer(MixerLayer):
    """``x + mixer(norm(x))``, where the mixer is Mamba 2, attention or an MLP."""

    def make_mixer(self, config: NemotronHConfig, number: int, dtype: DType) -> Any:
        """Makes the mixer for the layer's kind."""
        self.kind = config.kinds[number]
        if self.kind == "mamba":
            return Mamba2Mixer(config, dtype)
        if self.kind == "attention":
            return DecoderAttention(config, False, dtype)
        return PlainMLP(
            ("up_proj", "down_proj"), config.hidden_size, config.intermediate_size, dtype,
            config.hidden_act, config.mlp_bias,
        )  # fmt: skip

    def mixed(
        self, x: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """The mixer's result, and the cache with these tokens; an MLP does not change the cache."""
        if self.kind == "mlp":
            return self.mixer(x), cached
        return self.mixer(x, step, cached, layer)


class NemotronHBackbone(DecoderModel):
    """The model without its head, with the names of its files: ``embeddings``, ``layers``, ``norm_f``."""

    embed_tokens, norm = alias("embeddings"), alias("norm_f")


class NemotronH(Decoder):
    """A Nemotron-H language model.

    Example:
        >>> config = NemotronHConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2, mamba_num_heads=4,
        ...     mamba_head_dim=4, n_groups=2, ssm_state_size=6, kinds=("mamba", "mlp", "attention"))
        >>> cache = NemotronH(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, cache.more["mamba"].layers
        (1, 1)
    """

    layer_class: ClassVar[Any] = NemotronHLayer
    model_class: ClassVar[Any] = NemotronHBackbone
    model = alias("backbone")


NEMOTRON_H = NemotronH.family = DecoderFamily.of(
    NemotronH, NemotronHConfig,
    prefixes=("model.",),
    ignored=(*KNOWN, "mtp.*"),
    beside=("mtp.*",),
    tied=("lm_head.weight", "backbone.embeddings.weight"),
    bare=("backbone.", ("embeddings.", "layers.", "norm_f.")),
    gguf=NEMOTRON_H_GGUF,
)  # fmt: skip
