"""The state of the pickle interpreter: data, stack, marks and memo, with their checks and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
    shown,
)
from ..files import DOWNLOAD_AGAIN
from ..limits import Limits, digits_hint


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A global that a pickle may ask for; it is a placeholder and never imported.

    ``value`` is its meaning in the format. ``reduce`` is our function that replaces a call of it: it
    takes the ``Reader`` and the arguments and returns a plain value.
    """

    module: str
    name: str
    value: Any = None
    reduce: Callable[[Any, tuple], Any] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def described(value: Any) -> str:
    """A value of a pickle as short text, without looking into it.

    Example:
        >>> described("a"), described((1, (2, 3))), described(None)
        ("'a'", 'a tuple of 2', 'None')
    """
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return str(value) if isinstance(value, Token) else shown(value)


# --- the size of a value -----------------------------------------------------------------------


_CHILDREN: dict[type, Callable[[Any], Any]] = {dict: dict.values, list: iter, tuple: iter}


class _Level:
    """A container being measured: its number of ``values`` so far, and its depth in ``levels``."""

    __slots__ = ("value", "rest", "values", "levels")

    def __init__(self, value: Any):
        self.value = value
        self.rest = iter(_CHILDREN[type(value)](value))
        self.values = self.levels = 1

    def add(self, values: int, levels: int) -> None:
        self.values += values
        self.levels = max(self.levels, levels + 1)

    def next(self, measured: dict[int, tuple[int, int]]) -> Any:
        """The next container in it that is not measured yet, or None."""
        for child in self.rest:
            if type(child) not in _CHILDREN:
                self.values += 1
            elif id(child) in measured:
                self.add(*measured[id(child)])
            else:
                return child
        return None


def measure(value: Any, limits: Limits, over_limit: Callable[[str, str, int], Exception]) -> None:
    """Checks depth and size of a value, counting a shared container once for each reference.

    ``over_limit`` makes the error from the problem, the limit's name and the value.
    """
    items, depth = limits.pickle_items, limits.pickle_depth
    measured: dict[int, tuple[int, int]] = {}  # id → (values, levels)
    path = [_Level(value)] if type(value) in _CHILDREN else []
    inside = {id(value)}
    while path:
        level = path[-1]
        child = level.next(measured)
        if level.values > items:
            raise over_limit("the pickle holds too many values", "pickle_items", level.values)
        if child is not None:
            if id(child) in inside or len(path) >= depth:
                raise over_limit("values are nested too deep", "pickle_depth", depth + 1)
            inside.add(id(child))
            path.append(_Level(child))
            continue
        if len(path) + level.levels - 1 > depth:
            raise over_limit("values are nested too deep", "pickle_depth", depth + 1)
        path.pop()
        inside.discard(id(level.value))
        measured[id(level.value)] = level.values, level.levels
        if path:
            path[-1].add(level.values, level.levels)


_SAFE = "No code in the file was run. Use a safetensors version."
# Safe types of keys: a file cannot choose their hashes, and so cannot slow down a dict by collisions.
_KEYS = (str, int, bool, bytes, float, type(None))
_HASH_MODULUS = 2**61 - 1
# torch.save writes up to 32 instructions for a tensor, and 10 more for a parameter.
_INSTRUCTIONS_PER_TENSOR = 64
# Numbers of at most this many bytes are read without checking the limit on long ones.
_SHORT_BYTES = 8
# Number of stack items searched for the name of the tensor that an error concerns.
_MAX_SEARCHED = 64
Find = Callable[[str, str], Token | None]


class Reader:
    """The state of one pass over a pickle.

    ``at`` is the offset of the next byte, and ``op`` that of the current instruction. ``stack`` holds
    the values since the last mark, ``marks`` the stacks before it, and ``tensors`` is the number of
    tensors created so far.
    """

    def __init__(
        self,
        data: bytes,
        path: str,
        offset: int,
        limits: Limits,
        tokens: Find,
        persistent: Callable[[Reader, Any], Any] | None,
        start: int,
        is_compressed: bool,
    ):
        self.data = data
        self.path = path
        self.offset = offset
        self.is_compressed = is_compressed
        self.limits = limits
        self.tokens = tokens
        self.persistent = persistent
        self.at = self.op = start
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.tensors = 0

    # --- errors ---

    def where(self, at: int) -> int:
        """The offset in the file of byte ``at`` of the data."""
        return self.offset if self.is_compressed else self.offset + at

    def error(self, problem: str, expected: str, found: str, key: Any = None) -> CheckpointError:
        """The error for an invalid pickle; ``key`` is the tensor's key in its dict."""
        return CheckpointFormatError(
            problem,
            path=self.path,
            tensor=self._tensor_name(key),
            offset=self.where(self.op),
            expected=expected,
            found=found,
        )

    def unsafe(self, problem: str, found: str) -> CheckpointError:
        """The error for something that would run code."""
        return CheckpointUnsafeError(
            problem,
            path=self.path,
            tensor=self._tensor_name(),
            offset=self.where(self.op),
            expected="a global that PyTorch uses to store tensors",
            found=found,
            hint=_SAFE,
        )

    def truncated(self, wanted: int) -> CheckpointError:
        """The error for data that ends before ``wanted`` more bytes."""
        available = len(self.data) - self.at
        return CheckpointTruncatedError(
            f"the pickle {'ends inside an instruction' if wanted > 1 else 'has no STOP instruction'}",
            path=self.path,
            offset=self.where(self.at),
            expected=f"{wanted} bytes",
            found=f"{available} bytes",
            hint=DOWNLOAD_AGAIN,
        )

    def over_limit(
        self, problem: str, option: str, value: int, fixed: str | None = None
    ) -> CheckpointError:
        """The error for a value over the limit ``option``; ``fixed`` says why raising it does not help."""
        offset, name = self.where(self.op), self._tensor_name()
        more = {"path": self.path, "tensor": name, "offset": offset}
        return self.limits.error(problem, option, value, fixed=fixed, **more)

    def _tensor_name(self, key: Any = None) -> str | None:
        """The name of the tensor being built, as far as the keys on the stack show it."""
        keys: list[Any] = []
        frames = [*self.marks[:_MAX_SEARCHED], self.stack]
        for number, frame in enumerate(frames):
            before = frames[number - 1][-1:] if number else []
            if before and type(before[0]) is dict:  # the keys and values of SETITEMS
                last = len(frame) - 1 - (len(frame) - 1) % 2
                found = [k for k in frame[max(last - 2, 0) : last + 1 : 2] if type(k) is str][-1:]
            else:  # a dict and its one key, for SETITEM
                pairs = pairwise(frame[:_MAX_SEARCHED])
                found = [key for container, key in pairs if type(container) is dict]
            keys.extend(found)
        return ".".join(k for k in [*keys, key] if type(k) is str) or None

    def unknown_name(self, module: str, name: str) -> CheckpointError:
        """The error for a global that is not in the table."""
        asked = f"{module}.{name}"[:200]
        return self.unsafe(f"the file asks for '{asked}', which weights do not need", asked)

    # --- bounds ---

    def max_instructions(self) -> int:
        """The number of instructions allowed, given the tensors created so far."""
        return self.limits.pickle_instructions + _INSTRUCTIONS_PER_TENSOR * self.tensors

    def count_tensor(self) -> None:
        """Counts one more tensor."""
        self.tensors += 1
        if self.tensors > self.limits.tensors:
            raise self.over_limit("too many tensors", "tensors", self.tensors)

    # --- operands ---

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        begin, end = self.at, self.at + count
        if end > len(self.data):
            raise self.missing_bytes(count)
        self.at = end
        return self.data[begin:end]

    def missing_bytes(self, count: int) -> CheckpointError:
        """The error for ``count`` missing bytes: over the limit, or the data ends earlier."""
        if count > self.limits.pickle_bytes:
            return self.over_limit("a value of the pickle is too long", "pickle_bytes", count)
        return self.truncated(count)

    def number(self, width: int) -> int:
        """The next ``width`` bytes as an unsigned number."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """The text up to the end of the line."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise self.truncated(len(self.data) - self.at + 1)
        return self.text(self.take(end + 1 - self.at)[:-1])

    def text(self, data: bytes) -> str:
        """UTF-8 as text."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            found = f"byte {data[error.start]:02X}"
            raise self.error("text that is not UTF-8", "UTF-8", found) from None

    def pop(self) -> Any:
        """The top of the stack."""
        if not self.stack:
            raise self.error("an instruction without its operand", "a value", "an empty stack")
        return self.stack.pop()

    def top(self, *kinds: type) -> Any:
        """The top of the stack, without popping it; its type must be one of ``kinds`` if any are given."""
        self.stack.append(value := self.pop())
        if kinds and type(value) not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise self.error("an instruction on a value of another type", wanted, described(value))
        return value

    def to_mark(self) -> list[Any]:
        """Pops what was built since the last mark."""
        if not self.marks:
            raise self.error("an instruction without its mark", "a mark", "none")
        values, self.stack = self.stack, self.marks.pop()
        return values

    def remember(self, slot: int) -> None:
        """Stores the top of the stack in the memo."""
        if slot >= self.max_instructions():  # each slot takes one
            raise self.over_limit("a slot of the memo", "pickle_instructions", slot)
        self.memo[slot] = self.top()

    def recall(self, slot: int) -> None:
        """Pushes a value from the memo."""
        if slot not in self.memo:
            raise self.error("a slot of the memo", "one that was filled", str(slot))
        self.stack.append(self.memo[slot])

    def insert(self, pairs: list[Any]) -> None:
        """Inserts alternating keys and values into the dict on top of the stack."""
        target = self.stack[-1] if self.stack else None
        if type(target) is not dict:
            target = self.top(dict)
        if len(pairs) % 2:
            raise self.error("keys and values of a dict", "pairs", f"{len(pairs)} values")
        for key, value in zip(pairs[0::2], pairs[1::2], strict=True):
            if type(key) is not str:
                self.check_key(key)
            if key in target:
                raise self.error(
                    "a key occurs twice in one dict", "unique keys", described(key), key
                )
            target[key] = value

    def check_key(self, key: Any) -> None:
        """Refuses a key that a dict should not be asked to hash."""
        if type(key) not in _KEYS:
            raise self.error("a key of a dict", "text or a number", described(key))
        if type(key) is int and abs(key) >= _HASH_MODULUS:
            raise self.error("a key of a dict", "a number below 2^61", described(key))

    def push_global(self, module: Any, name: Any) -> None:
        """Pushes the token of a global."""
        if type(module) is not str or type(name) is not str:
            asked = f"{described(module)}, {described(name)}"
            raise self.unsafe("the file asks for a global whose name is not text", asked)
        token = self.tokens(module, name)
        if token is None:
            raise self.unknown_name(module, name)
        self.stack.append(token)

    def signed_integer(self, data: bytes) -> int:
        """A signed number of any length."""
        if len(data) <= _SHORT_BYTES:
            return int.from_bytes(data, "little", signed=True)
        digits = len(data) * 2408 // 1000
        if digits > self.limits.json_digits + 3:
            raise self.over_limit("a number has too many digits", "json_digits", digits)
        return int.from_bytes(data, "little", signed=True)

    def decimal(self) -> Any:
        """A number as text; ``00`` and ``01`` are False and True."""
        text = self.line()
        if text in ("00", "01"):
            return text == "01"
        digits = text.removesuffix("L")
        if len(digits) > self.limits.json_digits:
            raise self._digits(len(digits))
        plain = digits.removeprefix("-")
        if not (plain.isascii() and plain.isdigit()):
            raise self.error("a number as text", "digits", described(text))
        try:
            return int(digits)
        except ValueError:  # the interpreter has a limit of its own
            raise self._digits(len(plain)) from None

    def _digits(self, count: int) -> CheckpointError:
        """The error for a number as text that is too long."""
        problem = "a number has too many digits"
        return self.over_limit(problem, "json_digits", count, digits_hint(count))
