"""Sandbox: Jinja2's sandbox for untrusted templates, with limits on time and memory.

Jinja's sandbox keeps a template from Python's internals, but not from running or growing without
end. Here ``caps`` bounds the result of each filter, test and method, and ``budget`` the total.
Expressions that call no function (``~``, lists, slices, text between tags) are wrapped in the
template's syntax tree in filters whose names no template can write. Nothing of a template is
evaluated while it is compiled. This file imports jinja2, so it is imported only for rendering.

Source: ``_cached_compile_jinja_template`` of transformers, for what a chat template may use.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType, FunctionType, GeneratorType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Joiner, Namespace
from jinja2.visitor import NodeTransformer

from . import caps as caps
from .budget import INT_BITS, TOO_MUCH, TooMuchError, budget

_TOKENS = 20_000  # jinja tokens of a template; published templates have some thousands
_SOURCE = 1 << 20  # characters of the Python source that jinja makes of the tags
_NAME, _DIGITS = 200, 4000
_MADE, _JOINED, _KEPT = "=made", "=joined", "=kept"  # names of filters that no template can write


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of templates: the same as in transformers, but with a budget."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_TokenLimit, _Generation, loopcontrols],
            optimized=False,
            finalize=_counted_output,
        )
        self.filters["tojson"] = _tojson
        self.filters = {
            name: _guarded(name, self.filters[name], cap)
            for name, cap in caps.FILTERS.items()
            if name in self.filters
        }
        self.filters |= {_MADE: _counted_value, _JOINED: _counted_concat, _KEPT: _counted_kept}
        self.tests = {
            name: _guarded(name, self.tests[name], cap)
            for name, cap in caps.TESTS.items()
            if name in self.tests
        }
        self.globals = {name: self.globals[name] for name in caps.GLOBALS}
        self.globals |= {
            "raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Names,
        }  # fmt: skip
        self._callable = {id(made) for made in self.globals.values()}

    def compiled(self, text: str) -> jinja2.Template:
        """Compiles the source of a template."""
        if any(len(found[0]) > _DIGITS for found in re.finditer(r"0[xX][\da-fA-F_]+|[\d_]+", text)):
            raise TooMuchError(f"it has a number of more than {_DIGITS} digits")
        tree = _Counted().visit(self.parse(text))
        source = self.compile(tree, raw=True)
        if len(source) > _SOURCE + 2 * len(text):
            raise TooMuchError("its compiled form is too long")
        budget().check()
        code = compile(source, "<template>", "exec")
        return self.template_class.from_code(self, code, self.make_globals(None))

    def rendered(
        self, template: jinja2.Template, values: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, str]]]:
        """Renders a compiled template: the text, and the start and the text of each ``{% generation %}`` block."""
        answers = _Answers()
        _answers.set(answers)  # of this thread's context, which ends with it
        parts = template.root_render_func(template.new_context(dict(values)))
        return self.concat(answers.measured(parts)), answers.found

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the text of a block, a macro or the whole template."""
        limits, found, size = budget(), [], 0
        for part in parts:
            size += len(part)
            limits.allow(size)
            found.append(part)
        return limits.spend("".join(found))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limits = budget()
        limits.weigh(left, right)
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers:
            limits.allow(0 if left.bit_length() * abs(right) <= INT_BITS else TOO_MUCH)
        elif operator == "*" and not numbers:
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int):
                limits.allow(limits.weigh(repeated)[0] * max(times, 0))
        elif operator == "%" and isinstance(left, (str, bytes)):
            limits.allow(caps.percent_size(str(left), right))
        elif operator == "-" and not isinstance(left, (int, float)):
            limits.allow(TOO_MUCH if hasattr(left, "isdisjoint") else 0)
        return limits.spend(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        limits = budget()
        owner, cap = __self._owner_and_cap(__obj)
        options = {name: item for name, item in kwargs.items() if name not in _SCOPES}
        if (
            args
            and _iterates(args[0])
            and (isinstance(owner, str) or id(__obj) in __self._callable)
        ):
            args = (list(args[0]), *args[1:])  # the iterator of str.join, or the pairs of a dict
        limits.weigh(args, options)
        if cap is not None:
            limits.allow(cap(*(() if isinstance(owner, type) else (owner,)), *args, **options))
        elif isinstance(__obj, Macro):
            limits.keep("arguments", (args, options))
        else:  # an object that it makes may keep them
            limits.hold(args, options)
            # A dict of values of one hash takes quadratic time.
            limits.step(sum(len(a) ** 2 for a in args if isinstance(a, (list, tuple))) >> 6)
        limits.enter()
        try:
            made = super().call(__context, __obj, *args, **kwargs)
        finally:
            limits.leave()
        return limits.spend(made)

    def _owner_and_cap(self, function: Any) -> tuple[Any, caps.Cap | None]:
        """The owner of a method and its cap; None for functions of jinja or of the template."""
        if type(function) is FunctionType:  # jinja replaces str.format by its own function
            function = getattr(function, "__wrapped__", function)
        if isinstance(function, (BuiltinMethodType, MethodType)):
            owner, name = function.__self__, function.__name__
            if type(owner) is _Generation:
                return None, None
            for kind in (owner if isinstance(owner, type) else type(owner)).__mro__:
                if name in caps.METHODS.get(kind, ()):
                    return owner, caps.METHODS[kind][name]
            if owner is self.globals["dict"] and name == "fromkeys":
                return dict, caps.METHODS[dict][name]
        elif id(function) in self._callable or isinstance(function, _CALLABLE):
            return None, None
        name = str(getattr(function, "__name__", type(function).__name__))
        raise jinja2.exceptions.SecurityError(f"a chat template cannot call {name[:40]!r}")


_SCOPES = ("_loop_vars", "_block_vars")  # keywords that jinja adds to calls
_CALLABLE = (Macro, BlockReference, LoopContext, Joiner, Undefined)


def _iterates(value: Any) -> bool:
    return hasattr(type(value), "__next__")


def _guarded(name: str, function: Callable[..., Any], cap: caps.Cap) -> Callable[..., Any]:
    """A filter or test whose arguments are checked first, and whose result is counted."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context comes before the value

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        limits, given = budget(), args[first:]
        if name in caps.LISTED and given and _iterates(given[0]):
            given = (list(given[0]), *given[1:])
        if name == "join":
            given, kwargs = _attributes(args[0].environment, *given, **kwargs), {}
        limits.weigh(given, kwargs)
        limits.allow(cap(*given, **kwargs))
        made = function(*args[:first], *given, **kwargs)
        if isinstance(made, GeneratorType):
            limits.hold(given, kwargs)
            return _Lazy(made)
        return limits.spend(made)

    return guarded


def _attributes(environment: Any, items: Any, d: Any = "", attribute: Any = None) -> list[Any]:
    """The arguments of ``join`` with its ``attribute`` applied to the items already."""
    if attribute is None:
        return [items, d]
    return [list(map(make_attrgetter(environment, attribute), items)), d]


class _Lazy:
    """The generator of a lazy filter; counts its items and the depth of generators in generators."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        limits = budget()
        limits.enter()
        try:
            item = next(self._items)
        finally:
            limits.leave()
        return limits.spend(item) if type(item) in (list, str) else item


# --- filters around expressions that call no function ---------------------------------------------


@pass_context  # also keeps the filter from being evaluated while a template is compiled
def _counted_value(context: Any, value: Any) -> Any:
    """Counts a list, a dict, a tuple or a slice."""
    return budget().spend(value)


@pass_context
def _counted_concat(context: Any, parts: tuple[Any, ...]) -> str:
    """Counts the result of ``~``."""
    budget().weigh(parts)
    return budget().spend((markup_join if context.eval_ctx.autoescape else str_join)(parts))


@pass_context
def _counted_output(context: Any, value: Any) -> Any:
    """Counts the text that is written for a value."""
    if not isinstance(value, str):
        budget().weigh(value)
        value = str(value)
    return budget().write(value)


@pass_context
def _counted_kept(context: Any, value: Any, place: int, steps: int = 1) -> Any:
    """Counts what a variable or a loop holds from now on, and the steps of a loop's body."""
    budget().step(steps)
    return budget().keep(place, value)


class _Counted(NodeTransformer):
    """Inserts the filters above into the syntax tree of a template."""

    def __init__(self) -> None:
        self.places = itertools.count()

    def _kept(self, node: nodes.Node, steps: int = 1) -> nodes.Node:
        arguments = [nodes.Const(next(self.places)), nodes.Const(steps)]
        environment: Any = node.environment
        return _filtered(_KEPT, node, [a.set_environment(environment) for a in arguments])

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        node.node = self._kept(node.node)
        return node

    def visit_With(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.values = list(map(self._kept, node.values))
        return node

    def visit_For(self, node: Any) -> nodes.Node:
        """Counts what a loop goes through, and at the start of its body the item and the steps of the body."""
        steps = sum(1 for _ in node.find_all(nodes.Expr))
        self.generic_visit(node)
        node.iter = self._kept(node.iter)
        if node.test is not None:
            node.test = self._kept(node.test, steps)
        names = [nodes.Name(name.name, "load") for name in _targets(node.target)]
        item = nodes.Tuple(names, "load").set_environment(node.environment).set_lineno(node.lineno)
        node.body.insert(0, nodes.ExprStmt(self._kept(item, steps), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno, environment=node.environment)
        return _filtered(_JOINED, parts)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(_MADE, self.generic_visit(node))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(_MADE, self.generic_visit(node))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        short = node.ctx != "load" or all(isinstance(item, nodes.Const) for item in node.items)
        return node if short else _filtered(_MADE, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(_MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Makes text between tags a value, to be counted: a loop in a macro keeps it each time."""
        self.generic_visit(node)
        node.nodes = [
            nodes.MarkSafeIfAutoescape(
                nodes.Const(part.data, lineno=part.lineno, environment=part.environment),
                lineno=part.lineno, environment=part.environment,
            )
            if isinstance(part, nodes.TemplateData) else part
            for part in node.nodes
        ]  # fmt: skip
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        for option in node.find_all(nodes.Keyword):
            if not isinstance(option.value, nodes.Const):
                raise TooMuchError("its argument of autoescape is not true or false")
            break
        return self.generic_visit(node)


def _filtered(name: str, node: nodes.Node, arguments: Sequence[nodes.Node] = ()) -> nodes.Filter:
    return nodes.Filter(
        node, name, list(arguments), [], None, None,
        lineno=node.lineno, environment=node.environment,
    )  # fmt: skip


def _targets(node: nodes.Node) -> list[nodes.Name]:
    """The names that a loop assigns."""
    return [node] if isinstance(node, nodes.Name) else list(node.find_all(nodes.Name))


# --- extensions and globals of chat templates ---------------------------------------------------


class _TokenLimit(Extension):
    """Refuses a template with more tokens than jinja and Python compile quickly."""

    def filter_stream(self, stream: Any) -> Iterator[Any]:
        for count, token in enumerate(stream):
            if count % 256 == 0:
                budget().check()
            if count == _TOKENS:
                raise TooMuchError(f"it has more than {_TOKENS} tokens")
            if token.type == "name" and len(token.value) > _NAME:
                raise TooMuchError(f"it has a name of more than {_NAME} characters")
            yield token


class _Answers:
    """What ``{% generation %}`` blocks have written, and where.

    A block knows only what is written before it at the top level, as in transformers: within a macro or
    another block whose text is kept first, the place is wrong.
    """

    def __init__(self) -> None:
        self.size = 0
        self.found: list[tuple[int, str]] = []

    def measured(self, parts: Iterable[str]) -> Iterator[str]:
        """The parts of a prompt. When the next one is made, ``size`` counts those before it."""
        for part in parts:
            self.size += len(part)
            yield part


_answers: ContextVar[_Answers | None] = ContextVar("maxjax_answers", default=None)


class _Generation(Extension):
    """``{% generation %}``, which marks a model's answers for training."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        text = caller()
        if (answers := _answers.get()) is not None:
            answers.found.append((answers.size, text))
        return text


class _Dict:
    """The global ``dict``, without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Names(Namespace):
    """The global ``namespace``, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _Names._check(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Names._check(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return budget().spend(super().__repr__())

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name[:40]!r}")


def _raise(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _now(format: str) -> str:
    budget().allow(0 if len(format) <= 1000 and not re.search(r"%\W*\d", format) else TOO_MUCH)
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
