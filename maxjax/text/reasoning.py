"""Answers with reasoning and calls of functions, which models mark by tokens in their text.

:class:`AnswerParser` splits an answer while it is written, and :func:`parts_of` a finished one. Most models put their
reasoning between two marks and each call between two others. gpt-oss writes messages, each in a channel (OpenAI's
"harmony" format). ``formats`` has the marks, and ``calls`` reads what is between those of a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from .calls import Balanced, Call, Reader, functions_of, json_of, parsed
from .formats import (
    CHANNEL,
    ENDS_OF_MESSAGE,
    MESSAGE,
    REASONING,
    REASONS_LATER,
    START,
    WRAPPERS,
    format_named,
)

_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_TO = "to=functions."


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


class AnswerDelta(NamedTuple):
    """A piece of an answer: text of its reasoning, text of its content, or a whole call of a function.

    Attributes:
        kind: which of the three it is.
        text: the text; of a call, its arguments as JSON text.
        index: the place of the call among the calls of the answer.
        name: the function that is called.
        id: the id that the model gave the call, if its format has one.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str
    index: int = 0
    name: str | None = None
    id: str | None = None


def parts_of(text: str, prompt: str = "", format: str | None = None, tools: Any = None) -> Parts:
    """Split an answer into its reasoning, its content and its calls of functions.

    Args:
        text: the answer with its marks.
        prompt, format, tools: as for :class:`AnswerParser`.

    Example:
        >>> parts_of("[THINK]3 + 4 is 7[/THINK]7")
        Parts(reasoning='3 + 4 is 7', content='7', tool_calls=())
        >>> parts_of("3 + 4 is 7</think>7", "<|assistant|><think>").reasoning
        '3 + 4 is 7'
        >>> parts_of('[TOOL_CALLS]add[ARGS]{"a": 3}').tool_calls
        ({'name': 'add', 'arguments': {'a': 3}},)
    """
    return parts_in(deltas_of(text, prompt, format, tools))


def deltas_of(text: str, prompt: str, format: str | None, tools: Any) -> list[AnswerDelta]:
    """Return the deltas of a finished answer; the arguments are those of :func:`parts_of`."""
    parser = AnswerParser(format, prompt, tools)
    return [*parser.push(text), *parser.flush()]


def parts_in(deltas: Sequence[AnswerDelta]) -> Parts:
    """Join deltas to the parts of their answer."""
    thoughts = [one.text for one in deltas if one.kind == "reasoning"]
    calls = [one for one in deltas if one.kind == "call"]
    return Parts(
        "".join(thoughts) if thoughts else None,
        "".join(one.text for one in deltas if one.kind == "content"),
        tuple({"name": one.name, "arguments": parsed(one.text)} for one in calls),
    )


def reasoning_tokens(token_texts: Iterable[str], parser: AnswerParser) -> int:
    """Return how many tokens of an answer are of its reasoning; a mark that begins or ends it is one of them.

    Args:
        token_texts: what each token has added to the answer with its marks.
        parser: a parser that has read nothing.

    Example:
        >>> reasoning_tokens(["<think>", "3 + 4", " is 7", "</think>", "7"], AnswerParser(None))
        4
    """
    count = 0
    for text in token_texts:
        was_reasoning = parser.is_reasoning
        is_whole = any(one.kind == "reasoning" for one in parser.push(text))
        count += was_reasoning or parser.is_reasoning or is_whole
    return count


class AnswerParser:
    """Splits an answer into reasoning, content and calls of functions while it is written.

    However the answer is cut into pieces, the joined deltas are the same. Text that may be the beginning of a mark is
    held back until more is known. A call comes as a whole when it has ended: one that is cut, or that is not what the
    format says, is no call, and its text is content. So is whitespace around the parts, unless there are several.

    Args:
        format: the name of the format of the model's calls, as ``answer_format`` finds it; None: every format that
            has marks.
        prompt: the prompt, at the end of which some templates open the reasoning.
        tools: the functions that the request offers, as in :func:`~maxjax.apply_chat_template`. By their schemas the
            arguments of formats without quotes get their types. If there are none (``()``), nothing is a call; if it
            is not known which there are (None), calls without a mark are not found: the text may be plain JSON.

    Raises:
        UserInputError: there is no format of this name.

    Example:
        >>> parser = AnswerParser("hermes", "")
        >>> parser.push("Look.<tool_")
        [AnswerDelta(kind='content', text='Look.', index=0, name=None, id=None)]
        >>> parser.push('call>{"name": "add", "arguments": {"a": 3}}</tool_call>')
        [AnswerDelta(kind='call', text='{"a": 3}', index=0, name='add', id=None)]
        >>> parser.flush()
        []
    """

    def __init__(self, format: str | None, prompt: str = "", tools: Any = None):
        chosen = format_named(format)
        self._functions = None if tools is None else functions_of(tools)
        self._has_calls = self._functions is None or bool(self._functions)
        syntaxes = chosen.syntaxes if self._has_calls else ()
        self._syntaxes = tuple(one for one in syntaxes if self._functions or len(one.opening) > 1)
        around = chosen.around if self._has_calls else ()
        self._openings = frozenset(one for one, _ in around if one)
        self._closings = frozenset(one for _, one in around if one)
        self._heads = frozenset(
            (CHANNEL, START, MESSAGE, _TO, f" {_TO}") if chosen.is_channels else ()
        )
        calls = {one.opening for one in self._syntaxes}
        self._reasoning = {**REASONING, **dict(chosen.reasoning)}
        self._wrappers = frozenset(chosen.wrappers)
        self._marks = _Marks(
            {
                *self._reasoning,
                *WRAPPERS,
                *self._wrappers,
                *calls,
                *self._openings,
                *self._closings,
                *self._heads,
            }
        )
        # Some models call a function while they reason: that ends the reasoning.
        self._interrupts = frozenset(one for one in {*calls, *self._openings} if len(one) > 1)

        self._buffer, self._is_whole = "", False
        self._deltas: list[AnswerDelta] = []
        self._count = 0
        self._has_content = self._has_reasoning = False
        self._blank = ""  # whitespace of the content that ends it, unless more follows
        self._held = ""  # marks around calls, unless a call follows
        self._after_call, self._before_calls = False, ""
        self._thought_blank, self._has_thought = "", False
        self._step: Callable[[], bool] = self._in_text

        prompt = prompt.rstrip()
        for opening, closing in self._reasoning.items():
            if prompt.endswith(opening):
                self._reason(closing)
        _, start, begun = prompt.rpartition(START)
        if chosen.is_channels and start and not any(one in begun for one in ENDS_OF_MESSAGE):
            if MESSAGE in begun:
                self._message(begun.partition(MESSAGE)[0])
            elif CHANNEL in begun:
                self._buffer, self._step = begun, self._in_head

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, unless it begins with a mark."""
        is_thought = self._step == self._in_body and self._is_thought and self._name is None
        return is_thought or self._step == self._in_reasoning

    def push(self, piece: str) -> list[AnswerDelta]:
        """Take the next piece of the answer, and return what is now certain."""
        self._buffer += piece
        return self._run()

    def flush(self) -> list[AnswerDelta]:
        """End the answer, and return what was held back."""
        self._is_whole = True
        return self._run()

    def _run(self) -> list[AnswerDelta]:
        while self._step():
            pass
        if self._is_whole:
            self._end()
        found, self._deltas = self._deltas, []
        return found

    # --- what comes out ---

    def _add(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if self._deltas and self._deltas[-1].kind == kind:
            text = self._deltas.pop().text + text
        self._deltas.append(AnswerDelta(kind, text))

    def _write(self, text: str) -> None:
        """Add text to the content, without whitespace that may be its end."""
        if self._held:
            if not text.strip():
                self._held += text
                return
            text, self._held = self._held + text, ""
        text = self._blank + text
        if self._after_call or (self._has_reasoning and not self._has_content):
            begins = text.lstrip()
            blank = self._before_calls or text[: len(text) - len(begins)]
            text = (blank if self._has_content else "") + begins if begins else text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            self._has_content, self._after_call = True, False
            self._add("content", kept)

    def _think(self, text: str) -> None:
        """Add text to the reasoning, without whitespace at its beginning and at its end."""
        if self._held:
            if not text.strip():
                self._held += text
                return
            text, self._held = self._held + text, ""
        text = self._thought_blank + text
        if not self._has_thought:
            text = text.lstrip()
        kept = text.rstrip()
        self._thought_blank = text[len(kept) :]
        if kept:
            self._has_thought = True
            self._add("reasoning", kept)

    def _call(self, call: Call) -> None:
        self._deltas.append(
            AnswerDelta("call", json_of(call.arguments), self._count, call.name, call.id)
        )
        self._count += 1
        self._before_calls = (self._before_calls if self._after_call else "") or self._blank
        self._blank, self._held, self._after_call = "", "", True

    def _end(self) -> None:
        if self._count or self._has_reasoning:
            self._blank = ""
        rest = self._blank + self._held
        if rest:
            self._add("content", rest)
        self._blank = self._held = ""

    # --- text ---

    @property
    def _is_blank(self) -> bool:
        return not (self._has_content or self._held or self._count)

    def _in_text(self) -> bool:
        if self._is_whole and self._after_call:
            cut = self._buffer.strip()
            if cut and any(one.startswith(cut) for one in self._closings):
                self._buffer = ""
        at, mark = self._marks.next(self._buffer, self._is_whole)
        before, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
        if before:
            self._write(before)
        if not mark:
            return False
        if mark in self._reasoning and (
            mark in REASONS_LATER or (self._is_blank and not self._has_reasoning)
        ):
            self._reason(self._reasoning[mark])
        elif mark in self._heads and self._is_blank:
            self._buffer, self._step = mark + self._buffer, self._in_head
        elif self._begin_call(mark, self._in_text):
            pass
        elif mark in self._openings:
            self._held += mark
        elif not self._is_dropped(mark):
            self._write(mark)
        return True

    def _is_dropped(self, mark: str) -> bool:
        if mark in self._closings:
            return self._after_call
        return mark in WRAPPERS or (mark in self._wrappers and self._has_reasoning)

    def _begin_call(self, mark: str, otherwise: Callable[[], bool]) -> bool:
        """Read a call after its opening mark, if it is one; without a call the answer goes on as before."""
        self._readers: list[Reader] = [
            one.reader(self._functions) for one in self._syntaxes if one.opening == mark
        ]
        if self._readers:
            self._opening, self._otherwise = mark, otherwise
            self._raw, self._step = 0, self._in_call
        return bool(self._readers)

    def _in_call(self) -> bool:
        for reader in list(self._readers):
            found = reader(self._buffer, self._is_whole)
            if found is None:
                continue
            if found.calls and self._is_meant(found.calls):
                for call in found.calls:
                    self._call(call)
                self._buffer, self._step = self._buffer[found.length :], self._in_text
                return True
            if found.length < 0:
                self._buffer = self._opening + self._buffer
                self._balanced, self._step = Balanced(), self._in_brackets
                return True
            self._readers.remove(reader)
            self._raw = max(self._raw, found.length)
        if self._readers:
            return False
        raw, self._buffer = self._opening + self._buffer[: self._raw], self._buffer[self._raw :]
        if raw in self._openings:
            self._held += raw
        else:
            (self._write if self._otherwise == self._in_text else self._think)(raw)
        self._step = self._otherwise
        return True

    def _is_meant(self, calls: Iterable[Call]) -> bool:
        """Whether these are calls: reasoning also quotes some, of functions that do not exist."""
        if self._otherwise == self._in_text or self._functions is None:
            return True
        return all(one.name in self._functions for one in calls)

    def _in_brackets(self) -> bool:
        """Pass on a value in brackets that is no call, so that nothing in it is one."""
        end = self._balanced.end(self._buffer)
        at = self._balanced.at if end is None and not self._is_whole else end or len(self._buffer)
        self._write(self._buffer[:at])
        self._buffer, self._balanced.at = self._buffer[at:], 0
        if end is None:
            return False
        self._step = self._in_text
        return True

    # --- reasoning ---

    def _reason(self, closing: str) -> None:
        self._has_reasoning = True
        self._add("reasoning", "")
        # Another block of reasoning begins on a line of its own.
        self._thought_blank = "\n" if self._has_thought else ""
        self._starts = self._has_thought
        self._closing = _Marks({closing, *self._interrupts})
        self._step = self._in_reasoning

    def _in_reasoning(self) -> bool:
        at, mark = self._closing.next(self._buffer, self._is_whole)
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        if self._starts:
            text = text.lstrip()
        if text:
            self._starts = False
            self._think(text)
        if not mark:
            return False
        self._buffer = self._buffer[len(mark) :]
        if mark not in self._interrupts:
            self._step = self._in_text
        elif not self._begin_call(mark, self._in_reasoning):
            self._held += mark
        return True

    # --- messages in channels ---

    def _in_head(self) -> bool:
        at = self._buffer.find(MESSAGE)
        if at < 0:
            if self._is_whole:
                if CHANNEL not in self._buffer and START not in self._buffer:
                    self._write(self._buffer)
                self._buffer = ""
            return False
        head, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        self._message(head)
        return True

    def _message(self, head: str) -> None:
        channel = head.partition(CHANNEL)[2].split(maxsplit=1)[:1]
        recipient = _RECIPIENT.search(head)
        self._name = recipient[1] if recipient and self._has_calls else None
        self._is_thought = channel == ["analysis"]
        if self._is_thought and self._name is None:
            self._has_reasoning = True
            self._add("reasoning", "")
            self._thought_blank = "\n" if self._has_thought else ""
        elif self._has_content:
            self._blank = "\n"
        self._body, self._step = "", self._in_body

    def _in_body(self) -> bool:
        at, mark = _ENDS.next(self._buffer, self._is_whole)
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        if self._name is not None:
            self._body += text
        elif text:
            (self._think if self._is_thought else self._write)(text)
        if not mark and not self._is_whole:
            return False
        if self._name is not None:
            arguments = parsed(self._body)
            if isinstance(arguments, dict):
                self._call(Call(self._name, arguments))
            else:
                self._write(self._body)
            self._name = None
        if not mark:
            return False
        self._buffer = self._buffer[0 if mark == START else len(mark) :]
        self._step = self._in_head
        return True


class _Marks:
    """Finds the first of some marks in a text that grows."""

    def __init__(self, marks: Iterable[str]):
        found = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found)))
        self._begun = frozenset(mark[:i] for mark in found for i in range(1, len(mark)))
        self._longest = max(map(len, found))

    def next(self, text: str, is_whole: bool) -> tuple[int, str]:
        """Return the place of the first mark and the mark; "" if there is none before that place.

        Text from that place on may be the beginning of a mark.
        """
        found = self._pattern.search(text)
        at = found.start() if found else len(text)
        if not is_whole:
            for i in range(max(0, len(text) - self._longest + 1), min(at + 1, len(text))):
                if text[i:] in self._begun:
                    return i, ""
        return at, found[0] if found else ""


_ENDS = _Marks((*ENDS_OF_MESSAGE, START))
