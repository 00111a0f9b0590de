"""The JSON schema of a Python function, by which chat templates describe a tool to a model.

The schema is that of ``transformers.utils.get_json_schema``
(https://huggingface.co/docs/transformers/chat_extras): names and types come from the signature,
descriptions from a docstring in Google's style.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from typing import Any

from ...errors import UserInputError

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_CONTAINERS = {list: "array", tuple: "array", dict: "object"}
_ADVICE = "pass the JSON schema of the tool instead of the function"
_SECTION = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)(?:[ \t]*\([^()\n]*\))?:[ \t]*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function with type hints and a docstring.

    A description of an argument may end in its possible values: ``(choices: ["a", "b"])``. ``self``
    and ``cls`` of methods are left out.

    Raises:
        UserInputError: there is no docstring, an argument has no type hint or no description, or a
            type has no JSON schema.

    Example:
        >>> def weather(city: str, days: int = 1):
        ...     '''Tells the weather.
        ...
        ...     Args:
        ...         city: name of the city
        ...         days: how many days
        ...     '''
        >>> schema = function_schema(weather)["function"]
        >>> schema["name"], schema["description"], schema["parameters"]["required"]
        ('weather', 'Tells the weather.', ['city'])
        >>> schema["parameters"]["properties"]["days"]
        {'type': 'integer', 'description': 'how many days'}
    """
    name = getattr(function, "__name__", type(function).__name__)
    text = inspect.getdoc(function)
    if not text:
        raise UserInputError(
            f"{name} has no docstring, which describes a tool: write one, or {_ADVICE}"
        )
    sections = _sections(text)
    described = _arguments(sections.get("Args", ""))
    properties, required = {}, []
    hints = _hints(name, function)
    for key, parameter in _parameters(name, function).items():
        if parameter.annotation is parameter.empty:
            raise UserInputError(
                f"argument {key} of {name} has no type hint: add one, or {_ADVICE}"
            )
        if key not in described:
            raise UserInputError(
                f"the docstring of {name} does not describe {key} in a section 'Args:': add it, or {_ADVICE}"
            )
        properties[key] = {
            **_schema(f"argument {key} of {name}", hints[key]),
            **_described(described[key]),
        }
        if parameter.default is parameter.empty:
            required.append(key)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    found = {"name": name, "description": sections[""], "parameters": parameters}
    if "return" in hints and (result := _result(hints["return"])) is not None:
        returns = sections.get("Returns")
        found["return"] = result if returns is None else {**result, "description": returns.strip()}
    return {"type": "function", "function": found}


def _parameters(name: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        found = dict(inspect.signature(function).parameters)
    except ValueError as error:  # some functions written in C
        raise UserInputError(f"{name} has no readable arguments: {_ADVICE}") from error
    first = next(iter(found), "")
    if first in ("self", "cls") and found[first].annotation is inspect.Parameter.empty:
        del found[first]
    return found


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:
        raise UserInputError(
            f"the type hints of {name} cannot be read ({error}): {_ADVICE}"
        ) from error


def _result(hint: Any) -> dict[str, Any] | None:
    try:
        return _schema("", hint)
    except UserInputError:  # the model does not make the result
        return None


# -- types


def _schema(what: str, hint: Any) -> dict[str, Any]:
    """The schema of the type hint of ``what``, a name for messages."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    refused = UserInputError(f"{what} has the type {hint}, which has no JSON schema: {_ADVICE}")
    if hint is Any:
        return {}
    if origin is typing.Literal:
        return _values(list(args), refused)
    if origin in (typing.Union, types.UnionType):
        return _union(what, args)
    if (
        origin in (dict, list, tuple) and not args
    ):  # typing.Dict and others without types of their elements
        return {"type": _CONTAINERS[origin]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(what, args[1])}
    if origin is list:
        return {"type": "array", "items": _schema(what, args[0])}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [_schema(what, one) for one in args]}
    if origin is None and isinstance(hint, type):
        if issubclass(hint, enum.Enum):
            return _values([one.value for one in hint], refused)
        if hint in _SCALARS or hint in _CONTAINERS:
            return {"type": (_SCALARS | _CONTAINERS)[hint]}
    raise refused


def _values(values: list[Any], refused: UserInputError) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise refused
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(what: str, args: tuple[Any, ...]) -> dict[str, Any]:
    found = [_schema(what, one) for one in args if one is not type(None)]
    names = [
        one["type"] for one in found if one.keys() == {"type"} and isinstance(one["type"], str)
    ]
    schema: dict[str, Any]
    if len(found) == 1:
        schema = found[0]
    elif len(names) == len(found):
        kinds = sorted(set(names))
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": found}
    return {**schema, "nullable": True} if type(None) in args else schema


# -- docstrings


def _sections(text: str) -> dict[str, str]:
    """The text before the first section as "", and each section by its name, as it is indented."""
    before, *parts = _SECTION.split(text)
    named = zip(parts[::2], parts[1::2], strict=True)
    return {"": before.strip(), **dict(named)}


def _arguments(section: str) -> dict[str, str]:
    """The description of each argument; its further lines are indented deeper than its name."""
    found: dict[str, list[str]] = {}
    depth, name = None, ""
    for line in section.splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None else depth
        start = _ARGUMENT.fullmatch(line.strip()) if indent <= depth else None
        if start:
            name = start[1]
            found[name] = [start[2].strip()]
        elif name:
            found[name].append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in found.items()}


def _described(text: str) -> dict[str, Any]:
    choices = _CHOICES.search(text)
    if choices is None:
        return {"description": text}
    try:
        values = json.loads(choices[1])
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise UserInputError(f'{choices[0]!r} is no list in JSON: write (choices: ["a", "b"])')
    return {
        "enum": [value.strip() if isinstance(value, str) else value for value in values],
        "description": text[: choices.start()].strip(),
    }
