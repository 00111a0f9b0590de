"""``/v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from ..engine.batching.answer import PendingAnswer
from ..text.calls import json_of
from ..text.reasoning import AnswerParser, reasoning_tokens
from .context import RequestContext
from .errors import RequestError, unsupported
from .fields import ChatRequest, ToolChoice, decoded
from .generation import (
    check_ends,
    completions_of,
    must_match,
    pieces_of,
    settings_of,
    submitted,
    usage_of,
)
from .http import event
from .logprobs import chat_logprobs
from .messages import chat_of, template_variables, tools_of


async def chat(context: RequestContext) -> dict[str, Any] | AsyncGenerator[bytes]:
    """Answers a chat, whole or as events."""
    body = decoded(context.body, ChatRequest)
    request = Chat(context, body)
    form = _ChatForm(context, body)
    return form.events(request) if body.stream else await form.whole(request)


class Chat:
    """A chat that is answered, for any API.

    Args:
        context: the request.
        body: its body, as this API has it.
    """

    def __init__(self, context: RequestContext, body: ChatRequest):
        context.server.check_writes()
        self._context, self._body = context, body
        fetches = context.server.fetcher is not None
        self._chat = chat_of(body.messages, context.server.tokenizer, fetches)
        self._tools = tools_of(body.tools)
        self._forced = _forced(body, self._tools)
        self._settings = self._arguments()

    def _arguments(self) -> dict[str, Any]:
        body, found = self._body, settings_of(self._context, self._body)
        if body.max_completion_tokens is not None:
            found["max_new_tokens"] = body.max_completion_tokens
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if body.logprobs:
            found["logprobs"] = body.top_logprobs or 0
        variables = template_variables(body.chat_template_kwargs)
        if body.reasoning_effort is not None:
            if not self._context.server.template_reads("reasoning_effort"):
                raise unsupported(
                    "reasoning_effort", "reasoning_effort, which the chat template does not read,"
                )
            variables["reasoning_effort"] = body.reasoning_effort
        if self._tools and body.tool_choice != "none":
            variables["tools"] = self._tools
        if not body.add_generation_prompt:
            variables["add_generation_prompt"] = False
        if body.continue_final_message:
            variables["continue_final_message"] = True
        found |= {"chat": True, "template_kwargs": variables, "shows_marks": True}
        schema = _schema(body)
        if self._forced is not None:
            if schema is not None:
                raise RequestError(
                    400, "response_format and a tool_choice that forces a call exclude each other"
                )
            schema = self._forced.schema
        elif schema is not None and "tools" in variables:
            raise unsupported("response_format", "response_format together with tools")
        if schema is not None:
            if body.structured_outputs is not None:
                raise RequestError(
                    400, "structured_outputs excludes response_format and a forced tool_choice"
                )
            found["schema"] = schema
        check_ends(body, found)
        return found

    def _parts(self, completion: Any) -> WrittenParts:
        if self._forced is not None:
            return WrittenParts(self._forced, None)
        most = None if self._body.parallel_tool_calls else 1
        return WrittenParts(None, self._parser(completion), most)

    def _parser(self, completion: Any) -> AnswerParser:
        # Without tools an answer that looks like a call is a text.
        tools = self._settings["template_kwargs"].get("tools", ())
        # An answer that must match something has no reasoning, also where the prompt has opened one.
        prompt = "" if must_match(self._settings) else completion.prompt or ""
        return AnswerParser(self._context.server.format, prompt, tools)

    def usage(self, written: Sequence[tuple[Any, WrittenParts]]) -> dict[str, Any]:
        """The numbers of tokens of the completions that have ended."""
        reasoning = sum(
            reasoning_tokens(one.token_texts, self._parser(one))
            for one, parts in written
            if parts.reasoning
        )
        return usage_of(self._context, [one for one, _ in written], self._body.n, reasoning)

    async def whole(self) -> list[tuple[Any, WrittenParts]]:
        """The completions when all have ended, and their parts."""
        self._chat = await self._context.server.with_pictures(self._chat)
        async with submitted(self._context, [self._chat], self._body, self._settings) as pending:
            completions = await completions_of(self._context, pending)
        found = []
        for one in completions:
            parts = self._parts(one)
            parts.push(str(one))
            parts.end()
            found.append((one, parts))
        return found

    async def deltas(
        self,
    ) -> AsyncGenerator[tuple[int, list[ChatDelta], PendingAnswer, WrittenParts]]:
        """As answers are written: the number of an answer, what has come, the answer, and its parts.

        The end of an answer is told by ``parts.has_ended``.
        """
        self._chat = await self._context.server.with_pictures(self._chat)
        async with submitted(self._context, [self._chat], self._body, self._settings) as pending:
            parts: dict[int, WrittenParts] = {}
            async for i, piece in pieces_of(self._context, pending):
                if i not in parts:
                    parts[i] = self._parts(pending[i].completion)
                found = parts[i].end() if piece is None else parts[i].push(piece)
                yield i, found, pending[i], parts[i]


class _ChatForm:
    """The form of ``/v1/chat/completions``."""

    def __init__(self, context: RequestContext, body: ChatRequest):
        self._context, self._body = context, body
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model,
        }  # fmt: skip

    async def whole(self, chat: Chat) -> dict[str, Any]:
        """The answers when all have ended."""
        found = await chat.whole()
        choices = [self._choice(i, *one) for i, one in enumerate(found)]
        usage = chat.usage(found)
        return {"object": "chat.completion", **self._head, "choices": choices, "usage": usage}

    def _choice(self, index: int, completion: Any, parts: WrittenParts) -> dict[str, Any]:
        content = None if parts.calls and not parts.content else parts.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = [_call(call) for call in parts.calls]
        return {
            "index": index, "message": message, "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": parts.finish_reason(completion),
        }  # fmt: skip

    async def events(self, chat: Chat) -> AsyncGenerator[bytes]:
        """The answers as they are written."""
        ended: dict[int, tuple[Any, WrittenParts]] = {}
        shown: dict[int, int] = {}
        async with aclosing(chat.deltas()) as deltas:
            async for i, found, answer, parts in deltas:
                if i not in shown:
                    shown[i] = 0
                    yield self._event(i, {"role": "assistant", "content": "", "refusal": None})
                new = answer.logprobs_from(shown[i]) if self._body.logprobs else []
                shown[i] += len(new)
                logprobs = self._logprobs(new or None)
                for delta in [_fields(one) for one in found] or ([{}] if logprobs else []):
                    yield self._event(i, delta, logprobs=logprobs)
                    logprobs = None
                if parts.has_ended:
                    ended[i] = answer.completion, parts
                    yield self._event(i, {}, parts.finish_reason(ended[i][0]))
        usage = chat.usage([ended[i] for i in sorted(ended)])
        if self._body.shows_usage:
            chunk = {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": usage}
            yield event(chunk)
        yield event("[DONE]")

    def _event(
        self, index: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {"object": "chat.completion.chunk", **self._head, "choices": [choice]}
        if self._body.shows_usage:
            chunk["usage"] = None
        return event(chunk)

    def _logprobs(self, found: Any) -> dict[str, Any] | None:
        return None if found is None else chat_logprobs(self._context.server.tokenizer, found)


def _fields(delta: ChatDelta) -> dict[str, Any]:
    """A delta as this API has it."""
    if isinstance(delta, CallDelta):
        return {"tool_calls": [{"index": delta.index, **_call(delta)}]}
    kind = "reasoning_content" if delta.is_reasoning else "content"
    return {kind: delta.text}


def _call(call: CallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class _Forced(msgspec.Struct):
    """The call that an answer must be: the name of its function, None for any, and the schema that it matches."""

    name: str | None
    schema: dict[str, Any]


def _forced(body: ChatRequest, tools: Sequence[dict[str, Any]]) -> _Forced | None:
    """What ``tool_choice`` forces; None if the model decides."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not functions:
        raise RequestError(400, "tool_choice needs tools", param="tool_choice")
    parameters = lambda name: functions[name].get("parameters") or {"type": "object"}
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if name not in functions:
            raise RequestError(
                400, f"tool_choice names {name[:80]!r}, which is none of the tools", param="tool_choice"
            )  # fmt: skip
        return _Forced(name, parameters(name))
    one = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters(name)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in functions
    ]
    most = {} if body.parallel_tool_calls else {"maxItems": 1}
    return _Forced(None, {"type": "array", "minItems": 1, **most, "items": {"anyOf": one}})


def _schema(body: ChatRequest) -> dict[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise RequestError(400, "response_format.json_schema is missing", param="response_format")
    return wanted.json_schema.schema or {"type": "object"}


class TextDelta(msgspec.Struct):
    """A piece of text of an answer."""

    text: str
    is_reasoning: bool = False


class CallDelta(msgspec.Struct):
    """A call of a function: its number among those of the answer, and its arguments as JSON."""

    index: int
    id: str
    name: str
    arguments: str


ChatDelta = TextDelta | CallDelta


class WrittenParts:
    """The parts of an answer, and the deltas that they come in.

    Attributes:
        content, reasoning: the texts so far.
        calls: the calls so far.
        has_ended: whether the text has ended.
    """

    def __init__(
        self, forced: _Forced | None, parser: AnswerParser | None, most_calls: int | None = None
    ):
        self._forced, self._parser, self._text = forced, parser, ""
        self._most_calls = most_calls
        self.content = self.reasoning = ""
        self.calls: list[CallDelta] = []
        self.has_ended = False

    def push(self, piece: str) -> list[ChatDelta]:
        """The deltas that a piece of text makes."""
        if self._parser is None:  # a forced call is told when it is whole
            self._text += piece
            return []
        return self._deltas(self._parser.push(piece))

    def end(self) -> list[ChatDelta]:
        """The deltas at the end of the text."""
        self.has_ended = True
        if self._parser is not None:
            return self._deltas(self._parser.flush())
        assert self._forced is not None
        try:
            found = msgspec.json.decode(self._text)
        except msgspec.DecodeError:  # it was cut
            self.content = self._text
            return [TextDelta(self._text)]
        if self._forced.name is not None:
            return [self._call(self._forced.name, self._text)]
        return [self._call(one["name"], json_of(one["arguments"])) for one in found]

    def _deltas(self, found: Sequence[Any]) -> list[ChatDelta]:
        deltas = []
        for one in found:
            if one.kind != "call" or self._most_calls is None or len(self.calls) < self._most_calls:
                deltas.append(self._delta(one))
        return deltas

    def _delta(self, one: Any) -> ChatDelta:
        if one.kind == "call":
            return self._call(one.name, one.text, one.id)
        if one.kind == "reasoning":
            self.reasoning += one.text
        else:
            self.content += one.text
        return TextDelta(one.text, one.kind == "reasoning")

    def _call(self, name: str, arguments: str, given: str | None = None) -> CallDelta:
        call = CallDelta(len(self.calls), given or f"call_{uuid.uuid4().hex[:24]}", name, arguments)
        self.calls.append(call)
        return call

    def finish_reason(self, completion: Any) -> str:
        """Why the answer has ended."""
        is_named = self._forced is not None and self._forced.name is not None
        if self.calls and not is_named and completion.finish_reason != "length":
            return "tool_calls"
        return completion.finish_reason
