"""Messages and tools of OpenAI's API, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .errors import RequestError, unsupported
from .fetch import is_fetched
from .fields import Message, Tool

# Types of parts that are texts, and the field that has the text.
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Types of parts that are pictures: of /v1/chat/completions and of /v1/responses.
_PICTURES = ("image_url", "input_image")


def chat_of(
    messages: Sequence[Message], tokenizer: Any, fetches: bool = False
) -> list[dict[str, Any]]:
    """The messages for a chat template; texts in parts are joined by line breaks, as in vLLM.

    With ``fetches``, pictures may be addresses that are yet to be fetched.
    """
    if tokenizer is None:
        raise RequestError(400, "this model has no tokenizer, so it takes token ids alone")
    sources = "".join(getattr(tokenizer, "chat_templates", {}).values())
    knows = "developer" in sources
    return [_message(i, one, knows, fetches) for i, one in enumerate(messages)]


def _message(index: int, message: Message, knows_developer: bool, fetches: bool) -> dict[str, Any]:
    if message.content is None and not message.tool_calls and message.role != "assistant":
        place = f"messages[{index}].content"
        raise RequestError(400, f"{place} is missing", param=place)
    role = message.role
    if role == "developer" and not knows_developer:
        role = "system"
    found: dict[str, Any] = {
        "role": role,
        "content": _content(message.content, f"messages[{index}].content", fetches),
    }
    if found["content"] is None and message.refusal:
        found["content"] = message.refusal
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if (thought := message.reasoning_content or message.reasoning) is not None:
        found["reasoning_content"] = thought
    if message.tool_calls:
        found["tool_calls"] = [msgspec.to_builtins(one) for one in message.tool_calls]
    return found


def _content(content: str | list[dict[str, Any]] | None, place: str, fetches: bool) -> Any:
    """A text, or with pictures a list of parts."""
    if content is None or isinstance(content, str):
        return content
    if not any(part.get("type") in _PICTURES for part in content):
        return "\n".join(_of_part(part, f"{place}[{i}]") for i, part in enumerate(content))
    found = []
    for i, part in enumerate(content):
        if part.get("type") in _PICTURES:
            found.append({"type": "image", "image": _picture(part, f"{place}[{i}]", fetches)})
        else:
            found.append({"type": "text", "text": _of_part(part, f"{place}[{i}]")})
    return found


def _picture(part: dict[str, Any], place: str, fetches: bool) -> str:
    """The address of a picture, which holds the picture itself or is to be fetched: no file is opened."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    name = f"{place}.image_url"
    if not isinstance(url, str):
        raise RequestError(400, f"{name} must be an address: data:image/…;base64,…", param=name)
    if not (url[:5].lower() == "data:" or (fetches and is_fetched(url))):
        raise unsupported(
            name,
            f"{name}: an address that is not data:image/…;base64,…, as pictures are not fetched,",
        )
    return url


def _of_part(part: dict[str, Any], place: str) -> str:
    kind = part.get("type")
    name = _PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise unsupported(place, f"{place}: a part of type {kind!r}"[:120])
    if not isinstance(text := part.get(name), str):
        raise RequestError(400, f"{place}.{name} must be a text", param=place)
    return text


# Arguments of a template that are not its variables: fields of their own, or not for clients.
_ARGUMENTS = (
    "chat_template",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables that a request gives to the chat template.

    Raises:
        RequestError: one is an argument of another kind, such as the source of a template.
    """
    for name in given or ():
        if name in _ARGUMENTS:
            raise unsupported("chat_template_kwargs", f"{name!r} in chat_template_kwargs")
    return dict(given or {})


def tools_of(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The functions for a chat template."""
    found = []
    for tool in tools or ():
        function = msgspec.to_builtins(tool.function)
        kept = {name: value for name, value in function.items() if value is not None}
        kept.pop("strict", None)
        found.append({"type": "function", "function": kept})
    return found
