"""PyTorch's files without torch: what ``torch.save`` writes for a dict of arrays."""

import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.storage.pytorch import corpus

STORAGES = {
    np.dtype(np.float32): "FloatStorage", np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float16): "HalfStorage", np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage", np.dtype(np.int32): "IntStorage",
    np.dtype(np.int8): "CharStorage", np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
}  # fmt: skip


def save(tensors: dict[str, np.ndarray], path: Path, *, legacy: bool = False) -> None:
    """Writes a file, or one as torch wrote before 1.6.

    Views of one array have one storage in it, as views of a tensor have.
    """
    of = corpus.legacy_tensor if legacy else corpus.tensor
    storages: dict[int, tuple[str, np.ndarray]] = {}
    items = {}
    for name, array in tensors.items():
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        key, _ = storages.setdefault(id(whole), (str(len(storages)), whole))
        size = array.dtype.itemsize
        offset = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        items[name] = of(
            size=array.shape,
            stride=tuple(stride // size for stride in array.strides),
            offset=offset // size,
            key=key,
            numel=whole.size,
            kind=corpus.name("torch", STORAGES[array.dtype]),
        )
    value = corpus.dict_of(**items)
    if legacy:
        keys = b"](" + b"".join(corpus.text(key) for key, _ in storages.values()) + b"e"
        data = b"".join(struct.pack("<q", a.size) + a.tobytes() for _, a in storages.values())
        path.write_bytes(corpus.legacy(value, keys, data))
    else:
        members = {f"data/{key}": whole.tobytes() for key, whole in storages.values()}
        path.write_bytes(corpus.zipped(corpus.members(value, members)))
