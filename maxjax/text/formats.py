"""The formats in which families of models write reasoning and calls, as data, and which of them a model has.

They are those of the models' chat templates. The names are those of vLLM's ``--tool-call-parser``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..errors import UserInputError
from .calls import (
    BareSyntax,
    BracesSyntax,
    BuiltinSyntax,
    JsonSyntax,
    PairsSyntax,
    PythonSyntax,
    XmlSyntax,
)

Syntax = (
    JsonSyntax | BareSyntax | XmlSyntax | PairsSyntax | BracesSyntax | PythonSyntax | BuiltinSyntax
)

REASONING = {
    "<think>": "</think>",  # Qwen, DeepSeek, GLM, SmolLM and others
    "[THINK]": "[/THINK]",  # Magistral, Ministral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
    "<thought>": "</thought>",  # EXAONE Deep
    "◁think▷": "◁/think▷",  # Kimi-VL
    "<thinking>": "</thinking>",  # Apriel 1.5
    "<mm:think>": "</mm:think>",  # MiniMax M3
}
"""The marks around the reasoning, whatever the format of calls."""

REASONS_LATER = frozenset({"[THINK]", "<|channel>thought"})
"""Marks that open reasoning after other text, too: elsewhere such a mark is a word of the answer."""

WRAPPERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
"""Marks around the rest of an answer, which are not part of it."""

CHANNEL, START, MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
ENDS_OF_MESSAGE = ("<|end|>", "<|call|>", "<|return|>")


class CallFormat(NamedTuple):
    """How a family of models writes calls.

    Attributes:
        names: its name and others that it has.
        syntaxes: the ways to write calls. One that has the same opening mark as another is tried beside it.
        around: pairs of marks around all calls. They are part of the answer only where no call is between them.
        signs: texts that are in the chat templates of these models.
        is_channels: whether answers are messages in channels, as gpt-oss writes them.
        inside: further marks of calls, which are tokens in these models.
        reasoning: pairs of texts around the reasoning, beside the marks of ``REASONING``.
        wrappers: texts around what follows the reasoning, which are not part of it.
    """

    names: tuple[str, ...]
    syntaxes: tuple[Syntax, ...] = ()
    around: tuple[tuple[str, str], ...] = ()
    signs: tuple[str, ...] = ()
    is_channels: bool = False
    inside: tuple[str, ...] = ()
    reasoning: tuple[tuple[str, str], ...] = ()
    wrappers: tuple[str, ...] = ()


_HERMES = JsonSyntax("<tool_call>", "</tool_call>")
_FUNCTOOLS = JsonSyntax("functools", is_list=True)
_LLAMA3 = (("<|python_tag|>", ""), ("", ";"))
_LLAMA4 = (("<|python_start|>", "<|python_end|>"),)
_MISTRAL = (
    JsonSyntax("[TOOL_CALLS]", is_list=True),
    JsonSyntax(
        "[TOOL_CALLS]",
        header=r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]{}]+)\s*)?(?:\[ARGS\])?\s*",
    ),
)
_QWEN = XmlSyntax()
_DEEPSEEK = (
    JsonSyntax(
        "<｜tool▁call▁begin｜>",
        "```<｜tool▁call▁end｜>",
        header=r"\s*\w+<｜tool▁sep｜>\s*(?P<name>[^\s<>{}]+)\s*```(?:json)?\s*",
    ),
    JsonSyntax(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        header=r"\s*(?P<name>[^\s<>{}]+)\s*<｜tool▁sep｜>\s*",
    ),
)
_KIMI = JsonSyntax(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    header=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>{}:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
)
_MINIMAX = XmlSyntax(
    "<invoke name=",
    "</invoke>",
    r"""["']?(?P<name>[^>"'\s]+)["']?>""",
    r"""<parameter name=["']?(?P<name>[^>"'\n]+)["']?>""",
    is_inline=True,
)
_DSML = XmlSyntax(
    '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>",
    r'(?P<name>[^"]+)">',
    r'<｜DSML｜parameter name="(?P<name>[^"]+)" string="(?P<text>true|false)">',
    "</｜DSML｜parameter>",
    is_inline=True,
)
_GEMMA = BracesSyntax("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = BracesSyntax("<start_function_call>", "<end_function_call>", "<escape>")

FORMATS = (
    CallFormat(("openai", "harmony"), signs=(CHANNEL, MESSAGE), is_channels=True),
    CallFormat(
        ("deepseek_v32", "deepseek_v4"),
        (_DSML,),
        tuple((f"<｜DSML｜{one}>", f"</｜DSML｜{one}>") for one in ("function_calls", "tool_calls")),
        ("｜DSML｜",),
    ),
    CallFormat(
        ("deepseek_v3", "deepseek_v31"),
        _DEEPSEEK,
        (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
        ("<｜tool▁call▁begin｜>",),
        inside=("<｜tool▁sep｜>",),
    ),
    CallFormat(
        ("kimi_k2",),
        (_KIMI,),
        (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        inside=("<|tool_call_argument_begin|>",),
    ),
    CallFormat(
        ("minimax_m2",),
        (_MINIMAX,),
        (("<minimax:tool_call>", "</minimax:tool_call>"),),
        ("<minimax:tool_call>",),
    ),
    CallFormat(
        ("seed_oss",), (_QWEN,), (("<seed:tool_call>", "</seed:tool_call>"),), ("<seed:tool_call>",)
    ),
    CallFormat(("gemma4",), (_GEMMA,), signs=("<|tool_call>", '<|"|>'), inside=('<|"|>',)),
    CallFormat(
        ("functiongemma",),
        (_FUNCTION_GEMMA,),
        signs=("<start_function_call>",),
        inside=("<escape>",),
    ),
    CallFormat(("mistral",), _MISTRAL, signs=("[TOOL_CALLS]",), inside=("[CALL_ID]", "[ARGS]")),
    CallFormat(
        ("cohere_command3",),
        (JsonSyntax("<|START_ACTION|>", "<|END_ACTION|>"),),
        signs=("<|START_ACTION|>",),
    ),
    CallFormat(
        ("internlm",),
        (JsonSyntax("<|action_start|><|plugin|>", "<|action_end|>"),),
        signs=("<|action_start|>", "<|plugin|>"),
        inside=("<|action_start|>", "<|plugin|>"),
    ),
    CallFormat(("nemotron_json",), (JsonSyntax("<TOOLCALL>", "</TOOLCALL>"),), signs=("<TOOLCALL>",)),
    CallFormat(
        ("longcat",),
        (JsonSyntax("<longcat_tool_call>", "</longcat_tool_call>"),),
        signs=("<longcat_tool_call>",),
    ),
    CallFormat(
        ("lfm2",),
        (PythonSyntax("<|tool_call_start|>", "<|tool_call_end|>"),),
        signs=("<|tool_call_start|>",),
    ),
    CallFormat(
        ("olmo3",), (PythonSyntax("<function_calls>", "</function_calls>"),), signs=("<function_calls>",)
    ),
    CallFormat(
        ("glm45", "glm47"),
        (PairsSyntax(),),
        signs=("<tool_call>", "<arg_key>"),
        inside=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    CallFormat(
        ("qwen3_coder", "qwen3_xml", "mimo", "step3p5"),
        (_QWEN,),
        (("<tool_call>", "</tool_call>"),),
        ("<tool_call>", "<function="),
    ),
    CallFormat(
        ("granite",),
        (JsonSyntax("<|tool_call|>", "<|/tool_call|>"), JsonSyntax("<tool_call>", "</tool_call>")),
        signs=("<|tool_call|>",),
        reasoning=(
            ("Here is my thought process:", "Here is my response:"),
            ("Here's my thought process:", "Here's my response:"),
        ),
        wrappers=("<response>", "</response>"),
    ),
    CallFormat(("granite-20b-fc",), (JsonSyntax("<function_call>"),), signs=("<function_call>",)),
    CallFormat(("hermes", "qwen3_json", "granite4", "ernie45"), (_HERMES,), signs=("<tool_call>",)),
    CallFormat(
        ("hunyuan_a13b", "jamba"),
        (JsonSyntax("<tool_calls>", "</tool_calls>"),),
        signs=("<tool_calls>",),
        wrappers=("<answer>", "</answer>"),
    ),
    CallFormat(
        ("apertus",),
        (JsonSyntax("<|tools_prefix|>", "<|tools_suffix|>", is_keyed=True),),
        signs=("<|tools_prefix|>",),
    ),
    CallFormat(("functionary",), (XmlSyntax(),), signs=("<function=",)),
    CallFormat(
        ("phi4_mini_json",),
        (JsonSyntax("<|tool_call|>", "<|/tool_call|>"), _FUNCTOOLS),
        signs=("<|tool|>", "<|/tool|>"),
    ),
    CallFormat(("functools",), (_FUNCTOOLS,), signs=("functools",)),
    CallFormat(("llama4_pythonic", "pythonic"), (PythonSyntax("["),), _LLAMA4, ("[func_name1(",)),
    CallFormat(
        ("llama4_json",), (BareSyntax(),), _LLAMA4 + _LLAMA3, ('"parameters": ', "<|header_start|>")
    ),
    CallFormat(
        ("llama3_json",),
        (BareSyntax(), BuiltinSyntax("<|python_tag|>")),
        _LLAMA3,
        ('"parameters": ', "<|start_header_id|>"),
    ),
)  # fmt: skip
"""The formats. A template has the first whose signs are all in it."""

_BY_NAME = {name: one for one in FORMATS for name in one.names}

ANY = CallFormat(
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


def format_named(name: str | None) -> CallFormat:
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


@lru_cache(maxsize=64)
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
        *(syntax.opening for one in FORMATS for syntax in one.syntaxes),
        *(getattr(syntax, "closing", "") for one in FORMATS for syntax in one.syntaxes),
        *(mark for one in FORMATS for pair in one.around for mark in pair),
        *(mark for one in FORMATS for mark in one.inside),
    )
    if len(mark) > 1
)
"""The tokens by which models mark the parts of an answer; in some tokenizers they are special tokens."""
