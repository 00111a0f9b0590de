"""Floor 6. jinja2's sandbox for templates out of files: same text, and an end to all they can do.

The sandbox keeps a template from Python's insides, but not from running or growing without end:
template_budget does, which everything that makes a value asks here. Imports jinja2, so it is
imported only where a template is rendered. Below: template_budget. Above: template.

Source: ``_cached_compile_jinja_template`` of transformers, for what a chat template may use.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .template_budget import (
    FILTERS,
    INT_BITS,
    METHODS,
    allow,
    format_size,
    joined_size,
    most_at_once,
    spend,
    weigh,
    wide_size,
)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at its arguments first, and whose result is counted."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context comes before the value

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if name == "join" and len(args) > first and not kwargs.get("attribute"):
            args = (*args[:first], list(args[first]), *args[first + 1 :])
            between = args[first + 1] if len(args) > first + 1 else kwargs.get("d", "")
            allow(joined_size(args[first], between))
        elif name in FILTERS:
            allow(FILTERS[name](*args[first:], **kwargs))
        return spend(function(*args, **kwargs))

    return guarded


class _Generator(CodeGenerator):
    """Jinja's compiler; what has no function of the environment's gets one."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        self._spent(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self._spent(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        visit = super().visit_Tuple
        self._spent(visit, node, frame) if node.ctx == "load" else visit(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
        self._spent(super().visit_Getitem, node, frame)

    def _spent(self, visit: Callable[[Any, Any], None], node: Any, frame: Any) -> None:
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return visit(node, frame)
        self.write("environment.spend(")
        visit(node, frame)
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of a template: what transformers gives one, with a budget."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "*", "**", "%"])
    spend = staticmethod(spend)

    def __init__(self) -> None:
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters["tojson"] = _tojson
        self.filters = {name: _guarded(name, made) for name, made in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Names,
        }  # fmt: skip

    def joined(self, parts: Iterable[Any]) -> str:
        """What ``~`` puts together."""
        return self.concat([str(part) for part in parts])

    def concat(self, parts: Iterable[str]) -> str:
        """A block's, a macro's or the whole template's text."""
        found, size = [], 0
        for part in parts:
            size += len(part)
            allow(size)
            found.append(part)
        return spend("".join(found))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers:
            allow(0 if left.bit_length() * abs(right) <= INT_BITS else 1 << 60)
        elif operator == "*" and numbers:
            allow(0 if left.bit_length() + right.bit_length() <= INT_BITS else 1 << 60)
        elif operator == "*":
            sides = sorted([left, right], key=lambda side: isinstance(side, int))
            if isinstance(sides[1], int):
                allow(weigh(sides[0], most_at_once()) * max(sides[1], 0))
        elif operator == "%" and isinstance(left, str):
            allow(format_size(left, right))
        return spend(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, (str, bytes, int)):
            if name == "join" and len(args) == 1:
                args = (list(args[0]),)
            allow(METHODS.get(name, wide_size)(owner, *args, **kwargs))
        return spend(super().call(__context, __obj, *args, **kwargs))


# --- what a chat template may use ---------------------------------------------------------------


class _Generation(Extension):
    """``{% generation %}`` marks what a model said, for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Names(Namespace):
    """``namespace`` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _Names._check(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Names._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name[:40]!r}")


def _raise(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _now(format: str) -> str:
    allow(0 if len(format) <= 1000 else 1 << 60)
    return datetime.now().strftime(format)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
