"""A chat template and the messages of a chat → the prompt, as text.

Templates come out of files that anybody may have written: they run in a sandbox, in a thread of their
own that ends after a short time, and up to a size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import UserInputError

_LONGEST = 1 << 20  # characters; published ones have some thousands
_SECONDS = 2.5  # for all of it; published ones take milliseconds
_LATE = f"it ran for more than {_SECONDS:g} seconds"
_NESTED = "a message has too much in itself"


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text that a template makes of the values of its variables.

    Lists and dicts reach the template as copies, and objects that JSON has not by their type's name.

    Raises:
        UserInputError: It says so itself (``raise_exception``), has a mistake, or takes too long
            or makes too much.

    Example:
        >>> render("{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}",
        ...        {"messages": [{"role": "user", "content": "Hi"}]})
        '[user] Hi\\n'
        >>> render("{{ raise_exception('roles must alternate') }}", {})
        Traceback (most recent call last):
        ...
        maxjax.errors.UserInputError: the chat template says: roles must alternate
    """
    from .budget import Budget
    from .thread import Stopped, run_until

    if len(template) > _LONGEST:
        raise UserInputError(f"the chat template has {len(template)} characters; most: {_LONGEST}")
    _sandbox()
    budget = Budget()
    try:
        given = {key: plain(value) for key, value in values.items()}
        made, error = run_until(
            lambda: _rendered(template, given, budget), _SECONDS, lambda: budget.stop(_LATE)
        )
    except Stopped as stopped:
        made, error = None, f"does too much: {str(stopped) or _LATE}"
    except RecursionError:
        made, error = None, f"or {_NESTED}"
    except Exception as caught:  # of the messages: their objects may raise whatever Python can
        made, error = None, f"failed: {type(caught).__name__}: {caught}"
    if made is None:
        raise UserInputError(_line(f"the chat template {error}"))
    return made


def _rendered(template: str, given: dict[str, Any], budget: Any) -> tuple[str | None, str]:
    """The text, or None and why there is none: what it says may itself be long to make."""
    import jinja2

    from . import budget as template_budget

    template_budget.use(budget)
    try:
        budget.learn(given, template)
        return _compiled(template).render(given), ""
    except template_budget.TooMuchError as error:
        return None, f"does too much: {error}"
    except jinja2.TemplateSyntaxError as error:
        return None, f"has a mistake in line {error.lineno}: {error.message}"
    except jinja2.UndefinedError as error:
        return None, f"needs what is not there: {error.message}"
    except jinja2.TemplateError as error:
        return None, f"says: {error.message}"
    except (RecursionError, MemoryError):
        return None, f"or {_NESTED}"
    except Exception as error:  # a template can raise whatever Python can
        return None, f"failed: {type(error).__name__}: {error}"


@lru_cache(1)
def _sandbox() -> Any:
    from .sandbox import Sandbox

    return Sandbox()


@lru_cache(16)
def _compiled(template: str) -> Any:
    return _sandbox().compiled(template)


def _line(text: str) -> str:
    text = text if len(text) <= 500 else f"{text[:500]}…"
    return "".join(c if c.isprintable() else " " for c in text)


def plain(value: Any) -> Any:
    """A copy in JSON's types, which have no methods that a template should not find.

    Example:
        >>> plain({"a": (1, {2}), "b": True})
        {'a': (1, '<set>'), 'b': True}
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # what derives from one may have more methods
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (
            type(value)(map(plain, value)) if type(value) in (list, tuple) else [*map(plain, value)]
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, np.generic):
        return plain(value.item())
    return f"<{type(value).__name__}>"
