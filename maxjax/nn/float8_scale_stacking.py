"""MAX's path of scales of stacked weights in 8 or 4 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_SCALES = (".weight_scale", ".weight_scale_2", ".input_scale")


def can_use_fused_mlp(state_dict: Mapping[str, Any], tensor_wise: bool = False) -> bool:
    """Whether the scales of each gate projection go with those of its up projection in one weight.

    Args:
        state_dict: weights of a checkpoint by name: WeightData.
        tensor_wise: whether scales of whole tensors may differ.

    Returns:
        Whether each pair of scales that is there has the same axes after the first and, if the gate's is one
        number and not ``tensor_wise``, the same value.

    Example:
        >>> import numpy as np
        >>> from maxjax.graph.weights import WeightData
        >>> scales = {f"mlp.{part}_proj.weight_scale": WeightData.from_numpy(
        ...     np.array([value], np.float32), part) for part, value in (("gate", 1), ("up", 2))}
        >>> can_use_fused_mlp(scales), can_use_fused_mlp(scales, tensor_wise=True)
        (False, True)
    """
    for name, gate in state_dict.items():
        if not any(name.endswith(f"gate_proj{end}") for end in _SCALES):
            continue
        up = state_dict.get(name.replace("gate_proj", "up_proj"))
        if up is None:
            continue
        shapes = [tuple(int(n) for n in one.shape) for one in (gate, up)]
        if len(shapes[0]) != len(shapes[1]) or shapes[0][1:] != shapes[1][1:]:
            return False
        is_number = len(shapes[0]) < 2 and math.prod(shapes[0]) == 1
        if is_number and not tensor_wise and gate.to_buffer().item() != up.to_buffer().item():
            return False
    return True
