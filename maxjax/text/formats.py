"""The formats in which families of models write reasoning and calls, as data, and which of them a model has.

They are those of the models' chat templates. The names are those of vLLM's ``--tool-call-parser``.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UserInputError
from .calls import BareSyntax, BracesSyntax, JsonSyntax, PairsSyntax, PythonSyntax, XmlSyntax

Syntax = JsonSyntax | BareSyntax | XmlSyntax | PairsSyntax | BracesSyntax | PythonSyntax

REASONING = {
    "<think>": "</think>",  # Qwen, DeepSeek, GLM, SmolLM and others
    "[THINK]": "[/THINK]",  # Magistral, Ministral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
}
"""The marks around the reasoning, whatever the format of calls."""

REASONS_LATER = frozenset({"[THINK]", "<|channel>thought"})
"""Marks that open reasoning after other text, too: elsewhere such a mark is a word of the answer."""

WRAPPERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
"""Marks around the rest of an answer, which are not part of it."""

CHANNEL, START, MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
ENDS_OF_MESSAGE = ("<|end|>", "<|call|>", "<|return|>")


class Format(NamedTuple):
    """How a family of models writes calls.

    Attributes:
        names: its name and others that it has.
        syntaxes: the ways to write calls. One that has the same opening mark as another is tried beside it.
        around: pairs of marks around all calls. They are part of the answer only where no call is between them.
        signs: texts that are in the chat templates of these models.
        is_channels: whether answers are messages in channels, as gpt-oss writes them.
        interrupts: whether the marks of calls end the reasoning.
        inside: further marks of calls, which are tokens in these models.
    """

    names: tuple[str, ...]
    syntaxes: tuple[Syntax, ...] = ()
    around: tuple[tuple[str, str], ...] = ()
    signs: tuple[str, ...] = ()
    is_channels: bool = False
    interrupts: bool = False
    inside: tuple[str, ...] = ()


_HERMES = JsonSyntax("<tool_call>", "</tool_call>")
_MISTRAL = (
    JsonSyntax("[TOOL_CALLS]", is_list=True),
    JsonSyntax(
        "[TOOL_CALLS]",
        header=r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]{}]+)\s*)?(?:\[ARGS\])?\s*",
    ),
)

FORMATS = (
    Format(("openai", "harmony"), signs=(CHANNEL, MESSAGE), is_channels=True),
    Format(("hermes", "qwen3_json", "granite4"), (_HERMES,), signs=("<tool_call>",)),
    Format(("mistral",), _MISTRAL, signs=("[TOOL_CALLS]",), inside=("[CALL_ID]", "[ARGS]")),
    Format(
        ("llama3_json", "llama4_json"),
        (BareSyntax(),),
        (("<|python_tag|>", ""), ("", ";")),
        ('"parameters": dictionary of argument name and its value',),
    ),
)  # fmt: skip
"""The formats. A template has the first whose signs are all in it."""

_BY_NAME = {name: one for one in FORMATS for name in one.names}

ANY = Format(
    (),
    tuple(
        dict.fromkeys(
            syntax for one in FORMATS for syntax in one.syntaxes if len(syntax.opening) > 1
        )
    ),
    tuple(dict.fromkeys(pair for one in FORMATS for pair in one.around if all(pair))),
    is_channels=True,
)
"""All formats with marks, for answers of a model whose format is not known."""


def format_named(name: str | None) -> Format:
    """Return the format of a name; all that have marks for None.

    Raises:
        UserInputError: there is no format of this name.

    Example:
        >>> format_named("hermes").syntaxes[0].opening
        '<tool_call>'
    """
    if name is None:
        return ANY
    if name not in _BY_NAME:
        raise UserInputError(
            f"format {name!r} of tool calls is not supported (supported: {', '.join(sorted(_BY_NAME))})"
        )
    return _BY_NAME[name]


def format_in(template: str) -> str | None:
    """Return the name of the format that a chat template writes; None if it writes no calls that are known.

    Example:
        >>> format_in("{{ '[TOOL_CALLS]' ~ message.tool_calls | tojson }}")
        'mistral'
    """
    for one in FORMATS:
        if one.signs and all(sign in template for sign in one.signs):
            return one.names[0]
    return None


MARKS = frozenset(
    mark
    for mark in (
        *REASONING,
        *REASONING.values(),
        *WRAPPERS,
        "<|channel>",  # the token at the beginning of Gemma 4's reasoning
        *(CHANNEL, START, MESSAGE, *ENDS_OF_MESSAGE, "<|constrain|>"),
        *(getattr(one, end) for one in ANY.syntaxes for end in ("opening", "closing")),
        *(mark for pair in ANY.around for mark in pair),
        *(mark for one in FORMATS for mark in one.inside),
    )
    if len(mark) > 1
)
"""The tokens by which models mark the parts of an answer; in some tokenizers they are special tokens."""
