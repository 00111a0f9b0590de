"""What a tensor of a GGUF file is stored as: float32, blocks, or as it is.

Source: ``prepare_tensors`` of llama.cpp's converter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ....graph.quantization import QuantizationEncoding

# Kept in float32 by llama.cpp's converter, beside vectors: norms, routers, small tables.
_WIDE = re.compile(r".*_norm|.*\.ffn_gate_inp(_shexp)?|position_embd|token_types")
# The blocks for rows that the wanted ones do not fit.
_SMALLER = "Q8_0"


def encoding_for(name: str, shape: Sequence[int], wanted: str) -> str | None:
    """What a tensor of a GGUF file is written as when ``wanted`` blocks are asked for.

    Maps and tables of words get them. Rows that are not whole blocks get the smaller ones of Q8_0
    if they fit. None where none fit, and for what llama.cpp keeps in float32 (:func:`is_wide`).

    Args:
        name: Its name in the file.
        shape: Counted in values, ``[..., out, in]``.
        wanted: "Q8_0", "Q4_0", "Q4_K", "Q6_K".

    Example:
        >>> encoding_for("blk.0.ffn_up.weight", (512, 256), "Q4_K")
        'Q4_K'
        >>> encoding_for("blk.0.ffn_up.weight", (512, 96), "Q4_K")
        'Q8_0'
        >>> encoding_for("blk.0.attn_norm.weight", (256,), "Q4_K") is None
        True
    """
    if is_wide(name, shape):
        return None
    for encoding in (wanted, _SMALLER):
        if shape[-1] % QuantizationEncoding(encoding).elements_per_block == 0:
            return encoding
    return None


def is_wide(name: str, shape: Sequence[int]) -> bool:
    """Whether llama.cpp keeps a tensor of a GGUF file in float32 whatever the others are.

    Example:
        >>> is_wide("blk.0.ffn_gate_inp.weight", (8, 64)), is_wide("output.weight", (64, 64))
        (True, False)
    """
    return len(shape) < 2 or _WIDE.fullmatch(name.rpartition(".")[0]) is not None
