"""The storage type of a tensor in a GGUF file: float32, quantised blocks, or unchanged.

Source: ``prepare_tensors`` of llama.cpp's converter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ....graph.quantization import QuantizationEncoding

# Tensors that llama.cpp's converter keeps in float32, besides vectors: norms, routers, small tables.
_WIDE = re.compile(r".*_norm|.*\.ffn_gate_inp(_shexp)?|position_embd|token_types")
# The encoding for rows whose length is not a multiple of the preferred encoding's block size.
_SMALLER = "Q8_0"


def encoding_for(name: str, shape: Sequence[int], preferred: str) -> str | None:
    """The encoding of a tensor in a GGUF file whose large weights are quantised; None: no encoding.

    Linear layers and embedding tables get the ``preferred`` one. If their rows do not consist of complete
    blocks, they get Q8_0, whose blocks are smaller, if that fits, or None. Tensors that llama.cpp
    keeps in float32 (:func:`is_wide`) also get None.

    Args:
        name: name of the tensor in the file.
        shape: logical shape, in values, ``[..., out, in]``.
        preferred: encoding of the large weights: "Q8_0", "Q4_0", "Q4_K" or "Q6_K".

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
    for encoding in (preferred, _SMALLER):
        if shape[-1] % QuantizationEncoding(encoding).elements_per_block == 0:
            return encoding
    return None


def is_wide(name: str, shape: Sequence[int]) -> bool:
    """Whether llama.cpp keeps a tensor of a GGUF file in float32, whatever the file's type.

    Example:
        >>> is_wide("blk.0.ffn_gate_inp.weight", (8, 64)), is_wide("output.weight", (64, 64))
        (True, False)
    """
    return len(shape) < 2 or _WIDE.fullmatch(name.rpartition(".")[0]) is not None
