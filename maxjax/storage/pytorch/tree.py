"""The names of a PyTorch file's tensors, derived from the nested dicts and lists of its pickle."""

from __future__ import annotations

import json
from typing import Any

from ...errors import CheckpointFormatError
from ..limits import Limits, check_name
from .names import Storage, Tensor
from .pickle_machine import Token, described

# A top-level dict with one of these names is the model if nothing else there holds tensors.
_WRAPPERS = {"state_dict", "model_state_dict", "model", "module"}
# Bytes of a name besides its letters, and of all names that are allowed for any pickle.
_NAME_BYTES = 32
_FREE_BYTES = 1 << 20
# (key at the top, dotted name, tensor)
Found = tuple[Any, str, Tensor]


def flatten(
    value: Any, *, path: str, offset: int, nbytes: int, limits: Limits
) -> tuple[list[tuple[str, Tensor]], dict[str, str]]:
    """([(name, tensor)], metadata) of the value of a pickle: ``nbytes`` bytes at ``offset`` of the file.

    The keys of nested dicts and lists are joined by dots. If all tensors are in one dict named
    state_dict, model_state_dict, model or module, its name is left out. Text and numbers beside the
    tensors, and lists of these, are the metadata.

    Raises:
        CheckpointFormatError: the value is not a dict, or two tensors have one name.
        CheckpointLimitError: there are too many tensors, or names are too long.
    """
    if type(value) is not dict:
        raise CheckpointFormatError(
            "top level: must be a dict of tensors",
            path=path,
            offset=offset,
            expected="a dict",
            found=described(value),
            hint="Save the state_dict of the model.",
        )
    walk = _Walk(path, offset, nbytes, limits)
    walk.run(value)
    tops = {top for top, _, _ in walk.found}
    top = tops.pop() if len(tops) == 1 else None
    skip = 0
    if type(top) is str and top in _WRAPPERS and type(value[top]) is dict:
        skip = len(top) + 1
    named: dict[str, Tensor] = {}
    for _, name, tensor in walk.found:
        name = name[skip:]
        if name in named:
            raise CheckpointFormatError(
                "two tensors have this name when the keys of nested dicts are joined by dots",
                path=path,
                tensor=name,
                offset=tensor.at,
                expected="one tensor",
                found="a second one",
            )
        named[name] = tensor
    return list(named.items()), walk.plain


class _Walk:
    """A bounded walk through the dicts and lists of a value."""

    def __init__(self, path: str, offset: int, nbytes: int, limits: Limits):
        self.path = path
        self.offset = offset
        self.max_bytes = _FREE_BYTES + nbytes * limits.expansion
        self.limits = limits
        self.found: list[Found] = []
        self.plain: dict[str, str] = {}
        self.lists: dict[int, str | None] = {}
        self.written = 0

    def run(self, value: dict) -> None:
        levels = [("", iter(value.items()))]
        top: Any = None
        while levels:
            prefix, rest = levels[-1]
            pair = next(rest, None)
            if pair is None:
                levels.pop()
                continue
            key, item = pair
            top = key if len(levels) == 1 else top
            name = prefix + _text(key)
            self._count(_NAME_BYTES + len(name))
            if type(item) is Tensor:
                self._add(top, name, item)
            elif type(item) is dict:
                levels.append((f"{name}.", iter(item.items())))
            elif type(item) in (list, tuple):
                text = self._list(item)
                if text is None:
                    levels.append((f"{name}.", iter(enumerate(item))))
                else:
                    self.plain[name] = text
            elif type(item) is not Storage:
                self.plain[name] = item if type(item) is str else _json(item)

    def _list(self, items: list | tuple) -> str | None:
        """A list of plain data as text, or None for another list; computed once per list."""
        if id(items) not in self.lists:
            text = None
            if all(type(item) in _PLAIN_TYPES for item in items):
                self._count(sum(8 + len(v) if isinstance(v, str | bytes) else 8 for v in items))
                text = _json(items)
            self.lists[id(items)] = text
        return self.lists[id(items)]

    def _add(self, top: Any, name: str, tensor: Tensor) -> None:
        where = {"path": self.path, "tensor": name, "offset": tensor.at}
        check_name(name, self.limits, **where)
        self.found.append((top, name, tensor))
        if len(self.found) > self.limits.tensors:
            raise self.limits.error("too many tensors", "tensors", len(self.found), **where)

    def _count(self, length: int) -> None:
        """Bounds the total length of names: a shared container gets names for each reference."""
        self.written += length
        if self.written > self.max_bytes:
            problem = "the pickle refers to its values too often"
            where = {"path": self.path, "offset": self.offset}
            option, limits = "expansion", self.limits
            raise limits.error(problem, option, f"more than {self.max_bytes} bytes", **where)


_PLAIN_TYPES = (str, int, float, bool, type(None), bytes, Token)


def _text(key: Any) -> str:
    if type(key) is bytes:
        return key.decode("utf-8", "backslashreplace")
    return key if type(key) is str else described(key)


def _json(item: Any) -> str:
    if type(item) in (list, tuple):
        return f"[{', '.join(json.dumps(v) if type(v) is str else _json(v) for v in item)}]"
    # Beyond this the interpreter may refuse to convert a number to decimal.
    if type(item) is int and item.bit_length() < 14_000:
        return str(item)
    return described(item)
