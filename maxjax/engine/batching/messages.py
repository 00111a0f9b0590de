"""Messages: what the first of several processes calls, as text for the others, which call the same.

Arguments are numbers, texts, None, NumPy arrays, and lists and tuples of these; those with names are the ones in
``_TUPLES``. Nothing else can come out of a message.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...lockstep import Broadcast, Lockstep
from ..pictures import Inputs
from ..sampling.rows import RowSettings
from ..sampling.sequences import Sequences
from .programs import TextRows

_TUPLES: dict[str, Any] = {one.__name__: one for one in (TextRows, RowSettings, Sequences, Inputs)}
_FASTEST = 1  # level of zlib


def tell(together: Lockstep | None, name: str, *args: Any) -> None:
    """Tells the other processes that the first one calls something; does nothing where nobody repeats it.

    Args:
        together: the call that this belongs to.
        name: the name of what is called.
        args: its arguments.

    Raises:
        PeerLostError: the coordination service is gone.
    """
    if isinstance(together, Broadcast) and together.is_shared:
        together.tell(encoded((name, *args)))


def encoded(value: Any) -> str:
    """The text of a value.

    Example:
        >>> decoded(encoded(("read", np.arange(3), None, [1, 2.5])))
        ['read', array([0, 1, 2]), None, [1, 2.5]]
    """
    arrays: list[bytes] = []
    form = json.dumps(_form(value, arrays), separators=(",", ":")).encode()
    data = b"".join([len(form).to_bytes(4, "little"), form, *arrays])
    return base64.b64encode(zlib.compress(data, _FASTEST)).decode()


def decoded(text: str) -> Any:
    """The value of a text; lists in place of tuples without names."""
    data = zlib.decompress(base64.b64decode(text))
    start = 4 + int.from_bytes(data[:4], "little")
    return _value(json.loads(data[4:start]), memoryview(data), [start])


def _form(value: Any, arrays: list[bytes]) -> Any:
    """The value as ``json`` can write it; the bytes of arrays are added to ``arrays``."""
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        # Masks of texts without grammars are a megabyte of equal bits.
        is_equal = array.size > 1 and bool((array == array.flat[0]).all())
        arrays.append((array.flat[0] if is_equal else array).tobytes())
        return {"dtype": array.dtype.str, "shape": array.shape, "equal": is_equal}
    if isinstance(value, tuple) and type(value).__name__ in _TUPLES:
        return {"tuple": type(value).__name__, "fields": [_form(one, arrays) for one in value]}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_form(one, arrays) for one in value]
    return value


def _value(form: Any, data: memoryview, place: list[int]) -> Any:
    """The value of a form; ``place`` is where the bytes of its first array are, and then those behind it."""
    if isinstance(form, list):
        return [_value(one, data, place) for one in form]
    if not isinstance(form, dict):
        return form
    if "tuple" in form:
        return _TUPLES[form["tuple"]](*_value(form["fields"], data, place))
    dtype, shape = np.dtype(form["dtype"]), form["shape"]
    count = 1 if form["equal"] else int(np.prod(shape))
    array = np.frombuffer(data, dtype, count, place[0])
    place[0] += array.nbytes
    return np.full(shape, array[0], dtype) if form["equal"] else array.reshape(shape)
