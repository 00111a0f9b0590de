"""Decoders of ggml's blocks with one scale: Q1_0, Q2_0 and Q4_0 to Q8_1.

The formulas are those of ``dequantize_row_*`` in ggml-quants.c. ``d`` and ``m`` are float16. With 4 bits per
value, byte j of the 16 bytes ``qs`` holds value j in its low nibble and value j + 16 in its high one.

=====  ======================================  ==========================================
type   fields                                  value j of the block
=====  ======================================  ==========================================
Q1_0   d, qs[16]                               d if bit j of qs is set, otherwise -d
Q2_0   d, qs[16]                               d * (q - 1), q is bits 2 * j and 2 * j + 1
Q4_0   d, qs[16]                               d * (q - 8), q has 4 bits
Q4_1   d, m, qs[16]                            d * q + m
Q5_0   d, qh[4], qs[16]                        d * (q - 16), the fifth bit of q is bit j of qh
Q5_1   d, m, qh[4], qs[16]                     d * q + m
Q8_0   d, qs[32]                               d * q, q is int8
Q8_1   d, s, qs[32]                            d * q; s = d * sum(q) serves dot products
=====  ======================================  ==========================================

A decoder takes blocks uint8 ``[n, nbytes]`` and fills float32 ``[n, elements]``.
"""

from __future__ import annotations

import numpy as np

from .layout import LAYOUTS
from .scratch import Scratch, add, fill_product, nibbles


def q1_0(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["Q1_0"].split(blocks)
    values = np.unpackbits(qs, axis=1, bitorder="little")
    values *= 2
    values -= 1
    fill_product(out, values.view(np.int8), d.astype(np.float32))


def q2_0(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["Q2_0"].split(blocks)
    values = qs[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    values -= 1
    fill_product(out, values.view(np.int8), d.astype(np.float32))


def q4_0(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["Q4_0"].split(blocks)
    values = nibbles(scratch, qs, 16)
    values -= 8
    fill_product(out, values.view(np.int8), d.astype(np.float32))


def q4_1(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, m, qs = LAYOUTS["Q4_1"].split(blocks)
    fill_product(out, nibbles(scratch, qs, 16), d.astype(np.float32))
    add(out, m.astype(np.float32))


def q5_0(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qh, qs = LAYOUTS["Q5_0"].split(blocks)
    values = _five_bits(qs, qh, scratch)
    values -= 16
    fill_product(out, values.view(np.int8), d.astype(np.float32))


def q5_1(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, m, qh, qs = LAYOUTS["Q5_1"].split(blocks)
    fill_product(out, _five_bits(qs, qh, scratch), d.astype(np.float32))
    add(out, m.astype(np.float32))


def q8_0(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["Q8_0"].split(blocks)
    fill_product(out, qs, d.astype(np.float32))


def q8_1(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, _, qs = LAYOUTS["Q8_1"].split(blocks)
    fill_product(out, qs, d.astype(np.float32))


def _five_bits(qs: np.ndarray, qh: np.ndarray, scratch: Scratch) -> np.ndarray:
    values = nibbles(scratch, qs, 16)
    high = np.unpackbits(qh, axis=1, bitorder="little")
    high *= 16
    values |= high.reshape(-1)
    return values
