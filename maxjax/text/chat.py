"""The messages of a chat → the prompt its model was trained on, as text or tokens.

As ``apply_chat_template`` of transformers has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import UserInputError, some
from .template.render import render

# Names of what a model thought before it answered; templates read the first, gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def apply_chat_template(
    tokenizer: Any,
    messages: Iterable[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    **kwargs: Any,
) -> str:
    """The prompt of a chat.

    Args:
        tokenizer: A :class:`~maxjax.text.tokenizer.tokenizer.Tokenizer`.
        messages: ``{"role": …, "content": …}`` each, and whatever else the template reads.
        add_generation_prompt: Whether what begins an answer stands at the end.
        tools: Functions the model may call, each as a JSON schema.
        documents: Texts the model may use.
        chat_template: The name of one of the tokenizer's templates, or a template. By default
            "tool_use" if there are tools and such a template, else the one without a name.
        kwargs: Further variables of the template, e.g. ``enable_thinking=False``.

    Raises:
        UserInputError: There is no message or no template, or it says that it cannot be used for these
            messages, fails, or does not end.
        TypeError: A message is no dict.

    Example:
        >>> class Tiny:
        ...     chat_templates = {"default": "{{ bos_token }}{{ messages[0].content }}"}
        ...     special_tokens = {"bos_token": "<s>"}
        >>> apply_chat_template(Tiny(), [{"role": "user", "content": "Hi"}])
        '<s>Hi'
    """
    if "continue_final_message" in kwargs:
        raise UserInputError("continue_final_message is not there: append the beginning yourself")
    messages = [_message(i, message) for i, message in enumerate(_listed(messages))]
    if not messages:
        raise UserInputError("the chat is empty: give it at least one message")
    template = _chosen(tokenizer, chat_template, tools)
    values = {
        **tokenizer.special_tokens,
        **kwargs,
        "messages": messages,
        "tools": _dicts("tools", tools),
        "documents": _dicts("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    return render(template, values)


def chat_tokens(tokenizer: Any, messages: Iterable[Mapping[str, Any]], **options: Any) -> list[int]:
    """The token ids of :func:`apply_chat_template`'s prompt.

    Special tokens are those of the template alone: what a tokenizer puts around other texts is
    not put there again.

    Raises:
        UserInputError, TypeError: As :func:`apply_chat_template`.
    """
    return tokenizer.encode(apply_chat_template(tokenizer, messages, **options), special=False)


def _chosen(tokenizer: Any, given: str | None, tools: Any) -> str:
    """The template: by name, as it is given, or the tokenizer's own."""
    templates = tokenizer.chat_templates
    if given is not None:
        return templates.get(given, given)
    if tools is not None and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        names = some(sorted(templates))
        raise UserInputError(f"which chat template? Give chat_template=, one of: {names}")
    raise UserInputError(
        "this model has no chat template: it is not made for chats. Give it a prompt, or pass "
        "chat_template="
    )


def _listed(messages: Any) -> list[Any]:
    if isinstance(messages, (str, bytes, Mapping)):
        raise TypeError("messages must be a list of dicts with 'role' and 'content'")
    return list(messages)


def _message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"messages[{index}] is a {type(message).__name__}, not a dict")
    found = dict(message)
    thought = next((found[key] for key in _REASONING if found.get(key) is not None), None)
    return found if thought is None else {"thinking": thought, **found, _REASONING[0]: thought}


def _dicts(name: str, items: Any) -> list[Any] | None:
    if items is None:
        return None
    items = _listed(items)
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise TypeError(f"{name}[{i}] is a {type(item).__name__}, not a dict")
    return items
