"""``apply_chat_template``: formats the messages of a chat as the prompt its model was trained on.

``tokenize_chat`` encodes it too, and says which tokens the assistant wrote. The results are the same as those of
``apply_chat_template`` in transformers.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnknownArgumentError, UserInputError, some
from ..storage.save.durable import replace_file, writable_path
from .calls import json_of, parsed
from .formats import format_in
from .reasoning import deltas_of, parts_in
from .template.function_schema import function_schema
from .template.render import ChatText, fields_of, render, rendered
from .tokenizer.arguments import items_of

# Keys of a message's reasoning. Templates read the first; that of gpt-oss reads the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Marks the end of a message that is to be continued. The blank shows whether a template trims messages.
_END = "END_OF_THE_MESSAGE_TO_CONTINUE "
# Matches a template that has something to write where a message's content is None, as DeepSeek R1's does.
# One that only asks whether it is not None, as RWKV's does, gets no content, as in transformers.
_READS_NONE = re.compile(r"""content['"]?\]?\s+is\s+none\b""", re.IGNORECASE)
_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def apply_chat_template(
    tokenizer: Any,
    messages: Iterable[Any],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    continue_final_message: bool | str = False,
    **kwargs: Any,
) -> str:
    """Formats the messages of a chat as a prompt.

    Args:
        tokenizer: the :class:`~maxjax.text.tokenizer.tokenizer.Tokenizer` with the chat template.
        messages: dicts with "role", "content" and any other keys that the template reads, or objects
            of Pydantic or dataclasses with such fields, as OpenAI's client returns. A key whose value
            is None is left out, except for "content" where the template asks whether it is none and
            does not fail with it. The arguments of calls ("tool_calls") may be dicts, as in transformers,
            or JSON text, as in OpenAI's API: the template gets what it can write.
        add_generation_prompt: whether the prompt ends with the header of an answer.
        tools: functions that the model may call: the JSON schema of each, or the Python function with
            type hints and a docstring that describes its arguments (``function_schema``).
        documents: documents that the model may use.
        chat_template: the name of one of the tokenizer's templates, or the source of a template. By
            default "tool_use" if there are tools and such a template, else the unnamed one.
        continue_final_message: whether the prompt ends with the content of the last message, which the
            model continues, instead of with the header of an answer. A str names another key whose
            text is continued, such as "reasoning_content".
        kwargs: further variables of the template, e.g. ``enable_thinking=False``.

    Raises:
        UserInputError: there is no message, no tokenizer or no template; the template rejects the messages, fails, or
            exceeds its time or memory; a function cannot be described; or the template does not show
            the last message, which is to be continued, as it is.
        TypeError: a message is not a dict, or an argument has another type; or ``return_assistant_tokens_mask``
            is passed, which :func:`tokenize_chat` does.

    Example:
        >>> class Tiny:
        ...     chat_templates = {"default": "{{ bos_token }}{{ messages[0].content }}"}
        ...     special_tokens = {"bos_token": "<s>"}
        >>> apply_chat_template(Tiny(), [{"role": "user", "content": "Hi"}])
        '<s>Hi'
    """
    if kwargs.get("return_assistant_tokens_mask"):
        raise UnknownArgumentError(
            "maxjax.apply_chat_template() got an unexpected keyword argument 'return_assistant_tokens_mask': "
            "use maxjax.tokenize_chat(tokenizer, messages)"
        )
    key = continue_final_message if isinstance(continue_final_message, str) else "content"
    values = {
        **kwargs,
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
    }
    use = functools.partial(_continued, key=key) if continue_final_message else render
    return _applied(use, tokenizer, messages, tools, documents, chat_template, values)


class TokenizedChat(NamedTuple):
    """The tokens of a chat, and which of them the assistant wrote.

    Attributes:
        input_ids: the token ids.
        assistant_mask: 1 for each token that has text of the assistant, 0 for others.
    """

    input_ids: list[int]
    assistant_mask: list[int]


def tokenize_chat(
    tokenizer: Any,
    messages: Iterable[Any],
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    **kwargs: Any,
) -> TokenizedChat:
    """Formats the messages of a chat and encodes them, with the mask of the assistant's tokens, for training.

    What the assistant writes is what the template has in ``{% generation %}`` blocks. It is
    ``apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)`` of transformers.

    Args:
        tokenizer, messages, tools, documents, chat_template, kwargs: as for :func:`apply_chat_template`.
        add_generation_prompt: whether the chat ends with the header of an answer.

    Raises:
        UserInputError: as for :func:`apply_chat_template`; or the template has no ``{% generation %}`` block, or
            one in a macro.
        TypeError: as for :func:`apply_chat_template`.

    Example:
        >>> from maxjax.text.tokenizer.tokenizer import load_tokenizer
        >>> template = (
        ...     "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}"
        ...     "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
        ... )
        >>> chat = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
        >>> tokenize_chat(load_tokenizer("tiny"), chat, chat_template=template)
        TokenizedChat(input_ids=[18, 12, 19, 222, 20], assistant_mask=[0, 0, 0, 0, 1])
    """
    if kwargs.pop("continue_final_message", False):
        raise UserInputError("continue_final_message is not supported for tokenize_chat")

    def use(template: str, values: dict[str, Any]) -> ChatText:
        if not _MARKS_ANSWERS.search(template):
            raise UserInputError(
                "the chat template has no {% generation %} block, so it does not say what the assistant writes: "
                "pass chat_template= with {% generation %} and {% endgeneration %} around its messages"
            )
        return rendered(template, values)

    values = {**kwargs, "add_generation_prompt": add_generation_prompt}
    chat = _applied(use, tokenizer, messages, tools, documents, chat_template, values)
    if any(not chat.text.startswith(text, at) for at, text in chat.answers):
        raise UserInputError(
            "the chat template has a {% generation %} block in a macro or a block that is kept first, so the "
            "place of the assistant's text is not known: write the block outside of it"
        )
    (row,) = tokenizer.tokens([chat.text], special=False, offsets=True)
    starts, ends = np.array(row.offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(row.ids), bool)
    for at, text in chat.answers:
        mask |= (starts < at + len(text)) & (ends > at)
    return TokenizedChat(row.ids, mask.astype(int).tolist())


def _applied(
    use: Callable[[str, dict[str, Any]], Any],
    tokenizer: Any,
    messages: Iterable[Any],
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    chat_template: str | None,
    values: Mapping[str, Any],
) -> Any:
    """What ``use`` makes of the template and its variables."""
    listed = items_of(messages, "messages", "a list of dicts with 'role' and 'content'")
    if not listed:
        raise UserInputError("the chat is empty: pass at least one message")
    if tokenizer is None:
        raise UserInputError(
            "a chat needs a tokenizer: the model's directory has no tokenizer.json. Put it there"
        )
    template = _template_source(tokenizer, chat_template, tools)
    values = {
        **tokenizer.special_tokens,
        **values,
        "tools": _dicts("tools", tools if tools is None else _schemas(tools)),
        "documents": _dicts("documents", documents),
    }
    messages = [_message(i, message, {"content"}) for i, message in enumerate(listed)]
    if any("content" in m and m["content"] is None for m in messages):
        if _READS_NONE.search(template):
            # Some that test it fail with it all the same, such as Ministral 3's.
            with suppress(UserInputError):
                return use(template, {**values, "messages": messages})
        messages = [_message(i, message, set()) for i, message in enumerate(listed)]
    return use(template, {**values, "messages": messages})


def chat_prompt(tokenizer: Any, messages: Iterable[Any], **options: Any) -> str:
    """The prompt of a chat that is to be answered: :func:`apply_chat_template`, in the form that the template takes.

    OpenAI's API has the arguments of a call as JSON text. Most templates take them as dicts, and some as text. If the
    template fails with the given form, encodes a text twice or prints a dict as Python does, it gets the other form.
    Templates of LLaVA and Idefics take texts in parts alone, and write nothing of others: they get parts.
    """
    listed = items_of(messages, "messages", "a list of dicts with 'role' and 'content'")
    if tokenizer is not None:
        template = _template_source(tokenizer, options.get("chat_template"), options.get("tools"))
        special = tuple(getattr(tokenizer, "special_tokens", {}).items())
        if _takes_parts_alone(template, special):
            listed = [_in_parts(message) for message in listed]
    return _with_calls(tokenizer, listed, options)


@functools.lru_cache(16)
def _takes_parts_alone(template: str, special: tuple[tuple[str, Any], ...]) -> bool:
    """Whether a template writes the text of a message only if it is a part of a list."""
    mark = "TEXT_OF_A_MESSAGE"

    def shows(content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        with suppress(UserInputError):
            return mark in render(template, {**dict(special), "messages": messages})
        return False

    return not shows(mark) and shows([{"type": "text", "text": mark}])


def _in_parts(message: Any) -> Any:
    """The message with its text as a part of a list."""
    message = message if isinstance(message, Mapping) else fields_of(message) or message
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_calls(tokenizer: Any, listed: list[Any], options: Mapping[str, Any]) -> str:
    """The prompt, with the arguments of calls in the form that the template takes."""
    given: list[Any] = []
    other = [_with_other_arguments(message, given.append) for message in listed]
    found = error = None
    try:
        found = apply_chat_template(tokenizer, listed, **options)
    except UserInputError as raised:
        error = raised
    if given and (found is None or any(_is_garbled(one, found) for one in given)):
        with suppress(UserInputError):
            return apply_chat_template(tokenizer, other, **options)
    if error is not None:
        raise error
    assert found is not None
    return found


def _is_garbled(arguments: Any, text: str) -> bool:
    """Whether a prompt has the arguments of a call in a form that no model was trained on."""
    if isinstance(arguments, str):
        return any(
            json.dumps(arguments, ensure_ascii=is_ascii) in text for is_ascii in (False, True)
        )
    return (
        bool(arguments) and repr(dict(arguments)) in text and repr(arguments) != json_of(arguments)
    )


def _with_other_arguments(message: Any, take: Callable[[Any], None]) -> Any:
    """The message with the arguments of its calls in the other form: dicts for texts, and the reverse."""

    def other(call: Any) -> Any:
        call = call if isinstance(call, Mapping) else fields_of(call) or call
        if not isinstance(call, Mapping):
            return call
        if "function" in call:
            return {**call, "function": other(call["function"])}
        value = call.get("arguments")
        changed = json_of(value) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            changed = parsed(value) if value.strip() else {}
        if changed is None or not isinstance(changed, (str, dict)):
            return call
        take(value)
        return {**call, "arguments": changed}

    message = message if isinstance(message, Mapping) else fields_of(message) or message
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, (list, tuple)):
        return message
    return {**message, "tool_calls": [other(call) for call in calls]}


def _continued(template: str, values: dict[str, Any], key: str) -> str:
    """The prompt up to the end of the last message's text under ``key``."""
    *before, last = values["messages"]
    text = last.get(key)
    if (marked := _marked(text)) is None:
        raise UserInputError(
            f"continue_final_message: the last message has no text to continue ({key!r})"
        )
    # Reasoning has several names, of which a template reads one.
    keys = [name for name in _REASONING if last.get(name) == text] if key in _REASONING else [key]
    last = {**last, **dict.fromkeys(keys, marked)}
    text = render(template, {**values, "messages": [*before, last]})
    at = text.rfind(_END.strip())
    if at < 0:
        raise UserInputError(
            "continue_final_message: the template does not show the last message as it is: append the "
            "beginning of the answer to the prompt"
        )
    # A template that trims the message trims the blank after the mark.
    return text[:at] if text[at:].startswith(_END) else text[:at].rstrip()


def _marked(content: Any) -> Any:
    """A text, or a list of blocks with texts, with a mark at the end of the last text; None for others."""
    if isinstance(content, str):
        return content + _END
    if not isinstance(content, (list, tuple)):
        return None
    places = [
        i
        for i, block in enumerate(content)
        if isinstance(block, Mapping) and isinstance(block.get("text"), str)
    ]
    if not places:
        return None
    i = places[-1]
    return [*content[:i], {**content[i], "text": content[i]["text"] + _END}, *content[i + 1 :]]


def answer_format(
    tokenizer: Any, *, tools: Any = None, chat_template: str | None = None, **options: Any
) -> str | None:
    """Return the name of the format in which a model writes calls of functions; None if it is not known.

    Args:
        tokenizer, tools, chat_template, options: arguments of :func:`apply_chat_template`. The marks in the template
            tell the format; if there are none, those among the tokenizer's special tokens.

    Example:
        >>> class Tiny:
        ...     chat_templates = {"default": "<tool_call>{{ messages[0].tool_calls[0] | tojson }}</tool_call>"}
        >>> answer_format(Tiny())
        'hermes'
    """
    found = None
    with suppress(UserInputError):
        found = format_in(_template_source(tokenizer, chat_template, tools))
    return found or format_in(" ".join(getattr(tokenizer, "special_ids", ())))


def write_messages(path: str | os.PathLike[str], messages: Sequence[Any]) -> None:
    """Writes the messages of a chat as a JSON file, and replaces one that exists.

    Raises:
        UserInputError: a message holds a picture that is neither a path nor a ``data:`` address.
        CheckpointError: the file cannot be written; an existing file is unchanged.
    """
    text = json.dumps(messages, ensure_ascii=False, indent=1, default=_saved) + "\n"
    # A lone surrogate becomes its JSON escape.
    replace_file(writable_path(path), [text.encode("utf-8", "backslashreplace")])


def _saved(value: Any) -> str:
    """A path as JSON has it."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    raise UserInputError(
        f"a chat is saved as JSON, which has no {type(value).__name__}: pass pictures as paths or data: addresses"
    )


def answer_message(answer: Any, tokenizer: Any, **options: Any) -> dict[str, Any]:
    """Return the message of an answer, with its parts where the template reads them.

    A part that the template does not read stays in the content with its marks, so that the next prompt has the
    tokens that were generated.

    Args:
        answer: the :class:`~maxjax.engine.generate.completion.Completion`.
        tokenizer, options: arguments of :func:`apply_chat_template`.
    """
    deltas = deltas_of(answer.marked, answer.prompt or "", answer.format, answer.tools)
    parts = parts_in(deltas)
    ids = [one.id for one in deltas if one.kind == "call"]
    apart: dict[str, Any] = {}
    if parts.reasoning is not None:
        apart["reasoning_content"] = parts.reasoning
    if parts.tool_calls:
        apart["tool_calls"] = [
            {"id": given or f"call{i:05}", "type": "function", "function": call}
            for i, (given, call) in enumerate(zip(ids, parts.tool_calls, strict=True))
        ]
    if apart and all(_shows(key, tokenizer, options) for key in apart):
        return {"role": "assistant", "content": parts.content, **apart}
    return {"role": "assistant", "content": answer.marked}


def _shows(name: str, tokenizer: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the template shows a part of an answer, at least of the last one."""
    mark = "PART_OF_AN_ANSWER"
    call = {"id": "call00000", "type": "function", "function": {"name": mark, "arguments": {}}}
    part = [call] if name == "tool_calls" else mark
    content = "" if name == "tool_calls" else "x"
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": content, name: part},
    ]
    alone = {"add_generation_prompt": False, "continue_final_message": False}
    try:
        return mark in apply_chat_template(tokenizer, messages, **{**options, **alone})
    except UserInputError:
        return False


def _template_source(tokenizer: Any, given: str | None, tools: Any) -> str:
    """Return the source of the template: by name, as given, or the tokenizer's default."""
    templates = getattr(tokenizer, "chat_templates", None) or {}
    if given is not None and not isinstance(given, str):
        raise TypeError(f"chat_template must be a str, not {type(given).__name__}")
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


def _schemas(tools: Any) -> list[Any]:
    listed = items_of(tools, "tools", "a list of functions or of their JSON schemas")
    return [function_schema(one) if callable(one) else one for one in listed]


def is_message(item: Any) -> bool:
    """Return whether an item is a message: a dict, or an object with a role, as OpenAI's client returns."""
    return isinstance(item, Mapping) or isinstance(getattr(item, "role", None), str)


def _message(index: int, message: Any, kept: set[str]) -> dict[str, Any]:
    """A message with its reasoning under both names, and without None values except under the keys ``kept``."""
    kind = type(message).__name__
    message = message if isinstance(message, Mapping) else fields_of(message)
    if not isinstance(message, Mapping):
        raise TypeError(f"messages[{index}] is a {kind}, not a dict")
    wanted = ("role", "content") if message.get("role", "user") == "user" else ("role",)
    if missing := [key for key in wanted if key not in message]:
        raise UserInputError(
            f"expected a message such as {{'role': 'user', 'content': 'Hello'}}, got messages[{index}] "
            f"without {' and '.join(map(repr, missing))}"
        )
    found = {key: at for key, at in message.items() if at is not None or key in kept}
    thought = next((found[key] for key in _REASONING if key in found), None)
    return found if thought is None else {"thinking": thought, **found, _REASONING[0]: thought}


def _dicts(name: str, items: Any) -> list[Any] | None:
    if items is None:
        return None
    items = items_of(items, name, "a list of dicts")
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise TypeError(f"{name}[{i}] is a {type(item).__name__}, not a dict")
    return items
