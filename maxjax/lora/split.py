"""Updates of a linear layer that transformers' model has as several layers: their updates as one, and the inverse.

The layer's rows are those of the others, one after another, so B of the update has B of each in blocks of rows. Each
of the others has its own A. In the one update, these are one above the other, and the blocks of B are on a diagonal;
if they are equal, one is enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import CheckpointMismatchError
from ..graph.weights import WeightData
from ..models.split_layers import parts_of
from ..nn.low_rank import Adapter

_A, _B, _NORMS = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


def split_update(part: str, value: WeightData, names: Sequence[str]) -> list[WeightData]:
    """A tensor of an update for each of the layers with these names, whose rows are those of the updated one."""
    return [value] * len(names) if part == _A or len(names) == 1 else parts_of(value, names)


def join_updates(
    layer: str,
    updates: Mapping[int, Mapping[str, WeightData]],
    adapters: Mapping[int, Adapter],
    count: int,
    path: str,
) -> tuple[dict[str, WeightData], Adapter]:
    """The update of a layer that is several layers of transformers' model, and its settings.

    Args:
        layer: the layer's name, for messages.
        updates: for each of the layers that has an update, by its index: its tensors by their names in PEFT's files.
        adapters: the settings of these updates.
        count: number of the layers.

    Raises:
        CheckpointMismatchError: the updates have no sum of this form: their scales or shapes differ, a tensor is
            missing, or DoRA scales the rows of some of the layers alone.
    """

    def wrong(problem: str) -> CheckpointMismatchError:
        return CheckpointMismatchError(f"the {count} layers of an adapter that are this one {problem}",
                                       path=path, tensor=layer)  # fmt: skip

    first, *others = (adapters[index] for index in sorted(adapters))
    if any(one.scale != first.scale for one in others):
        raise wrong("have different scales")
    kinds = {_A, _B, _NORMS} if first.dora else {_A, _B}
    if any(one.keys() != kinds for one in updates.values()):
        raise wrong(f"do not all have the tensors {', '.join(sorted(kinds))}")
    if first.dora and len(updates) < count:
        raise wrong("do not all have an update, and use_dora is set")
    arrays = {
        index: {part: np.asarray(data.data) for part, data in one.items()}
        for index, one in updates.items()
    }
    each = [arrays[index] for index in sorted(arrays)]
    if len({(one[_A].shape[1:], one[_B].shape[:1]) for one in each}) > 1 or each[0][_B].ndim != 2:
        raise wrong("have different shapes")
    rows = len(each[0][_B])
    is_shared = len(each) == count and all(np.array_equal(one[_A], each[0][_A]) for one in each)
    if is_shared:
        found = {_A: each[0][_A], _B: np.concatenate([one[_B] for one in each])}
        adapter = first
    else:
        rank = sum(len(one[_A]) for one in each)
        b, start = np.zeros((rows * count, rank), each[0][_B].dtype), 0
        for index in sorted(arrays):
            block = arrays[index][_B]
            b[index * rows : (index + 1) * rows, start : start + block.shape[1]] = block
            start += block.shape[1]
        found = {_A: np.concatenate([one[_A] for one in each]), _B: b}
        alpha = first.scale * (math.sqrt(rank) if first.rslora else rank)
        adapter = Adapter(rank, alpha, first.rslora, first.dora, bias=first.bias)
    if first.dora:
        found[_NORMS] = np.concatenate([one[_NORMS] for one in each])
    return {
        part: WeightData.from_numpy(one, f"{layer}.{part}") for part, one in found.items()
    }, adapter
