"""The filters, tests, methods and globals of jinja that a template may use, each with its size cap.

Some make a result larger than their arguments (by a width, a count or a repetition), or take more
than linear time, and none can be interrupted, since each is a single call of C code. So each has a
cap here: a function of the arguments that returns an upper bound of the result's size, or refuses.
What is not listed cannot be used, so that a later version of jinja adds nothing unreviewed.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.utils import Cycler
from markupsafe import Markup

from .budget import TOO_MUCH, TooMuchError, budget

Cap = Callable[..., int]


def _linear(*arguments: Any, **options: Any) -> int:
    """The cap of functions that need linear time, and make a few times their input at most."""
    return 0


def _refused(*arguments: Any, **options: Any) -> int:
    raise TooMuchError("it uses a function that chat templates may not use")


def _numbers(*arguments: Any, **options: Any) -> int:
    given = [*arguments, *options.values()]
    return max((abs(item) for item in given if isinstance(item, int)), default=0)


def _wide(value: Any, *arguments: Any, **options: Any) -> int:
    """The cap of functions that have a width or a count as an argument."""
    return _numbers(*arguments, **options)


def _few(most: int) -> Cap:
    """The cap of functions that repeat a number or text: each may be at most ``most``."""

    def cap(value: Any, *arguments: Any, **options: Any) -> int:
        given = []
        for item in [*arguments, *options.values()]:
            given += item if isinstance(item, (list, tuple)) else [item]
        lengths = [len(item) for item in given if isinstance(item, (str, bytes))]
        return 0 if max([_numbers(*given), len(given), *lengths]) <= most else TOO_MUCH

    return cap


def _short(most: int, *others: str, few: int = 256) -> Cap:
    """The cap of functions of more than linear time: the text may have ``most`` characters.

    ``others`` names arguments whose size does not matter.
    """

    def cap(value: Any, *arguments: Any, **options: Any) -> int:
        options = {name: item for name, item in options.items() if name not in others}
        length = budget().weigh(value)[0]
        budget().step(16 * min(length, most))
        return (
            _few(few)(value, *arguments[len(others) :], **options) if length <= most else TOO_MUCH
        )

    return cap


def _attribute(value: Any, *arguments: Any, **options: Any) -> int:
    """The cap of functions with an ``attribute``: each of its commas adds a value for each item."""
    given = [item for item in [*arguments, *options.values()] if isinstance(item, str)]
    return 0 if max(map(len, given), default=0) <= 100 else TOO_MUCH


def _distinct(items: Any, *arguments: Any, **options: Any) -> int:
    """The cap of looking for equal items: values can be chosen so that it takes quadratic time."""
    count = len(items) if hasattr(items, "__len__") else 1
    budget().step(count * count >> 6)
    return _attribute(items, *arguments, **options)


def _sorted(items: Any, *arguments: Any, **options: Any) -> int:
    """The cap of sorting, which compares attributes or their default: large ones take long."""
    given = [*arguments, *options.values()]
    budget().weigh(items)
    if budget().opaque and any(isinstance(item, str) for item in given):
        return TOO_MUCH
    count = len(items) if hasattr(items, "__len__") else 1
    return _attribute(items, *given) + budget().weigh(*given)[0] * count


def _backwards(text: Any, sought: Any = None, *more: Any, **options: Any) -> int:
    """The cap of searches from the end, which take quadratic time."""
    sought = options.get("sep", sought)
    if not isinstance(sought, (str, bytes)):
        return 0
    return 0 if len(text) * len(sought) <= 1 << 26 else TOO_MUCH


def _replaced(text: Any, old: Any = "", new: Any = "", *more: Any, **options: Any) -> int:
    text, old, new = str(text), str(options.get("old", old)), str(options.get("new", new))
    return len(text) + text.count(old) * len(new)


def _lined(text: Any, *arguments: Any, **options: Any) -> int:
    given = [*arguments, *options.values()]
    width = max([_numbers(*given), *(len(item) for item in given if isinstance(item, str))])
    return len(str(text)) + (len(str(text).splitlines()) + 1) * width


def _joined(between: Any, items: Any = ()) -> int:
    return budget().weigh(items)[0] + len(items) * len(str(between))


def _filter_joined(items: Any, d: Any = "", attribute: Any = None) -> int:
    return _joined(d, items) if hasattr(items, "__len__") else 0


def _number(value: Any, *arguments: Any, **options: Any) -> int:
    """The cap of arithmetic, which would format or repeat a text given in the place of a number."""
    precision = _numbers(*arguments, **options)
    if isinstance(value, (int, float)):
        return 0 if precision <= 400 else TOO_MUCH
    return 0 if not isinstance(value, (str, bytes, list, tuple)) else TOO_MUCH


def _divided(value: Any, *arguments: Any, **options: Any) -> int:
    return 0 if not isinstance(value, (str, bytes)) else TOO_MUCH


def _parsed(value: Any, *arguments: Any, **options: Any) -> int:
    """The cap of parsing a number: Python's own limit on its digits may be switched off."""
    return 0 if not isinstance(value, (str, bytes)) or len(value) <= 1 << 14 else TOO_MUCH


def _summed(items: Any, attribute: Any = None, start: Any = 0) -> int:
    return _attribute(items, attribute) if isinstance(start, (int, float)) else TOO_MUCH


def _encoded(text: Any, encoding: Any = "utf-8", errors: Any = "strict") -> int:
    plain = str(encoding).lower().replace("_", "-")
    return 0 if re.fullmatch(r"utf-?(8|16|32)(-?(le|be))?|ascii|latin-?1", plain) else TOO_MUCH


def _keys(keys: Any, *value: Any) -> int:
    """The cap of making a dict: keys can be chosen so that it takes quadratic time."""
    return 0 if hasattr(keys, "__len__") and len(keys) <= 1000 else TOO_MUCH


def percent_size(text: str, arguments: Any) -> int:
    """An upper bound of the size of ``text % arguments``."""
    if re.search(r"%[^%a-zA-Z]*\*", text):
        return TOO_MUCH
    return _fields(text, text.count("%"), arguments)


def _formatted(text: Any, *arguments: Any, **options: Any) -> int:
    """An upper bound of the size of ``text.format(…)``; a width that is an argument is refused.

    A field may be an attribute, which can be larger than the known size of its object.
    """
    parsed = [part for part in string.Formatter().parse(text) if part[1] is not None]
    fields, specs = [part[1] or "" for part in parsed], [part[2] or "" for part in parsed]
    size = len(text) + _fields(" ".join(specs), len(specs), [arguments, options])
    if any("{" in spec for spec in specs) or (budget().opaque and any("." in f for f in fields)):
        return TOO_MUCH
    return size


def _fields(text: str, fields: int, arguments: Any) -> int:
    width = max((int(n[:9]) for n in re.findall(r"\d+", text)), default=0)
    return len(text) + fields * (width + 16 + budget().weigh(arguments)[0])


def _percent(value: Any, *arguments: Any, **options: Any) -> int:
    return percent_size(str(value), [arguments, options])


def _named(cap: Cap, names: str) -> dict[str, Cap]:
    return dict.fromkeys(names.split(), cap)


FILTERS = {
    **_named(_linear, "abs attr capitalize count d default dictsort e escape filesizeformat first float"
             " forceescape items last length list lower map random reject rejectattr reverse safe"
             " select selectattr string striptags title truncate upper urlencode wordcount xmlattr"),
    **_named(_wide, "batch center slice"),
    **_named(_attribute, "max min"), "unique": _distinct,
    **_named(_sorted, "groupby sort"),
    "format": _percent, "indent": _lined, "int": _parsed, "join": _filter_joined, "pprint": _short(1 << 14),
    "replace": _replaced, "round": _number, "sum": _summed, "tojson": _few(16), "trim": _few(100),
    "urlize": _short(1 << 10), "wordwrap": _short(1 << 16, "width", few=16),
}  # fmt: skip
# Filters that read their whole input in one step: a generator becomes a list first, to be counted.
LISTED = frozenset({"groupby", "join", "sort", "unique", "urlencode"})

TESTS = {
    **_named(_linear, "!= < <= == > >= boolean callable defined eq equalto escaped false filter float ge"
             " greaterthan gt in integer iterable le lessthan lower lt mapping ne none number sameas"
             " sequence string test true undefined upper"),
    **_named(_divided, "divisibleby even odd"),
}  # fmt: skip

_TEXT = {
    **_named(_linear, "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit"
             " isidentifier islower isnumeric isprintable isspace istitle isupper lower maketrans partition"
             " removeprefix removesuffix split splitlines startswith swapcase title upper"),
    **_named(_wide, "center ljust rjust zfill"),
    **_named(_few(100), "lstrip rstrip strip"),
    **_named(_backwards, "rfind rindex rpartition rsplit"),
    **_named(_formatted, "format"), "encode": _encoded, "join": _joined, "replace": _replaced,
    "format_map": lambda text, *arguments: _formatted(text, *arguments),
    "expandtabs": lambda text, tabsize=8: len(text) + text.count("\t") * abs(tabsize),
    "translate": _refused,
}  # fmt: skip
# Methods by their type. The sandbox itself refuses methods that change a value.
METHODS: dict[type, dict[str, Cap]] = {
    str: _TEXT,
    Markup: {**_TEXT, **_named(_linear, "escape striptags unescape")},
    bytes: {
        **_named(_refused, "capitalize center expandtabs fromhex join ljust lower lstrip maketrans partition"
                 " removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split"
                 " splitlines strip swapcase title translate upper zfill"),
        **_named(_linear, "count endswith find hex index isalnum isalpha isascii isdigit islower isspace istitle"
                 " isupper startswith"),
        "decode": _encoded,
    },
    int: {
        **_named(_linear, "as_integer_ratio bit_count bit_length conjugate from_bytes is_integer"),
        "to_bytes": _wide,
    },
    float: _named(_linear, "as_integer_ratio conjugate from_number fromhex hex is_integer"),
    complex: _named(_linear, "conjugate from_number"),
    list: {**_named(_linear, "copy count index"),
           **_named(_refused, "append clear extend insert pop remove reverse sort")},
    tuple: _named(_linear, "count index"),
    dict: {**_named(_linear, "copy get items keys values"), "fromkeys": _keys,
           **_named(_refused, "clear pop popitem setdefault update")},
    range: _named(_linear, "count index"),
    type({}.keys()): _named(_refused, "isdisjoint"),
    type({}.items()): _named(_refused, "isdisjoint"),
    type({}.values()): {},
    LoopContext: _named(_linear, "changed cycle"),
    Cycler: _named(_linear, "next reset"),
}  # fmt: skip
GLOBALS = frozenset({"cycler", "dict", "joiner", "namespace", "range"})
