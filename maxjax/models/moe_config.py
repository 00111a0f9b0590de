"""Floor 5. The settings of decoders with experts: Mixtral and Qwen 3.

Below: the decoder's configuration. Above: moe, the models.

Shapes: E hidden size, X experts of F features between, k experts for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import setting
from .decoder_config import DecoderConfig, own
from .decoder_rope import read_rope

# The maps of an expert, in the order gate, up, down.
MAPS_W = ("w1", "w3", "w2")
MAPS_PROJ = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MoEConfig(DecoderConfig):
    """The settings of a decoder with experts.

    Attributes:
        num_experts, num_experts_per_tok: X and k.
        moe_intermediate_size: F; ``intermediate_size`` where it is not said.
        norm_topk_prob: Whether the shares of the chosen experts add up to 1.
        sparse: For each layer, whether it has experts; by default all.
        maps: What the checkpoint calls an expert's gate, up and down.
    """

    num_experts: int = setting(default=8, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=2, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=None, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=True)
    sparse: tuple = own(())
    maps: tuple = own(MAPS_PROJ)

    def __post_init__(self) -> None:
        sparse = self.sparse or (self.num_experts > 0,) * self.num_layers
        object.__setattr__(self, "sparse", tuple(sparse))
        super().__post_init__()
        if any(self.sparse) and self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"'num_experts_per_tok' {self.num_experts_per_tok} of {self.num_experts} experts"
                " cannot be chosen"
            )

    @property
    def expert_size(self) -> int:
        """F."""
        return self.moe_intermediate_size or self.intermediate_size


def _counts(raw: Mapping[str, Any], name: str, default: int) -> Any:
    """How many experts there are: two names are in use, and transformers takes either."""
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[name]
    found = raw.get(name)
    found = raw.get(other) if found is None else found
    return default if found is None else found


@dataclass(frozen=True)
class MixtralConfig(MoEConfig):
    """The settings of a Mixtral: a Mistral whose layers all have experts."""

    max_position_embeddings: int = setting(default=131072, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    num_experts: int = setting(default=8, minimum=1, held="axis", also=("num_local_experts",))
    maps: tuple = own(MAPS_W)

    @classmethod
    def counted(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """Its experts are as wide as the MLP of other models, whatever else a file says."""
        return raw, frozenset({"moe_intermediate_size"})

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The experts; there are no biases, whatever its file says."""
        return {
            "num_experts": _counts(raw, "num_local_experts", 8),
            "num_key_value_heads": raw.get("num_key_value_heads", 8),
            "moe_intermediate_size": None, "norm_topk_prob": True,
            "attention_bias": False, "mlp_bias": False,
        }  # fmt: skip

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """With another base where the file does not say."""
        return {"rope": read_rope(raw, context, 1e6)}


@dataclass(frozen=True)
class Qwen3MoEConfig(MoEConfig):
    """The settings of a Qwen 3 with experts in all or some layers."""

    max_position_embeddings: int = setting(default=32768, minimum=1)
    num_experts: int = setting(default=128, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=8, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=768, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=False)
    qk_norm: bool = own(True)

    @classmethod
    def counted(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """The width of an MLP counts nothing where every layer has experts."""
        try:
            sparse = _sparse(raw, _counts(raw, "num_experts", 128))
        except ValueError:
            sparse = ()
        return raw, frozenset({"intermediate_size"} if sparse and all(sparse) else ())

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The experts, which layers have them, and the window, if it is used."""
        window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
        experts = _counts(raw, "num_experts", 128)
        return {
            "num_experts": experts, "sliding_window": window, "mlp_bias": False,
            "num_key_value_heads": raw.get("num_key_value_heads", 4),
            "sparse": _sparse(raw, experts),
        }  # fmt: skip


def _sparse(raw: Mapping[str, Any], experts: Any) -> tuple[bool, ...]:
    """Which layers have experts: each ``decoder_sparse_step``-th that is not listed.

    Raises:
        ValueError: A setting is of the wrong type.
    """
    layers, step = raw.get("num_hidden_layers"), raw.get("decoder_sparse_step")
    step = 1 if step is None else step
    dense = raw.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if type(step) is not int or step < 1:
        raise ValueError(f"'decoder_sparse_step' is {str(step)[:60]}, not a positive integer")
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError("'mlp_only_layers' is not a list of integers")
    if type(layers) is not int or not 0 < layers <= 1000 or type(experts) is not int:
        return ()  # the fields' own checks say so
    listed = set(dense)
    return tuple(i not in listed and experts > 0 and (i + 1) % step == 0 for i in range(layers))
