"""Answers with reasoning and calls of functions, which models mark by tokens in their text.

Most put their reasoning between two marks. gpt-oss writes messages, each in a channel (OpenAI's "harmony" format);
Mistral's models write ``[TOOL_CALLS]`` and then the calls.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

# Marks around the reasoning, as models' chat templates and their documentation have them.
_PAIRS = {
    "<think>": "</think>",  # Qwen, DeepSeek, GLM, SmolLM and others
    "[THINK]": "[/THINK]",  # Magistral, Ministral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
}
# Marks around the rest of an answer, which are not part of it.
_WRAPPERS = re.compile(r"<\|(?:START|END)_RESPONSE\|>")
_CHANNELS = tuple(
    f"<|{name}|>" for name in "channel message start end call return constrain".split()
)
_END_OF_MESSAGE = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

MARKS = frozenset(
    (*_PAIRS, *_PAIRS.values(), *_CHANNELS, _CALLS, _ID, _ARGUMENTS, "<|channel>",
     "<|START_RESPONSE|>", "<|END_RESPONSE|>")
)  # fmt: skip
"""The tokens by which models mark the parts of an answer; in some tokenizers they are special tokens."""


class Parts(NamedTuple):
    """The parts of an answer.

    Attributes:
        reasoning: the text of its reasoning; None if nothing marks one.
        content: the rest, for the user.
        tool_calls: the functions that it calls, as ``{"name": …, "arguments": {…}}``.
    """

    reasoning: str | None
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()


def parts_of(text: str, prompt: str = "") -> Parts:
    """Split an answer into its reasoning, its content and its calls of functions.

    Args:
        text: the answer with its marks.
        prompt: the prompt, at the end of which some templates open the reasoning.

    Example:
        >>> parts_of("[THINK]3 + 4 is 7[/THINK]7")
        Parts(reasoning='3 + 4 is 7', content='7', tool_calls=())
        >>> parts_of("3 + 4 is 7</think>7", "<|assistant|><think>").reasoning
        '3 + 4 is 7'
        >>> parts_of('[TOOL_CALLS]add[ARGS]{"a": 3}').tool_calls
        ({'name': 'add', 'arguments': {'a': 3}},)
    """
    if "<|channel|>" in text:
        return _of_channels(text)
    reasoning, text = _reasoning(text, prompt.rstrip())
    before, mark, calls = text.partition(_CALLS)
    found = _mistral_calls(calls) if mark else ()
    content = _WRAPPERS.sub("", before if found else text)
    return Parts(reasoning, content if reasoning is None else content.strip(), found)


def _reasoning(text: str, prompt: str) -> tuple[str | None, str]:
    for opening, closing in _PAIRS.items():
        before, mark, rest = text.partition(opening)
        if prompt.endswith(opening):
            before, rest = "", text
        # Only Mistral's models write before they think: elsewhere such a mark is a word of the answer.
        elif not mark or (before.strip() and opening != "[THINK]"):
            continue
        thought, _, after = rest.partition(closing)
        return thought.strip(), before + after
    return None, text


def _of_channels(text: str) -> Parts:
    thoughts, contents, calls = [], [], []
    for message in text.split("<|start|>"):
        head, _, body = message.partition("<|message|>")
        body = _END_OF_MESSAGE.split(body)[0]
        channel = head.partition("<|channel|>")[2].split(maxsplit=1)[:1]
        recipient = _RECIPIENT.search(head)
        arguments = _object(body) if recipient else None
        if recipient and arguments is not None:
            calls.append({"name": recipient[1], "arguments": arguments})
        else:
            (thoughts if channel == ["analysis"] else contents).append(body)
    reasoning = "\n".join(thoughts) if thoughts else None
    return Parts(reasoning, "\n".join(filter(None, contents)), tuple(calls))


def _mistral_calls(text: str) -> tuple[dict[str, Any], ...]:
    """Return the calls after ``[TOOL_CALLS]``: a JSON list of them, or name[ARGS]JSON; () if it is neither."""
    listed = _parsed(text)
    if listed is None:
        pieces = [piece.partition(_ARGUMENTS) for piece in text.split(_CALLS)]
        listed = [
            {"name": name.partition(_ID)[0].strip(), "arguments": _parsed(given)}
            for name, _, given in pieces
        ]
    if not isinstance(listed, list) or not all(map(_is_call, listed)):
        return ()
    return tuple({"name": one["name"], "arguments": one["arguments"]} for one in listed)


def _is_call(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("arguments"), dict)
    )


def _object(text: str) -> dict[str, Any] | None:
    found = _parsed(text)
    return found if isinstance(found, dict) else None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
