"""``render``: runs a chat template on the messages of a chat and returns the prompt as text.

Templates come from untrusted files. They run in a sandbox, in a thread of their own, with limits on
time and size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...errors import UserInputError
from ...rendering.row import short

_MAX_CHARACTERS = 1 << 20  # published templates have some thousands
# Steps are counted; this is for what is not known to take long, and far more than a busy machine needs.
_SECONDS = 60.0
_LATE = f"it ran for more than {_SECONDS:g} seconds"
_NESTED = "a message is nested too deeply, or in itself"


class ChatText(NamedTuple):
    """A prompt, and what ``{% generation %}`` blocks wrote of it.

    Attributes:
        text: the prompt.
        answers: the index in the prompt at which each block began, and its text.
    """

    text: str
    answers: list[tuple[int, str]]


def render(template: str, values: Mapping[str, Any]) -> str:
    """Renders a template with the values of its variables.

    The template gets copies of lists and dicts; an object that JSON cannot represent is replaced by
    the name of its type.

    Raises:
        UserInputError: the template raises an error itself (``raise_exception``), is invalid, takes
            too many steps or holds too much text.

    Example:
        >>> render("{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}",
        ...        {"messages": [{"role": "user", "content": "Hi"}]})
        '[user] Hi\\n'
        >>> render("{{ raise_exception('roles must alternate') }}", {})
        Traceback (most recent call last):
        ...
        maxjax.errors.UserInputError: the chat template says: roles must alternate
    """
    return rendered(template, values).text


def rendered(template: str, values: Mapping[str, Any]) -> ChatText:
    """Renders a template as :func:`render`, and returns also what its ``{% generation %}`` blocks wrote.

    Example:
        >>> rendered("[user] Hi {% generation %}Hello{% endgeneration %}", {})
        ChatText(text='[user] Hi Hello', answers=[(10, 'Hello')])
    """
    from .budget import Budget
    from .thread import Stopped, run_until

    if len(template) > _MAX_CHARACTERS:
        raise UserInputError(
            f"the chat template has {len(template)} characters; at most {_MAX_CHARACTERS} are allowed"
        )
    _sandbox()
    budget = Budget()
    try:
        given = {key: plain(value) for key, value in values.items()}
        found, error = run_until(
            lambda: _rendered(template, given, budget), _SECONDS, lambda: budget.stop(_LATE)
        )
    except Stopped as stopped:
        found, error = None, f"does too much: {str(stopped) or _LATE}"
    except RecursionError:
        found, error = None, f"or {_NESTED}"
    except Exception as caught:  # objects in the messages may raise anything
        found, error = None, f"failed: {type(caught).__name__}: {caught}"
    if found is None:
        raise UserInputError(short(f"the chat template {error}".replace("\n", " "), 500))
    return found


def _rendered(template: str, given: dict[str, Any], budget: Any) -> tuple[ChatText | None, str]:
    """The result and "", or None and the problem, whose message may itself take long to make."""
    import jinja2

    from . import budget as template_budget

    template_budget.use(budget)
    try:
        budget.learn(given, template)
        return ChatText(*_sandbox().rendered(_compiled(template), given)), ""
    except template_budget.TooMuchError as error:
        return None, f"does too much: {error}"
    except jinja2.TemplateSyntaxError as error:
        return None, f"has a mistake in line {error.lineno}: {error.message}"
    except jinja2.UndefinedError as error:
        return None, f"uses an undefined value: {error.message}"
    except jinja2.TemplateError as error:
        return None, f"says: {error.message}"
    except (RecursionError, MemoryError):
        return None, f"or {_NESTED}"
    except Exception as error:  # a template may raise anything
        return None, f"failed: {type(error).__name__}: {error}"


@lru_cache(1)
def _sandbox() -> Any:
    from .sandbox import Sandbox

    return Sandbox()


@lru_cache(16)
def _compiled(template: str) -> Any:
    return _sandbox().compiled(template)


def plain(value: Any) -> Any:
    """A copy that has only JSON's types (and tuples), whose methods a template may safely reach.

    Example:
        >>> plain({"a": (1, {2}), "b": True})
        {'a': (1, '<set>'), 'b': True}
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # a subclass may have further methods
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if (fields := fields_of(value)) is not None:
        return plain(fields)
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value)) if type(value) is tuple else list(map(plain, value))
    if isinstance(value, np.generic):
        return plain(value.item())
    return f"<{type(value).__name__}>"


def fields_of(value: Any) -> Any:
    """The fields of an object of Pydantic, such as OpenAI's client returns, or of a dataclass; None for others."""
    if isinstance(value, type):
        return None
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None
