"""Written for files of Modular MAX: ``can_use_fused_mlp``: whether gate and up can share one quantised weight.

maxjax itself does not import it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_SCALES = (".weight_scale", ".weight_scale_2", ".input_scale")


def can_use_fused_mlp(state_dict: Mapping[str, Any], tensor_wise: bool = False) -> bool:
    """Whether the scales of each gate projection can be concatenated with those of its up projection.

    Args:
        state_dict: WeightData of a checkpoint, keyed by name.
        tensor_wise: whether scales that are one number for a tensor may differ.

    Returns:
        True if the two scales of every such pair have equal sizes after the first axis and, where the gate's scale
        is one number and ``tensor_wise`` is not set, equal values.

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
