"""What torch saves and what it loads: files, and the tensors in them as arrays, kept beside the tests."""

import hashlib
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.oracles.recorded import is_kept, recorded

Arrays = dict[str, np.ndarray]

WRAPPERS = {"state_dict", "model_state_dict", "model", "module"}


def file_of(
    make: Callable[[], Any], name: str = "", *, has_crcs: bool = True, **options: Any
) -> bytes:
    """The file, called ``m.pt``, that torch.save writes of what ``make`` returns."""
    return recorded(
        lambda: _quietly(lambda: _saved(make(), has_crcs, options)), name, is_compared=False
    )


def file_and_arrays(
    make: Callable[[], Any], name: str = "", **options: Any
) -> tuple[bytes, Arrays]:
    """The file as above, and the tensors of what ``make`` returns."""

    def both() -> tuple[bytes, Any]:
        value = make()
        return _saved(value, True, options), _packed(_arrays(value))

    content, packed = recorded(lambda: _quietly(both), name, is_compared=False)
    return content, _unpacked(packed)


def loaded(path: Path) -> Arrays:
    """What torch.load reads from the file."""
    return _unpacked(recorded(lambda: _packed(load_with_torch(path))))


def load_with_torch(path: Path) -> Arrays:
    """The same without a test that runs: kept are the answers for good files of `keep_reading`."""
    if is_kept(_name(path)):
        return keep_reading(path)
    import torch

    value = _quietly(lambda: torch.load(path, map_location="cpu", weights_only=True))
    tops = [key for key, item in value.items() if _tensors(item)]
    if len(tops) == 1 and tops[0] in WRAPPERS and isinstance(value[tops[0]], dict):
        value = value[tops[0]]
    return _arrays(value)


def keep_reading(path: Path) -> Arrays:
    """What torch.load reads from a file, kept under a name that its content has."""
    return _unpacked(recorded(lambda: _packed(load_with_torch(path)), _name(path)))


def digest(arrays: Arrays) -> str:
    """A few characters that differ where a name, a type, a shape or a bit does."""
    described = [(name, str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:12]


def _name(path: Path) -> str:
    return f"torch.load {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"


def _quietly(ask: Callable[[], Any]) -> Any:
    """What torch says of what it deprecates is not for a test to hear."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ask()


def _saved(value: Any, has_crcs: bool, options: dict[str, Any]) -> bytes:
    import torch

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.pt"
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(has_crcs)
        try:
            torch.save(value, path, **options)
        finally:
            torch.serialization.set_crc32_options(before)
        return path.read_bytes()


def _tensors(value: Any, prefix: str = "") -> dict[str, Any]:
    """The tensors of what torch.load gives, under dotted names."""
    import torch

    if isinstance(value, torch.Tensor):
        return {prefix[:-1]: value}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    found = {}
    for key, item in value.items() if isinstance(value, dict) else ():
        found |= _tensors(item, f"{prefix}{key}.")
    return found


def _arrays(value: Any) -> Arrays:
    return {name: _array(tensor) for name, tensor in _tensors(value).items()}


def _array(tensor: Any) -> np.ndarray:
    import torch

    # A clone: a tensor of one value counts as contiguous whatever its stride.
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    raw = whole.reshape(-1).view(torch.uint8).numpy()
    return raw.view(_dtype(str(tensor.dtype).removeprefix("torch."))).reshape(tensor.shape)


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _packed(arrays: Arrays) -> list[Any]:
    described = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    return [described, b"".join(array.tobytes() for array in arrays.values())]


def _unpacked(packed: list[Any]) -> Arrays:
    described, raw = packed
    found, start = {}, 0
    for name, dtype, shape in described:
        end = start + math.prod(shape) * _dtype(dtype).itemsize
        found[name] = np.frombuffer(raw[start:end], _dtype(dtype)).reshape(shape)
        start = end
    return found
