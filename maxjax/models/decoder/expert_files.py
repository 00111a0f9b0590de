"""``MoEFamily``: a Family whose files may hold the experts of a layer as one tensor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..fused_experts import FusedExperts
from ..names import PREDICTION, Row
from .experts import MAPS_PROJ
from .model import DecoderFamily


@dataclass(frozen=True)
class Together:
    """The names and layout of the tensors that hold all experts of a layer, as in :class:`FusedExperts`."""

    gate_up: tuple[str, ...] = FusedExperts.gate_up
    down: tuple[str, ...] = FusedExperts.down
    suffix: str = ""
    transposed: bool = False
    interleaved: bool = False
    written: bool = False


@dataclass(frozen=True)
class MoEFamily(DecoderFamily):
    """A Family whose files may hold the experts of a layer as one tensor.

    Attributes:
        experts, maps: ``expert`` and ``projections`` of :class:`FusedExperts`.
        together: the tensors that hold all experts of a layer.
    """

    experts: str = "mlp.experts.#.*.weight"
    maps: tuple[str, str, str] = MAPS_PROJ
    together: Together = Together()

    def rows(self) -> list[Row]:
        """See :class:`Family`."""
        form = dataclasses.asdict(self.together)
        return [FusedExperts(self.experts, self.maps, **form), *super().rows()]


@dataclass(frozen=True)
class PredictingFamily(MoEFamily):
    """A MoEFamily whose files may have layers of multi-token prediction, which maxjax leaves out."""

    def rows(self) -> list[Row]:
        """See :class:`Family`."""
        return [PREDICTION, *super().rows()]
