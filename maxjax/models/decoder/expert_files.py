"""The former way to make a Family with experts: its keywords become rows of a table of names."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..family import Family
from ..fused_experts import FusedExperts
from ..names import PREDICTION, Row
from .experts import MAPS_PROJ
from .model import DecoderFamily


@dataclasses.dataclass(frozen=True)
class Together:
    """The tensors that hold all experts of a layer, as in :class:`FusedExperts`."""

    gate_up: tuple[str, ...] = FusedExperts.gate_up
    down: tuple[str, ...] = FusedExperts.down
    suffix: str = ""
    transposed: bool = False
    interleaved: bool = False
    written: bool = False


class MoEFamily(DecoderFamily):
    """A Family whose files may hold the experts of a layer as one tensor."""

    @classmethod
    def of(
        cls, model: Any, config: Any, *architectures: str, experts: str = FusedExperts.expert,
        maps: Any = MAPS_PROJ, together: Together = Together(), **settings: Any,
    ) -> Family:  # fmt: skip
        """See :meth:`Family.of`."""
        fused = FusedExperts(experts, maps, **dataclasses.asdict(together))
        rows: tuple[Row, ...] = (*cls.first, fused)
        table = type("Table", (DecoderFamily,), {"first": rows})
        return table.of(model, config, *architectures, **settings)


class PredictingFamily(MoEFamily):
    """A MoEFamily whose files may have layers of multi-token prediction, which maxjax leaves out."""

    first = (PREDICTION,)
