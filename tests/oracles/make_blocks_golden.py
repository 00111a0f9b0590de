"""Records the blocks that ggml's own quantisers make of the values of `block_rows`.

    python -m tests.oracles.make_blocks_golden LIBGGML_BASE

LIBGGML_BASE is ggml's shared library, as a build of llama.cpp or the package llama-cpp-python has
it (`libggml-base.so`), compiled for plain x86-64: its float32 arithmetic is then that of C, without
fused operations. Writes `tests/storage/goldens/blocks.npz`: the kinds of rows, the version of ggml,
and for each type TYPE the first blocks of every kind, uint8 `[kinds, rows * blocks, bytes]`,
and as `TYPE digests` SHA-256 over the blocks of all rows, uint8 `[kinds, 32]`; for the types that
use an importance matrix also `TYPE importance digests`, with the importance of `rows.importance`.
"""

import ctypes
import hashlib
import sys
from pathlib import Path

import numpy as np

from maxjax.storage.blocks import ENCODERS, LAYOUTS
from maxjax.storage.gguf.types import GGML_TYPES_BY_NAME
from tests.storage.blocks.rows import KINDS, SHOWN, WIDTH, importance, rows

GOLDEN = Path(__file__).parent.parent / "storage" / "blocks" / "goldens" / "blocks.npz"


def quantiser(library: str):
    """ggml's `ggml_quantize_chunk` as a function of a type's name and float32 `[n, 256]`."""
    ggml = ctypes.CDLL(library)
    chunk = ggml.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3
    chunk.argtypes += [ctypes.c_void_p]

    def quantise(name: str, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        layout, number = LAYOUTS[name], GGML_TYPES_BY_NAME[name].number
        values = np.ascontiguousarray(values)
        out = np.zeros((values.size // layout.elements, layout.nbytes), np.uint8)
        address = None if weights is None else weights.ctypes.data
        written = chunk(number, values.ctypes.data, out.ctypes.data, 0, len(values), WIDTH, address)
        assert written == out.size
        return out

    ggml.ggml_version.restype = ctypes.c_char_p
    return quantise, ggml.ggml_version().decode()


def _digest(blocks: np.ndarray) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(blocks.tobytes()).digest(), np.uint8)


def main() -> None:
    """Writes the file."""
    quantise, version = quantiser(sys.argv[1])
    found: dict[str, np.ndarray] = {}
    for name in ENCODERS:
        shown, digests, weighted = [], [], []
        for kind in KINDS:
            values = rows(kind)
            blocks = quantise(name, values)
            shown.append(blocks[: SHOWN * WIDTH // LAYOUTS[name].elements])
            digests.append(_digest(blocks))
            weighted.append(_digest(quantise(name, values, importance())))
        found[name], found[f"{name} digests"] = np.stack(shown), np.stack(digests)
        if name not in ("Q8_0", "MXFP4"):
            found[f"{name} importance digests"] = np.stack(weighted)
    GOLDEN.parent.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN, kinds=np.array(list(KINDS)), version=np.array(version), **found)
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes, ggml {version}")


if __name__ == "__main__":
    main()
