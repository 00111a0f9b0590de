"""``apply_chat_template``: formats the messages of a chat as the prompt its model was trained on.

The result is the same as that of ``apply_chat_template`` in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import UserInputError, some
from .template.render import render

# Keys of a message's reasoning. Templates read the first; that of gpt-oss reads the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# A template that tells a message without content by its None, as DeepSeek R1's does, and not by a missing key.
_READS_NONE = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none\b""", re.IGNORECASE)


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
    """Formats the messages of a chat as a prompt.

    Args:
        tokenizer: the :class:`~maxjax.text.tokenizer.tokenizer.Tokenizer` with the chat template.
        messages: dicts with "role", "content" and any other keys that the template reads. A key whose
            value is None is left out, except for "content" where the template compares it with none.
        add_generation_prompt: whether the prompt ends with the header of an answer.
        tools: functions that the model may call, each as a JSON schema.
        documents: documents that the model may use.
        chat_template: the name of one of the tokenizer's templates, or the source of a template. By
            default "tool_use" if there are tools and such a template, else the unnamed one.
        kwargs: further variables of the template, e.g. ``enable_thinking=False``.

    Raises:
        UserInputError: there is no message or no template; or the template rejects the messages,
            fails, or exceeds its time or memory.
        TypeError: a message is not a dict.

    Example:
        >>> class Tiny:
        ...     chat_templates = {"default": "{{ bos_token }}{{ messages[0].content }}"}
        ...     special_tokens = {"bos_token": "<s>"}
        >>> apply_chat_template(Tiny(), [{"role": "user", "content": "Hi"}])
        '<s>Hi'
    """
    if "continue_final_message" in kwargs:
        raise UserInputError(
            "continue_final_message is not supported: append the beginning of the answer to the prompt"
        )
    listed = _listed(messages)
    if not listed:
        raise UserInputError("the chat is empty: pass at least one message")
    template = _template_source(tokenizer, chat_template, tools)
    kept = {"content"} if _READS_NONE.search(template) else set()
    messages = [_message(i, message, kept) for i, message in enumerate(listed)]
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
    """The token ids of the prompt that :func:`apply_chat_template` makes.

    The template writes the special tokens, so the tokenizer adds none.

    Raises:
        UserInputError, TypeError: the same errors as for :func:`apply_chat_template`.
    """
    return tokenizer.encode(apply_chat_template(tokenizer, messages, **options), special=False)


def _template_source(tokenizer: Any, given: str | None, tools: Any) -> str:
    """The source of the template: by name, as given, or the tokenizer's default."""
    templates = tokenizer.chat_templates
    if given is not None:
        return templates.get(given, given)
    if tools is not None and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        names = some(sorted(templates))
        raise UserInputError(
            f"there are several chat templates: pass chat_template=, one of {names}"
        )
    raise UserInputError(
        "this model has no chat template, so it was not trained for chats. Pass a plain prompt "
        "instead, or chat_template="
    )


def _listed(messages: Any) -> list[Any]:
    if isinstance(messages, (str, bytes, Mapping)):
        raise TypeError("messages must be a list of dicts with 'role' and 'content'")
    return list(messages)


def _message(index: int, message: Any, kept: set[str]) -> dict[str, Any]:
    """A message with its reasoning under each name, and without keys that are None but for those ``kept``."""
    if not isinstance(message, Mapping):
        raise TypeError(f"messages[{index}] is a {type(message).__name__}, not a dict")
    found = {key: at for key, at in message.items() if at is not None or key in kept}
    thought = next((found[key] for key in _REASONING if key in found), None)
    return found if thought is None else {"thinking": thought, **found, _REASONING[0]: thought}


def _dicts(name: str, items: Any) -> list[Any] | None:
    if items is None:
        return None
    items = _listed(items)
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            hint = ": pass its JSON schema" if callable(item) else ""
            raise TypeError(f"{name}[{i}] is a {type(item).__name__}, not a dict{hint}")
    return items
