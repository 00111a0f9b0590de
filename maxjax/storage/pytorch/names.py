"""The names (globals) that the pickle of a PyTorch file may ask for, and their meaning.

They are those that ``torch.load`` accepts by default (``weights_only``) and that weights need. A call of
one becomes a record, which is interpreted later. The format is that of ``torch/_utils.py`` and
``torch/serialization.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...dtype import DType
from .pickle_machine import Reader, Token, described


# Not frozen, which would take four times as long to make: there may be 200,000.
@dataclass(slots=True, eq=False)
class Storage:
    """A storage as its persistent id describes it: class, key, and number of values."""

    kind: Token
    key: Any
    numel: Any
    view: Any
    at: int


@dataclass(slots=True, eq=False)
class Tensor:
    """A call that creates a tensor: the function, its unchecked arguments, and its byte offset."""

    function: Token
    arguments: tuple
    at: int


# --- the table of names ------------------------------------------------------------------------


def _tensor(reader: Reader, arguments: tuple, function: Token) -> Tensor:
    reader.count_tensor()
    return Tensor(function, arguments, reader.where(reader.op))


def _rebuild(name: str, value: Any) -> Token:
    # The lambda refers to the token that it is part of.
    token = Token("torch._utils", name, value, lambda r, a: _tensor(r, a, token))
    return token


def _parameter(reader: Reader, arguments: tuple) -> Any:
    """Replaces a parameter by its tensor."""
    if not arguments or type(arguments[0]) is not Tensor:
        found = arguments[0] if arguments else ()
        raise reader.error("the data of a parameter", "a tensor", described(found))
    return arguments[0]


def _from_type(reader: Reader, arguments: tuple) -> Any:
    """The plain tensor of a tensor with Python attributes: (function, class, arguments, state)."""
    function = arguments[0] if arguments else None
    if type(function) is not Token or function.module != "torch._utils" or not function.reduce:
        expected = "a function that makes a tensor"
        raise reader.error("a tensor with attributes", expected, described(function))
    if len(arguments) != 4 or type(arguments[2]) is not tuple:
        raise reader.error("a tensor with attributes", "4 arguments", described(arguments))
    if type(arguments[1]) is not Token or arguments[1].value != "class":
        raise reader.error("the class of a tensor", "torch.Tensor", described(arguments[1]))
    return function.reduce(reader, arguments[2])


def _ordered_dict(reader: Reader, arguments: tuple) -> dict:
    """An empty OrderedDict, or as Python 2 writes it, one with a list of items."""
    items = arguments[0] if arguments else []
    if len(arguments) > 1 or type(items) is not list:
        raise reader.error("the arguments of OrderedDict", "none", described(arguments))
    result: dict = {}
    for item in items:
        if type(item) not in (list, tuple) or len(item) != 2:
            raise reader.error("an item of an OrderedDict", "a key and a value", described(item))
        reader.check_key(item[0])
        result[item[0]] = item[1]
    return result


def _single_argument(kind: type) -> Callable[[Reader, tuple], Any]:
    """A function that replaces a call by its only argument: a size, a device, a set."""

    def reduce(reader: Reader, arguments: tuple) -> Any:
        if not arguments or type(arguments[0]) is not kind:
            raise reader.error("the argument of a call", kind.__name__, described(arguments))
        return arguments[0]

    return reduce


def _encode(reader: Reader, arguments: tuple) -> bytes:
    """Bytes as protocol 2 writes them: as text with one character for each byte."""
    if len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in ("latin1", "latin-1"):
        try:
            return arguments[0].encode("latin-1")
        except UnicodeEncodeError:
            pass
    raise reader.error("the arguments of encode", "bytes as latin1 text", described(arguments))


def _bytes(reader: Reader, arguments: tuple) -> bytes:
    if arguments:
        raise reader.error("the arguments of bytes", "none", described(arguments))
    return b""


def _bytearray(reader: Reader, arguments: tuple) -> bytes:
    """The bytes of a bytearray: given as bytes, or as :func:`_encode` takes them; none if empty."""
    if len(arguments) == 2:
        return _encode(reader, arguments)
    data, *more = arguments or (b"",)
    if more or type(data) is not bytes:
        raise reader.error("the arguments of bytearray", "bytes", described(arguments))
    return data


def _complex(reader: Reader, arguments: tuple) -> complex:
    if [type(part) for part in arguments] != [float, float]:
        raise reader.error("the arguments of complex", "two floats", described(arguments))
    return complex(*arguments)


_FLOATS = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
_DTYPES: dict[str, DType] = {
    name: DType.of(name)
    for name in f"float16 float32 float64 bfloat16 bool {_FLOATS} uint8 uint16 uint32 uint64"
    " int8 int16 int32 int64 complex64 complex128".split()
}
_DTYPES["float4_e2m1fn_x2"] = DType.float4_e2m1fn
# torch's other names of the same dtypes.
_DTYPES |= {"half": DType.float16, "float": DType.float32, "double": DType.float64}
# Known dtypes that JAX does not support.
_NO_DTYPES = (
    "complex32 qint8 quint8 qint32 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4 bits4x2"
).split() + [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
_CLASSES = {
    "Double": DType.float64,
    "Float": DType.float32,
    "Half": DType.float16,
    "BFloat16": DType.bfloat16,
    "Long": DType.int64,
    "Int": DType.int32,
    "Short": DType.int16,
    "Char": DType.int8,
    "Byte": DType.uint8,
    "Bool": DType.bool,
    "ComplexFloat": DType.complex64,
    "ComplexDouble": DType.complex128,
    "Untyped": DType.uint8,
}
# Bytes of a value in storages of dtypes that JAX does not support.
WIDTHS = {
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QInt32Storage": 4,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
}
# Functions that make a tensor: VIEW, or a description of the unsupported kind.
VIEW = "a view"
_FUNCTIONS: dict[str, str] = {
    "_rebuild_tensor": VIEW,
    "_rebuild_tensor_v2": VIEW,
    "_rebuild_tensor_v3": VIEW,
    "_rebuild_qtensor": "a quantised tensor",
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor of the meta device, which has no data",
    "_rebuild_wrapper_subclass": "a tensor of a subclass",
    "_rebuild_device_tensor_from_numpy": "a tensor of an unsupported device",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of an unsupported device",
}
_SCHEMES = (
    "per_tensor_affine per_channel_affine per_tensor_symmetric per_channel_symmetric"
    " per_channel_affine_float_qparams"
).split()
_ALL = [
    *(_rebuild(name, value) for name, value in _FUNCTIONS.items()),
    Token("torch._utils", "_rebuild_parameter", None, _parameter),
    Token("torch._utils", "_rebuild_parameter_with_state", None, _parameter),
    Token("torch._tensor", "_rebuild_from_type_v2", None, _from_type),
    Token("torch", "Tensor", "class"),
    Token("torch.nn.parameter", "Parameter", "class"),
    Token("torch", "Size", None, _single_argument(tuple)),
    Token("torch", "device", None, _single_argument(str)),
    Token("torch.serialization", "_get_layout", None, _single_argument(str)),
    Token("torch.storage", "UntypedStorage", DType.uint8),
    Token("collections", "OrderedDict", None, _ordered_dict),
    # A learning rate schedule counts its milestones in one.
    Token("collections", "Counter", None, _single_argument(dict)),
    Token("_codecs", "encode", None, _encode),
    *(
        Token(module, name, None, reduce)
        for module in ("builtins", "__builtin__")
        for name, reduce in (
            ("set", _single_argument(list)),
            ("bytes", _bytes),
            ("bytearray", _bytearray),
            ("complex", _complex),
        )
    ),
    *(Token("torch", name, dtype) for name, dtype in _DTYPES.items()),
    *(Token("torch", name) for name in (*_NO_DTYPES, *_SCHEMES)),
]
_TOKENS = {(token.module, token.name): token for token in _ALL}
# Legacy types such as torch.FloatTensor, which a file may have beside its tensors.
_TENSORS = {f"{kind}Tensor" for kind in _CLASSES if kind != "Untyped" and "Complex" not in kind}
_STORAGE = re.compile(r"([A-Za-z0-9]{1,40})Storage")


def find(module: str, name: str) -> Token | None:
    """The token of a name that a file may ask for, or None.

    An unknown storage class has a token too, so that the error can name the tensor that needs it.

    Example:
        >>> str(find("torch", "FloatStorage")), find("os", "system")
        ('torch.FloatStorage', None)
    """
    token = _TOKENS.get((module, name))
    if token is None and module in ("torch", "torch.cuda"):
        if match := _STORAGE.fullmatch(name):
            return Token(module, name, _CLASSES.get(match[1]))
        if name in _TENSORS:
            return Token(module, name)
    return token


def persistent(reader: Reader, identity: Any) -> Storage:
    """The storage that a persistent id stands for: ("storage", class, key, location, numel)."""
    if type(identity) is not tuple or len(identity) not in (5, 6):
        raise reader.error("a persistent id", "that of a storage", described(identity))
    word, kind, key, _, numel, *view = identity
    if type(word) is not str or word != "storage":
        raise reader.error("a persistent id", "that of a storage", described(word))
    if type(kind) is not Token or not kind.name.endswith("Storage"):
        raise reader.error("the class of a storage", "a storage class", described(kind))
    return Storage(kind, key, numel, view[0] if view else None, reader.where(reader.op))
