"""An encoder in which layers with full attention and with a window alternate, each kind with its own RoPE.

Source: ModernBERT, arXiv:2412.13663.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import setting
from ..decoder.config import check_kinds, count_of, layers_of, own, slides_of
from ..parts.rotary import Rope, rope_of
from .config import EncoderConfig

_KINDS = ("full_attention", "sliding_attention")
_THETAS = {"global": 160_000.0, "local": 10_000.0}


@dataclass(frozen=True)
class AlternatingConfig(EncoderConfig):
    """The settings of an encoder with windows in some layers.

    Attributes:
        local_attention: number of tokens in a window, half of them on each side.
        local_layers: whether each layer has a window; by default all but every third, from the first on.
    """

    max_position_embeddings: int = setting(default=8192, minimum=1)
    local_attention: int = setting(default=128, minimum=1)
    local_layers: tuple = own(())
    rope: Rope | None = own(Rope(_THETAS["global"]))
    local_rope: Rope | None = own(Rope(_THETAS["local"]))

    def __post_init__(self) -> None:
        if not self.local_layers:
            slides = tuple(bool(i % 3) for i in range(self.num_hidden_layers))
            object.__setattr__(self, "local_layers", slides)
        check_kinds(self.local_layers, self.num_hidden_layers)
        super().__post_init__()

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with windows and the RoPE of each kind, in both spellings."""
        period, layers = count_of(raw, "global_attn_every_n_layers", 3), layers_of(raw)
        context = raw.get("max_position_embeddings")
        context = context if type(context) is int and context > 0 else cls.max_position_embeddings
        given = raw.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or not all(
            isinstance(given.get(kind) or {}, Mapping) for kind in _KINDS
        ):
            raise ValueError("'rope_parameters' must have one object for each kind of layer")
        if not isinstance(raw.get("rope_scaling") or {}, Mapping):
            raise ValueError("'rope_scaling' must be an object")
        ropes = []
        for kind, name in zip(_KINDS, ("global", "local"), strict=True):
            theta = raw.get(f"{name}_rope_theta")
            if theta is None and name == "local" and "local_rope_theta" in raw:
                theta = ropes[0].theta  # null: that of the layers without windows
            part = {"rope_theta": _THETAS[name] if theta is None else theta}
            part |= {**(raw.get("rope_scaling") or {}), **(given.get(kind) or {})}
            ropes.append(rope_of(part, "rope_parameters", context, raw))
        slides = slides_of(raw, [bool(i % period) for i in range(layers)])
        return {"local_layers": slides, "rope": ropes[0], "local_rope": ropes[1]}

    def attention_of(self, number: int) -> dict[str, Any]:
        """The arguments ``window`` and ``rope`` of the ``EncoderAttention`` of layer ``number``."""
        near = self.local_layers[number]
        window = self.local_attention // 2 if near else None
        return {"window": window, "rope": "local" if near else "global"}
