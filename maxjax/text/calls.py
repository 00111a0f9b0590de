"""How models write calls of functions, and readers that take such a text as it comes.

A :class:`Syntax` is the data of one way to write calls: the mark that opens one, the mark that closes it, and what is
between them. It makes a reader for each call, which gets the text after the opening mark again and again, longer each
time, until it can tell what the text is. What it tells does not depend on where the text was cut.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .template.function_schema import function_schema

Functions = Mapping[str, Mapping[str, Any]]
"""The functions that a request offers: the JSON schemas of the arguments of each, by its name."""

Reader = Callable[[str, bool], "Found | None"]
"""Takes the text after an opening mark, and whether it is whole; None: more text is needed."""


class Call(NamedTuple):
    """A call of a function, with the id that the model gave it, if its format has one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Found(NamedTuple):
    """What a reader has found at the beginning of its text.

    Attributes:
        length: the number of characters that belong to the calls; if there are none, those that are not looked at
            again, or -1 for all up to the end of the bracket that the opening mark is.
        calls: the calls; none if the text is not a call.
    """

    length: int
    calls: tuple[Call, ...] = ()


_NO_CALL = Found(0)
_SKIP = Found(-1)
# A longer beginning of a call without its arguments is not one.
_LONGEST_HEADER = 500


def functions_of(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the schemas of the arguments of each function, by its name.

    Args:
        tools: the tools of a request, as in :func:`~maxjax.apply_chat_template`; those without a name are left out.

    Example:
        >>> functions_of([{"type": "function", "function": {"name": "f", "parameters": {
        ...     "properties": {"a": {"type": "string"}}}}}])
        {'f': {'a': {'type': 'string'}}}
    """
    found = {}
    for tool in tools or ():
        schema = function_schema(tool) if callable(tool) else tool
        schema = schema.get("function", schema) if isinstance(schema, Mapping) else {}
        if isinstance(schema, Mapping) and isinstance(name := schema.get("name"), str):
            parameters = schema.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[name] = dict(properties) if isinstance(properties, Mapping) else {}
    return found


def json_of(arguments: Any) -> str:
    """Return arguments as JSON text, which can be encoded as UTF-8.

    Example:
        >>> json_of({"city": "Tromsø"}), json_of({"half": "\\ud83d"})
        ('{"city": "Tromsø"}', '{"half": "\\\\ud83d"}')
    """
    text = json.dumps(arguments, ensure_ascii=False)
    return text if _encodes(text) else json.dumps(arguments)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parsed(text: str) -> Any:
    """Return the value of a JSON text; None if it is not one, or has numbers that JSON cannot write."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def calls_of(value: Any, call_id: str | None = None) -> tuple[Call, ...]:
    """Return the calls that a JSON value is: an object with a name and arguments, or a list of such objects."""
    listed = value if isinstance(value, list) else [value]
    calls = [_call(one, call_id) for one in listed]
    return tuple(one for one in calls if one is not None) if all(calls) else ()


def _call(item: Any, call_id: str | None) -> Call | None:
    if not isinstance(item, dict):
        return None
    if isinstance(item.get("function"), dict):
        item = {**item, **item["function"]}
    name = item.get("name", item.get("tool_name"))
    given = item.get("arguments", item.get("parameters", {}))
    given = parsed(given) if isinstance(given, str) else given
    if not isinstance(name, str) or not name or not isinstance(given, dict):
        return None
    # Command A's "tool_call_id" counts from 0 in every answer: it is no id among those of a chat.
    given_id = item.get("id", call_id)
    return Call(name, given, given_id if isinstance(given_id, str) else call_id)


class Balanced:
    """Finds the end of a value in brackets, in a text that grows.

    Args:
        quotes: the characters around texts, in which brackets do not count.
        stop: a mark that cannot be in the value outside of texts.

    Attributes:
        at: everything before this place has been looked at.
    """

    def __init__(self, quotes: str = '"', stop: str = ""):
        self._outside = re.compile(
            rf"[{quotes}{{}}()\[\]]" + (f"|{re.escape(stop)}" if stop else "")
        )
        self._quotes, self._kept = quotes, max(len(stop) - 1, 0)
        self._depth, self._quote, self.at = 0, "", 0

    def end(self, text: str) -> int | None:
        """Return the end of the value; None: more text is needed; -1: the mark that cannot be in it comes first."""
        while True:
            if self._quote:
                found = re.compile(rf"[\\{self._quote}]").search(text, self.at)
                if found is None:
                    self.at = len(text)
                    return None
                if found[0] == "\\":
                    self.at = found.start()
                    if found.end() == len(text):
                        return None
                    self.at = found.end() + 1
                    continue
                self.at, self._quote = found.end(), ""
            found = self._outside.search(text, self.at)
            if found is None:
                self.at = max(self.at, len(text) - self._kept)
                return None
            self.at = found.end()
            if found[0] in self._quotes:
                self._quote = found[0]
            elif found[0] in "{[(":
                self._depth += 1
            elif found[0] in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return self.at
            else:
                return -1


# --- JSON -------------------------------------------------------------------------------------------------


class JsonSyntax(NamedTuple):
    """Calls as JSON: an object or a list of them, or a name and then the object of its arguments.

    Attributes:
        opening, closing: the marks around it. The closing mark may be absent.
        header: what is between the opening mark and the arguments, with groups ``name`` and ``id``; None if the name
            is in the JSON text.
        is_list: whether the JSON text is a list.
        is_keyed: whether a call is an object of the name and the arguments: ``{name: {…}}``.
    """

    opening: str
    closing: str = ""
    header: str = ""
    is_list: bool = False
    is_keyed: bool = False

    def reader(self, functions: Functions | None) -> Reader:
        return _JsonReader(self).read


class _JsonReader:
    def __init__(self, syntax: JsonSyntax):
        self._syntax = syntax
        self._balanced = Balanced(stop=syntax.closing)
        self._start = self._end = -1
        self._name: str | None = None
        self._id: str | None = None
        self._calls: tuple[Call, ...] = ()

    def read(self, text: str, is_whole: bool) -> Found | None:
        wait = Found(len(text)) if is_whole else None  # a cut call is no call
        if self._start < 0:
            start = self._beginning(text)
            if start is None:
                return wait
            if start < 0:
                return _NO_CALL
            self._start = self._balanced.at = start
        while True:
            if self._end < 0:
                end = self._balanced.end(text)
                if end is None:
                    return wait
                if end < 0:
                    return _NO_CALL
                self._end = end
            at = _after_blanks(text, self._end)
            if self._syntax.closing and at == len(text) and not is_whole:
                return None
            value = parsed(text[self._start : self._end])
            if self._name is not None:
                calls = (Call(self._name, value, self._id),) if isinstance(value, dict) else ()
            else:
                calls = calls_of(_keyed(value) if self._syntax.is_keyed else value)
            if not calls:
                return Found(self._end)
            if not self._syntax.closing or self._name or not text.startswith("{", at):
                length = _closed(text, self._end, self._syntax.closing, is_whole)
                return None if length is None else Found(length, (*self._calls, *calls))
            # MiniMax M1 writes several objects between the marks.
            self._calls += calls
            self._start, self._end = at, -1

    def _beginning(self, text: str) -> int | None:
        """Where the JSON text begins; None: more text is needed; -1: it is no call."""
        if not self._syntax.header:
            at = len(text) - len(text.lstrip())
            if at == len(text):
                return None
            return at if text[at] in ("[" if self._syntax.is_list else "{[") else -1
        brace = text.find("{", 0, _LONGEST_HEADER)
        if brace < 0:
            return None if len(text) < _LONGEST_HEADER else -1
        header = re.compile(self._syntax.header).fullmatch(text, 0, brace)
        if header is None:
            return -1
        self._name, self._id = header["name"], header.groupdict().get("id")
        return brace


def _keyed(value: Any) -> Any:
    """The calls of ``[{name: {…}}]`` in the usual form; what has another form as it is."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return value
    return [{"name": name, "arguments": given} for one in value for name, given in one.items()]


def _closed(text: str, end: int, closing: str, is_whole: bool) -> int | None:
    """Return the place after the closing mark, or ``end`` if there is none; None: more text is needed."""
    if not closing:
        return end
    rest = text[end:].lstrip()
    if rest.startswith(closing):
        return len(text) - len(rest) + len(closing)
    if closing.startswith(rest):
        return len(text) if is_whole else None
    return end


class BareSyntax(NamedTuple):
    """Calls as a JSON object without marks, as Llama 3 writes them.

    Only names of functions that the request offers make it a call.
    """

    opening: str = "{"

    def reader(self, functions: Functions | None) -> Reader:
        balanced = Balanced()

        def read(text: str, is_whole: bool) -> Found | None:
            text = "{" + text
            key = _FIRST_KEY.match(text)
            if key is None:
                return None if _BEGINS_KEY.fullmatch(text) and not is_whole else _SKIP
            if key[1] not in _KEYS_OF_CALLS:
                return _SKIP
            end = balanced.end(text)
            if end is None:
                return Found(len(text) - 1) if is_whole else None
            calls = calls_of(parsed(text[:end]))
            known = all(call.name in (functions or ()) for call in calls)
            return Found(end - 1, calls if known else ())

        return read


_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"')
_BEGINS_KEY = re.compile(r'\{\s*("(?:[^"\\]|\\.)*\\?)?')
_KEYS_OF_CALLS = frozenset("name type function parameters arguments id".split())


# --- marks inside of marks --------------------------------------------------------------------------------


class _MarkedReader:
    """Reads what is before the closing mark, once that is whole: the mark may also be in a value.

    Args:
        closing: the mark.
        parse: returns the calls in a text; none if it is not a call, None if it ends inside of a value.
        begins: a pattern of all beginnings of calls.
        before: the end of a value, which is before the closing mark unless that is in a value.
        ends_alone: whether a call that is whole is a call without the closing mark, too.
        parse_loosely: reads the text before the first closing mark where nothing else can be read.
    """

    def __init__(
        self,
        closing: str,
        parse: Callable[[str], tuple[Call, ...] | None],
        begins: str = ".*",
        before: str = "",
        ends_alone: bool = False,
        parse_loosely: Callable[[str], tuple[Call, ...] | None] | None = None,
    ):
        self._closing, self._parse, self._parse_loosely = closing, parse, parse_loosely
        self._begins, self._before = re.compile(begins, re.DOTALL), before
        self._ends_alone = ends_alone
        self._first, self._at, self._effort = -1, 0, 0

    def read(self, text: str, is_whole: bool) -> Found | None:
        if not self._begins.fullmatch(text, 0, _LONGEST_HEADER):
            return _NO_CALL
        while (at := text.find(self._closing, self._at)) >= 0:
            is_first = self._first < 0
            self._first = at if is_first else self._first
            self._at = at + len(self._closing)
            if not is_first and not text[max(at - 99, 0) : at].rstrip().endswith(self._before):
                self._effort += 1
            elif (calls := self._parse(text[:at])) is not None:
                return Found(self._at, calls) if calls else _NO_CALL
            else:
                self._effort += 4
            # Not even a text about calls has that many marks.
            if self._effort > 250:
                return self._loose(text, self._at)
        self._at = max(self._at, len(text) - len(self._closing) + 1)
        if not is_whole:
            return None
        if self._first < 0 and self._ends_alone:
            return Found(len(text), self._parse(text) or ())
        return self._loose(text, len(text))

    def _loose(self, text: str, length: int) -> Found:
        if self._first < 0 or self._parse_loosely is None:
            return Found(length)
        calls = self._parse_loosely(text[: self._first])
        return Found(self._first + len(self._closing), calls) if calls else Found(length)


class XmlSyntax(NamedTuple):
    """Calls with a tag for the function and one for each of its arguments.

    Attributes:
        opening, closing: the tags of the function; the opening one without the name.
        name: a pattern of the rest of the opening tag, with a group ``name``.
        parameter, end: the tags of an argument; ``parameter`` is a pattern with a group ``name``, and ``text`` where
            the tag says whether the value is text ("true") or JSON.
        is_inline: whether values stand between the tags as they are, and not on lines of their own.
    """

    opening: str = "<function="
    closing: str = "</function>"
    name: str = r"(?P<name>[^>\s]+)>"
    parameter: str = r"<parameter=(?P<name>[^>\n]+)>"
    end: str = "</parameter>"
    is_inline: bool = False

    def reader(self, functions: Functions | None) -> Reader:
        parse = functools.partial(self._parse, functions)
        loosely = functools.partial(self._parse, functions, is_loose=True)
        return _MarkedReader(self.closing, parse, before=self.end, parse_loosely=loosely).read

    def _parse(
        self, functions: Functions | None, text: str, is_loose: bool = False
    ) -> tuple[Call, ...] | None:
        matched = re.match(self.name, text)
        if matched is None:
            return ()
        name, at, arguments = matched["name"], matched.end(), {}
        if text.startswith("{", at) and isinstance(value := parsed(text[at:]), dict):
            return (Call(name, value),)  # Functionary, and Llama 3.1's own format
        schemas = None if functions is None else functions.get(name, {})
        parameter = re.compile(rf"\s*{self.parameter}")
        # Text that looks like the end of a value may be in it: what follows the end is a tag, or nothing.
        following = re.sub(r"\(\?P<\w+>", "(?:", rf"\s*(?={self.parameter}|\Z)")
        ends = re.compile(
            (f"(?:{re.escape(self.end)})?" if is_loose else re.escape(self.end)) + following
        )
        while matched := parameter.match(text, at):
            ended = ends.search(text, matched.end())
            if ended is None:
                return None
            value, at = text[matched.end() : ended.start()], ended.end()
            inner = re.finditer(self.parameter, value)
            if not is_loose and any(one["name"].strip() in (schemas or ()) for one in inner):
                return self._parse(functions, text, is_loose=True)  # an end of a value is missing
            if not self.is_inline:
                value = value.removeprefix("\n").removesuffix("\n")
            key, is_text = matched["name"].strip(), matched.groupdict().get("text")
            if is_text is None:
                arguments[key] = _by_schema(value, schemas, key)
            elif is_text == "true":
                arguments[key] = value
            else:
                read = parsed(value)
                arguments[key] = value if read is None and value.strip() != "null" else read
        return () if text[at:].strip() else (Call(name, arguments),)


class PairsSyntax(NamedTuple):
    """Calls as a name and then pairs of marked keys and values, as GLM writes them."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"

    def reader(self, functions: Functions | None) -> Reader:
        parse = functools.partial(_pairs, functions)
        return _MarkedReader(self.closing, parse, r"\s*[\w.:\-]*\s*(?:<.*)?").read


_PAIR_NAME = re.compile(r"\s*(?P<name>[\w.:\-]+)\s*")
_PAIR_KEY = re.compile(r"\s*<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_PAIR_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))")


def _pairs(functions: Functions | None, text: str) -> tuple[Call, ...] | None:
    named = _PAIR_NAME.match(text)
    if named is None:
        return ()
    schemas = None if functions is None else functions.get(named["name"], {})
    arguments, at = {}, named.end()
    while key := _PAIR_KEY.match(text, at):
        ended = _PAIR_END.search(text, key.end())
        if ended is None:
            return None
        name = key["name"].strip()
        arguments[name] = _by_schema(text[key.end() : ended.start()], schemas, name)
        at = ended.end()
    return () if text[at:].strip() else (Call(named["name"], arguments),)


def _by_schema(text: str, schemas: Mapping[str, Any] | None, name: str) -> Any:
    """Return the value of an argument that was written without quotes: text, or the type that its schema has.

    Without the functions of the request it is JSON if it can be; an argument that they do not have is text.
    """
    if schemas is None:
        types = {"string", "null", "boolean", "integer", "number", "object", "array"}
    else:
        types = _types(schemas.get(name))
    if types == {"string"}:
        return text
    word, value = text.strip().lower(), parsed(text)
    if "null" in types and word in ("null", "none"):  # templates that write Python's words
        return None
    if value is not None and _type_of(value) & types:
        return value
    if "boolean" in types and word in ("true", "1", "false", "0"):
        return word in ("true", "1")
    return text if "string" in types or value is None else value


def _types(schema: Any) -> set[str]:
    """Return the types that a JSON schema permits; text if it says nothing."""
    if not isinstance(schema, Mapping):
        return {"string"}
    given = schema.get("type")
    found = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    for value in schema.get("enum") or ():
        found |= {min(_type_of(value))}
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(key) or ():
            found |= _types(choice)
    return found or {"string"}


def _type_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


# --- Gemma and Python -------------------------------------------------------------------------------------


class BracesSyntax(NamedTuple):
    """Calls as ``call:name{key:value}`` with a mark around texts, as Gemma writes them."""

    opening: str
    closing: str
    quote: str

    def reader(self, functions: Functions | None) -> Reader:
        begins = r"\s*(?:c|ca|cal|call|call:.*)?"
        return _MarkedReader(self.closing, self._parse, begins, ends_alone=True).read

    def _parse(self, text: str) -> tuple[Call, ...] | None:
        named = re.match(r"\s*call:\s*(?P<name>[^\s{]+)\s*(?=\{)", text)
        if named is None:
            return ()
        if text.count(self.quote) % 2:
            return None
        try:
            value, at = self._value(text, named.end())
        except (ValueError, IndexError, RecursionError):
            return ()
        ended = isinstance(value, dict) and not text[at:].strip()
        return (Call(named["name"], value),) if ended else ()

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        at = _after_blanks(text, at)
        if text.startswith(self.quote, at):
            return self._quoted(text, at)
        if text[at] not in "{[":
            ended = re.compile(r"[,}\]]").search(text, at)
            word = text[at : ended.start() if ended else len(text)].strip()
            value = parsed(word)
            is_null = word in ("null", "None")
            return (word if value is None and not is_null else value), at + len(word)
        is_object, closing = text[at] == "{", "}" if text[at] == "{" else "]"
        values: list[Any] = []
        at = _after_blanks(text, at + 1)
        while text[at] != closing:
            key = ""
            if is_object:
                if text.startswith(self.quote, at):
                    key, at = self._quoted(text, at)
                    at = text.index(":", at) + 1
                else:
                    end = text.index(":", at)
                    key, at = text[at:end].strip(), end + 1
            value, at = self._value(text, at)
            values.append((key, value) if is_object else value)
            at = _after_blanks(text, at)
            if text[at] == ",":
                at = _after_blanks(text, at + 1)
            elif text[at] != closing:
                raise ValueError(text[at])
        return (dict(values) if is_object else values), at + 1

    def _quoted(self, text: str, at: int) -> tuple[str, int]:
        at += len(self.quote)
        end = text.index(self.quote, at)
        return text[at:end], end + len(self.quote)


def _after_blanks(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


class PythonSyntax(NamedTuple):
    """Calls as Python: a list of them, or one on each line.

    Attributes:
        opening, closing: the marks around it. Without a closing mark the opening one is the bracket of the list, and
            only names that the request has make it calls.
    """

    opening: str
    closing: str = ""

    def reader(self, functions: Functions | None) -> Reader:
        if self.closing:
            return _MarkedReader(self.closing, _python_calls, ends_alone=True).read
        balanced = Balanced("\"'")

        def read(text: str, is_whole: bool) -> Found | None:
            text = self.opening + text
            names = [*(functions or ())]
            head = re.match(r"\[\s*([\w.]*)\s*(\(?)", text)
            if head is not None and (head[2] or len(head[0]) < len(text)):
                if head[1] not in names or not head[2]:
                    return _SKIP
            end = balanced.end(text)
            if end is None:
                return Found(len(text) - 1) if is_whole else None
            calls = _python_calls(text[:end]) or ()
            return Found(end - 1, calls if all(call.name in names for call in calls) else ())

        return read


class BuiltinSyntax(NamedTuple):
    """A call ``name.call(key="value")`` after a mark, as Llama 3 writes those of its built-in tools."""

    opening: str

    def reader(self, functions: Functions | None) -> Reader:
        balanced = Balanced("\"'")

        def read(text: str, is_whole: bool) -> Found | None:
            if re.match(r"\s*\w+\.call\(", text) is None:
                begins = re.fullmatch(r"\s*\w*(?:\.(?:c|ca|cal|call)?)?", text)
                return _NO_CALL if begins is None or is_whole else None
            end = balanced.end(text)
            if end is None:
                return Found(len(text)) if is_whole else None
            calls = _python_calls(text[:end]) or ()
            return Found(
                end, tuple(one._replace(name=one.name.removesuffix(".call")) for one in calls)
            )

        return read


def _python_calls(text: str) -> tuple[Call, ...] | None:
    """Return the calls in Python's syntax; none if it is something else, None if it ends inside of a text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes before other characters
            body = ast.parse(text.strip()).body
        values = [one.value for one in body if isinstance(one, ast.Expr)]
        if len(values) != len(body):
            return ()
        if len(values) == 1 and isinstance(values[0], ast.List):
            values = values[0].elts
        return tuple(map(_python_call, values))
    except SyntaxError as error:
        return None if "unterminated" in error.msg else ()
    except (ValueError, RecursionError, MemoryError):
        return ()


def _python_call(node: ast.AST) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("it is not a call with named arguments")
    arguments = {}
    for one in node.keywords:
        if one.arg is None:
            raise ValueError("it has arguments without a name")
        arguments[one.arg] = _python_value(one.value)
    return Call(ast.unparse(node.func), arguments)


_WORDS = {"true": True, "false": False, "null": None}


def _python_value(node: ast.AST) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_python_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_python_value(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("the keys of a JSON object are text")
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("JSON has no such number")
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError("JSON has no such type")
