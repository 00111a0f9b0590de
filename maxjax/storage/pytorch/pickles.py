"""A safe pickle reader, which returns plain values and executes nothing.

A pickle is a program that may import and call anything. This reader interprets the instructions that
``torch.save`` writes (protocols 1 to 5) and returns plain data. A global in the table of the format
becomes an inert :class:`Token`, and a call of it becomes the value that the table defines; any other
global is refused. Nothing is imported, and nothing from the file is called. ``pickletools`` of Python
documents the instructions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ...errors import CheckpointError
from ..limits import Limits
from .pickle_machine import Find, Reader, Token, described, measure

# Numbers as text of at most this many bytes are read without checking the limit on long ones.
_SHORT_NUMBER = 20
_UINT = struct.Struct("<I").unpack_from
# Instructions that build an object of a class or of a registered extension.
_OBJECTS = {
    0x6F: "OBJ",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
}


def read_pickle(
    data: bytes,
    *,
    path: str,
    offset: int,
    limits: Limits,
    tokens: Find,
    persistent: Callable[[Reader, Any], Any] | None = None,
    start: int = 0,
    is_compressed: bool = False,
) -> tuple[Any, int]:
    """The value of the pickle that begins at byte ``start`` of ``data``, and the offset of its end.

    An OrderedDict becomes a dict, and a set a list. Containers that contain themselves are refused.
    ``limits.pickle_depth`` bounds the nesting, ``limits.pickle_items`` the number of values (a shared
    container counts once for each reference), and ``limits.pickle_instructions`` the instructions, in
    addition to some for each tensor.

    Args:
        offset: offset of ``data`` in the file.
        is_compressed: whether it is compressed there; messages then name its first byte.
        tokens: function (module, name) → token, or None if the name is refused.
        persistent: function from a persistent id to its value.

    Raises:
        CheckpointUnsafeError: the pickle asks for another name, or builds an object of a class.
        CheckpointTruncatedError: the data ends before the pickle does.
        CheckpointFormatError: an instruction is unknown, or lacks its operands.
        CheckpointLimitError: the pickle is longer, deeper or larger than ``limits`` allow.

    Example:
        >>> read_pickle(b"\\x80\\x02}U\\x01aK\\x07s.", path="m.pt", offset=0, limits=Limits(),
        ...             tokens=lambda module, name: None)
        ({'a': 7}, 10)
        >>> read_pickle(b"cposix\\nsystem\\n.", path="m.pt", offset=0, limits=Limits(),
        ...             tokens=lambda module, name: None)
        Traceback (most recent call last):
        maxjax.errors.CheckpointUnsafeError: m.pt: at byte 0: the file asks for 'posix.system',
        which weights do not need (expected ..., found posix.system). No code in the file was run...
    """
    reader = Reader(data, path, offset, limits, tokens, persistent, start, is_compressed)
    value = _run(reader)
    measure(value, limits, reader.over_limit)
    return value, reader.at


def _run(reader: Reader) -> Any:
    """Interprets the instructions up to STOP; returns the remaining value."""
    data, end, done = reader.data, len(reader.data), 0
    while (limit := reader.max_instructions()) > done:
        for _ in range(limit - done):
            reader.op = at = reader.at
            if at >= end:
                raise reader.truncated(1)
            reader.at = at + 1
            code = data[at]
            if code == 0x2E:  # STOP
                return reader.pop()
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise _refused(reader, code)
            instruction(reader)
        done = limit
    problem = "the pickle has too many instructions for its tensors"
    raise reader.over_limit(problem, "pickle_instructions", done + 1)


def _refused(reader: Reader, code: int) -> CheckpointError:
    if code == 0x69:  # INST: its class is in its arguments
        module, name = reader.line(), reader.line()
        return reader.unknown_name(module, name)
    if code in _OBJECTS:
        what = _OBJECTS[code]
        return reader.unsafe(f"the instruction {what} builds an object of a class", what)
    return reader.error(
        "not an instruction that torch.save writes", "an instruction", f"byte {code:02X}"
    )


# --- the instructions: code → what to do with the reader ---------------------------------------


def _protocol(reader: Reader) -> None:
    """PROTO."""
    version = reader.number(1)
    if version > 5:
        raise reader.error("the protocol of the pickle", "0 to 5", str(version))


def _frame(reader: Reader) -> None:
    """FRAME: its bytes must exist; otherwise it is ignored."""
    length = reader.number(8)
    if length > len(reader.data) - reader.at:
        raise reader.missing_bytes(length)


def _push_global(reader: Reader) -> None:
    """STACK_GLOBAL."""
    stack = reader.stack
    name = stack.pop() if stack else None
    module = stack.pop() if stack else None
    reader.push_global(module, name)


def _reduce(reader: Reader) -> None:
    """REDUCE: the value that the table defines for the call."""
    arguments, callee = reader.pop(), reader.pop()
    if type(callee) is not Token:
        raise reader.error("a call of a value that is not a global", "a global", described(callee))
    if callee.reduce is None:
        raise reader.unsafe(f"the file calls '{callee}', which weights do not need", str(callee))
    if type(arguments) is not tuple:
        raise reader.error(f"the arguments of {callee.name}", "a tuple", described(arguments))
    reader.stack.append(callee.reduce(reader, arguments))


def _build(reader: Reader) -> None:
    """BUILD: attributes, which only an OrderedDict may have; they are ignored."""
    state, built = reader.pop(), reader.top()
    if type(built) is not dict or type(state) is not dict:
        what = f"BUILD of {described(built)} from {described(state)}"
        raise reader.unsafe("the instruction BUILD sets the state of an object", what)


def _persistent(reader: Reader) -> None:
    """BINPERSID: an object outside the pickle, here a storage."""
    if reader.persistent is None:
        raise reader.error("a persistent id", "none here", described(reader.top()))
    reader.stack.append(reader.persistent(reader, reader.pop()))


def _push(make: Callable[[Reader], Any]) -> Callable[[Reader], None]:
    return lambda reader: reader.stack.append(make(reader))


# Instructions that a hostile pickle may contain a million times have a fast path without further calls;
# the slow path raises the errors.


def _put(reader: Reader) -> None:
    """BINPUT."""
    at = reader.at
    if reader.stack and at < len(reader.data):
        reader.memo[reader.data[at]] = reader.stack[-1]
        reader.at = at + 1
    else:
        reader.remember(reader.number(1))


def _put_long(reader: Reader) -> None:
    """LONG_BINPUT."""
    at = reader.at
    if reader.stack and at + 4 <= len(reader.data):
        slot = _UINT(reader.data, at)[0]
        if slot in reader.memo or slot <= len(reader.memo):
            reader.memo[slot] = reader.stack[-1]
            reader.at = at + 4
            return
    reader.remember(reader.number(4))


def _get_long(reader: Reader) -> None:
    """LONG_BINGET."""
    at, memo = reader.at, reader.memo
    if at + 4 <= len(reader.data) and (slot := _UINT(reader.data, at)[0]) in memo:
        reader.stack.append(memo[slot])
        reader.at = at + 4
    else:
        reader.recall(reader.number(4))


def _text(reader: Reader) -> None:
    """BINUNICODE."""
    at, data = reader.at + 4, reader.data
    count = _UINT(data, at - 4)[0] if at <= len(data) else len(data)
    if at + count <= len(data):
        reader.at = at + count
        reader.stack.append(reader.text(data[at : at + count]))
    else:
        reader.stack.append(reader.text(reader.take(reader.number(4))))


def _memoize(reader: Reader) -> None:
    """MEMOIZE."""
    memo, stack = reader.memo, reader.stack
    if stack:
        memo[len(memo)] = stack[-1]
    else:
        reader.top()


def _get(reader: Reader) -> None:
    """BINGET."""
    at, memo = reader.at, reader.memo
    if at < len(reader.data) and (slot := reader.data[at]) in memo:
        reader.stack.append(memo[slot])
        reader.at = at + 1
    else:
        reader.recall(reader.number(1))


def _byte(reader: Reader) -> None:
    """BININT1."""
    at = reader.at
    if at < len(reader.data):
        reader.stack.append(reader.data[at])
        reader.at = at + 1
    else:
        reader.number(1)


def _line_number(reader: Reader) -> None:
    """INT and LONG: a number as text."""
    at = reader.at
    end = reader.data.find(b"\n", at, at + _SHORT_NUMBER)
    digits = reader.data[at:end].removesuffix(b"L") if end >= 0 else b""
    if digits.isdigit() and digits[:1] != b"0":
        reader.stack.append(int(digits))
        reader.at = end + 1
    else:
        reader.stack.append(reader.decimal())


def _mark(reader: Reader) -> None:
    # Each mark is an open container, or the arguments of a call.
    if len(reader.marks) > reader.limits.pickle_depth + 16:
        raise reader.over_limit("values are nested too deep", "pickle_depth", len(reader.marks))
    reader.marks.append(reader.stack)
    reader.stack = []


def _pack(count: int) -> Callable[[Reader], None]:
    def pack(reader: Reader) -> None:
        stack = reader.stack
        if len(stack) < count:
            raise reader.error("an instruction without its operand", "a value", "an empty stack")
        values = tuple(stack[-count:])
        del stack[-count:]
        stack.append(values)

    return pack


def _append(reader: Reader) -> None:
    value = reader.pop()
    if reader.stack and type(container := reader.stack[-1]) is list:
        container.append(value)
    else:
        reader.top(list)


def _tuple(reader: Reader) -> None:
    values = tuple(reader.to_mark())  # first, because this replaces the stack
    reader.stack.append(values)


def _extend(reader: Reader) -> None:
    values = reader.to_mark()
    reader.top(list).extend(values)


def _insert(reader: Reader) -> None:
    """SETITEM."""
    value, key, stack = reader.pop(), reader.pop(), reader.stack
    if type(key) is str and stack and type(container := stack[-1]) is dict and key not in container:
        container[key] = value
    else:
        reader.insert([key, value])


def _short(reader: Reader) -> bytes:
    """Bytes that follow a one-byte count."""
    at, data = reader.at, reader.data
    end = at + 1 + data[at] if at < len(data) else at
    if at < end <= len(data):
        reader.at = end
        return data[at + 1 : end]
    return reader.take(reader.number(1))


def _old_text(data: bytes) -> Any:
    """A string of Python 2: text if it is UTF-8, otherwise bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


_INSTRUCTIONS: dict[int, Callable[[Reader], None]] = {
    0x80: _protocol,
    0x95: _frame,
    # containers
    ord("}"): _push(lambda r: {}),
    ord("]"): _push(lambda r: []),
    ord(")"): _push(lambda r: ()),
    0x8F: _push(lambda r: []),  # EMPTY_SET
    ord("("): _mark,
    ord("t"): _tuple,
    0x85: _pack(1),
    0x86: _pack(2),
    0x87: _pack(3),
    ord("a"): _append,
    ord("e"): _extend,
    0x90: _extend,  # ADDITEMS
    ord("s"): _insert,
    ord("u"): lambda r: r.insert(r.to_mark()),
    # the memo
    ord("q"): _put,
    ord("r"): _put_long,
    0x94: _memoize,
    ord("h"): _get,
    ord("j"): _get_long,
    ord("2"): _push(lambda r: r.top()),  # DUP
    # scalars
    ord("N"): _push(lambda r: None),
    0x88: _push(lambda r: True),
    0x89: _push(lambda r: False),
    ord("K"): _byte,
    ord("M"): _push(lambda r: r.number(2)),
    ord("J"): _push(lambda r: int.from_bytes(r.take(4), "little", signed=True)),
    0x8A: _push(lambda r: r.signed_integer(_short(r))),
    0x8B: _push(lambda r: r.signed_integer(r.take(r.number(4)))),
    ord("G"): _push(lambda r: struct.unpack(">d", r.take(8))[0]),
    ord("I"): _line_number,
    ord("L"): _line_number,
    # text and bytes
    0x8C: _push(lambda r: r.text(_short(r))),
    ord("X"): _text,
    0x8D: _push(lambda r: r.text(r.take(r.number(8)))),
    ord("U"): _push(lambda r: _old_text(_short(r))),
    ord("T"): _push(lambda r: _old_text(r.take(r.number(4)))),
    ord("C"): _push(_short),
    ord("B"): _push(lambda r: r.take(r.number(4))),
    0x8E: _push(lambda r: r.take(r.number(8))),
    0x96: _push(lambda r: r.take(r.number(8))),  # BYTEARRAY8
    # names and what is done with them
    ord("c"): lambda r: r.push_global(r.line(), r.line()),
    0x93: _push_global,
    ord("R"): _reduce,
    ord("b"): _build,
    ord("Q"): _persistent,
}
