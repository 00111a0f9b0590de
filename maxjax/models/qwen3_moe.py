"""Qwen 3 MoE: a Qwen 3 in which all or some MLPs are mixtures of experts.

Source: arXiv:2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import count_of, layers_of, own
from .decoder.expert_files import MoEFamily
from .decoder.experts import MoEConfig, MoELayer
from .decoder.model import Decoder
from .multimodal import SIGHT
from .qwen import WINDOW


def sparse_layers(raw: Mapping[str, Any], experts: Any) -> tuple[bool, ...]:
    """Whether each layer has experts: every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not list.

    Raises:
        ValueError: a setting is of the wrong type.
    """
    layers, step = layers_of(raw), count_of(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError("'mlp_only_layers' is not a list of integers")
    if not layers or type(experts) is not int:
        return ()  # the checks of these fields raise later
    listed = set(dense)
    return tuple(i not in listed and experts > 0 and (i + 1) % step == 0 for i in range(layers))


@dataclass(frozen=True)
class Qwen3MoEConfig(MoEConfig):
    """The settings of a Qwen 3 with experts in all or some layers."""

    model_type = "qwen3_moe"

    unsaid: ClassVar[Mapping[str, Any]] = {**WINDOW, "num_key_value_heads": 4}

    max_position_embeddings: int = setting(default=32768, minimum=1)
    num_experts: int = setting(default=128, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=8, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=768, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=False)
    qk_norm: bool = own(True)

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """:meth:`ModelConfig.bounded_sizes`, without ``intermediate_size`` if every layer has experts."""
        try:
            sparse = sparse_layers(raw, cls.value(raw, "num_experts"))
        except ValueError:
            sparse = ()
        if sparse and all(sparse):
            return {key: raw[key] for key in raw if key != "intermediate_size"}
        return raw

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers that have experts, and the sliding window, if it is used."""
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        sparse = sparse_layers(raw, cls.value(raw, "num_experts"))
        return {"sliding_window": window, "mlp_bias": False, "sparse": sparse}


class Qwen3MoE(Decoder):
    """A Qwen 3 MoE language model.

    Example:
        >>> config = Qwen3MoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, sparse=(False, True))
        >>> [type(layer.mlp).__name__ for layer in Qwen3MoE(config, stacked=False).model.layers]
        ['MLP', 'SparseMLP']
    """

    layer_class: ClassVar[Any] = MoELayer


QWEN3_MOE = Qwen3MoE.family = MoEFamily.of(
    Qwen3MoE, Qwen3MoEConfig, "Qwen3MoeForCausalLM", "Qwen3MoeModel", sight=SIGHT
)
