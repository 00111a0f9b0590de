"""Weights in blocks for tests of products with them, and how near a product must be."""

import functools

import numpy as np

from maxjax.kernels.blocks import DECODERS


@functools.cache
def blocks(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Rows of blocks with any bits but for scales, which are numbers of a common size."""
    layout = DECODERS[name]
    rng = np.random.default_rng(seed)
    count = columns // layout.elements
    raw = rng.integers(0, 256, (rows, count, layout.nbytes), np.uint8)
    halves = {
        "Q4_K": [0, 2],
        "Q5_K": [0, 2],
        "Q6_K": [208],
        "MXFP4": [],
        "Q4_1": [0, 2],
        "Q5_1": [0, 2],
    }
    for at in halves.get(name, [0]):
        scales = rng.uniform(-0.1, 0.1, (rows, count, 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(118, 130, (rows, count))
    return raw.reshape(rows, -1)


def close(got, x, w, *, unit=2.0**-20):
    """Within a few units of the sum of the absolute products."""
    x = np.asarray(x).astype(np.float64)
    assert (
        np.abs(np.asarray(got).astype(np.float64) - x @ w.T).max()
        <= unit * (np.abs(x) @ np.abs(w).T).max()
    )
