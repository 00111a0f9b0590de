"""``/v1/responses``: OpenAI's newer API, for texts and calls of functions. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from .chat import CallDelta, Chat, TextDelta
from .context import RequestContext
from .errors import RequestError, unsupported
from .fields import (
    CalledFunction,
    ChatRequest,
    Count,
    FunctionTool,
    JsonSchema,
    Message,
    Named,
    ResponseFormat,
    StreamOptions,
    Tool,
    ToolCall,
    ToolChoice,
    decoded,
)
from .http import event


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer, as this API has it."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How an answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """How much the model thinks."""

    effort: str | None = None
    summary: None = None


class FlatFunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function, as this API has it."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The function that the answer must call."""

    type: Literal["function"]
    name: str


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/responses``."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    store: bool = False
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[FlatFunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None


async def respond(context: RequestContext) -> dict[str, Any] | AsyncGenerator[bytes]:
    """Answers a list of items, whole or as events."""
    body = decoded(context.body, ResponsesRequest)
    form = _ResponseForm(body)
    chat = Chat(context, _chat_request(body))
    return form.events(chat) if body.stream else await form.whole(chat)


# --- the request as a chat ----------------------------------------------------------------


def _chat_request(body: ResponsesRequest) -> ChatRequest:
    messages = [] if body.instructions is None else [Message("system", body.instructions)]
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    form = body.text.format if body.text is not None else None
    wanted = None
    if form is not None:
        schema = JsonSchema(form.name, form.schema) if form.type == "json_schema" else None
        wanted = ResponseFormat(form.type, schema)
    tools = [
        Tool("function", FunctionTool(one.name, one.description, one.parameters))
        for one in body.tools or ()
    ]
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = ToolChoice("function", Named(choice.name))
    return ChatRequest(
        model=body.model, messages=messages, max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature, top_p=body.top_p, response_format=wanted, tools=tools or None,
        tool_choice=choice, reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )  # fmt: skip


def _add(messages: list[Message], item: dict[str, Any], place: str) -> None:
    """Adds an item of the input to the messages; what one answer has said becomes one message."""
    kind = item.get("type", "message" if "role" in item else None)
    of = lambda name: _text(item, name, place)
    if kind == "message":
        given = {name: item[name] for name in ("role", "content") if name in item}
        found, last = _converted(given, Message, place), messages[-1] if messages else None
        if (
            last is not None
            and last.role == found.role == "assistant"
            and last.content is None
            and not last.tool_calls
        ):
            last.content = found.content  # the answer to the reasoning before it
        else:
            messages.append(found)
    elif kind == "function_call":
        call = ToolCall(of("call_id"), "function", CalledFunction(of("name"), of("arguments")))
        last = _assistant(messages)
        last.tool_calls = [*(last.tool_calls or ()), call]
    elif kind == "function_call_output":
        output = item.get("output")
        found = Message("tool", tool_call_id=of("call_id"))
        found.content = output if isinstance(output, list) else of("output")
        messages.append(found)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        texts = [part.get("text", "") for part in parts if isinstance(part, dict)]
        messages.append(Message("assistant", None, reasoning_content="\n".join(map(str, texts))))
    else:
        raise unsupported(place, f"{place}: an item of type {kind!r}"[:120])


def _assistant(messages: list[Message]) -> Message:
    """The message to which a call belongs: the last one, if the model has written it."""
    if not messages or messages[-1].role != "assistant":
        messages.append(Message("assistant"))
    return messages[-1]


def _text(item: dict[str, Any], name: str, place: str) -> str:
    if not isinstance(found := item.get(name), str):
        raise RequestError(400, f"{place}.{name} must be a text", param=place)
    return found


def _converted(given: Any, kind: type[Any], place: str) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"{place}: {error}", param=place) from error


# --- the response -------------------------------------------------------------------------


class _ResponseForm:
    """The form of ``/v1/responses``."""

    def __init__(self, body: ResponsesRequest):
        self._body = body
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._number = 0

    async def whole(self, chat: Chat) -> dict[str, Any]:
        """The response when it has ended."""
        ((completion, parts),) = await chat.whole()
        items = []
        if parts.reasoning:
            items.append(_reasoning(_name("rs"), parts.reasoning))
        if parts.content or not (items or parts.calls):
            items.append(_message(_name("msg"), parts.content))
        items += [_call(_name("fc"), call) for call in parts.calls]
        return self._response(items, completion, chat.usage([(completion, parts)]))

    def _response(
        self, items: Sequence[Any], completion: Any = None, counts: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        body, usage, status = self._body, None, "in_progress"
        if completion is not None and counts is not None:
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            }
            status = "incomplete" if completion.finish_reason == "length" else "completed"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "error": None, "incomplete_details": cut, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": {}, "model": body.model,
            "output": items, "parallel_tool_calls": True, "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None}, "store": False,
            "temperature": body.temperature, "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [], "top_p": body.top_p,
            "truncation": "disabled", "usage": usage,
        }  # fmt: skip

    async def events(self, chat: Chat) -> AsyncGenerator[bytes]:
        """The response as it is written."""
        items: list[Any] = []
        writing: _Item | None = None
        async with aclosing(chat.deltas()) as deltas:
            async for _, found, answer, parts in deltas:
                if not self._number:
                    for name in ("created", "in_progress"):
                        yield self._event(f"response.{name}", response=self._response(items))
                for delta in found:
                    kind = type(delta), isinstance(delta, TextDelta) and delta.is_reasoning
                    if writing is not None and (
                        writing.kind != kind or isinstance(delta, CallDelta)
                    ):
                        for one in self._ended(writing, items):
                            yield one
                        writing = None
                    if writing is None:
                        writing = _Item(kind, len(items), delta)
                        for one in self._begun(writing):
                            yield one
                    yield self._grown(writing, delta)
                if parts.has_ended:
                    if writing is None and not items:  # an answer without text
                        writing = _Item((TextDelta, False), 0, TextDelta(""))
                        for one in self._begun(writing):
                            yield one
                    if writing is not None:
                        for one in self._ended(writing, items):
                            yield one
                    ended = answer.completion
                    whole = self._response(items, ended, chat.usage([(ended, parts)]))
                    yield self._event(f"response.{whole['status']}", response=whole)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **fields}, name)

    def _begun(self, item: _Item) -> list[bytes]:
        found = [
            self._event(
                "response.output_item.added",
                output_index=item.index,
                item=item.shown("in_progress"),
            )
        ]
        if item.part is not None:
            found.append(
                self._event("response.content_part.added", **item.place, part=item.part(""))
            )
        return found

    def _grown(self, item: _Item, delta: TextDelta | CallDelta) -> bytes:
        new = delta.text if isinstance(delta, TextDelta) else delta.arguments
        item.text += new
        more = {"logprobs": []} if item.event == "output_text" else {}
        return self._event(f"response.{item.event}.delta", **item.place, delta=new, **more)

    def _ended(self, item: _Item, items: list[Any]) -> list[bytes]:
        name = "arguments" if isinstance(item.delta, CallDelta) else "text"
        more = {"logprobs": []} if item.event == "output_text" else {}
        if isinstance(item.delta, CallDelta):
            more = {"name": item.delta.name}
        found = [
            self._event(f"response.{item.event}.done", **item.place, **{name: item.text}, **more)
        ]
        if item.part is not None:
            found.append(
                self._event("response.content_part.done", **item.place, part=item.part(item.text))
            )
        items.append(item.shown("completed"))
        found.append(
            self._event("response.output_item.done", output_index=item.index, item=items[-1])
        )
        return found


class _Item:
    """An item of the response while it is written.

    Args:
        kind: what it is made of, and whether that is reasoning.
        index: its place in the response.
        delta: the first delta of it.
    """

    def __init__(self, kind: tuple[Any, bool], index: int, delta: TextDelta | CallDelta):
        self.kind, self.index, self.delta, self.text = kind, index, delta, ""
        is_call, is_reasoning = isinstance(delta, CallDelta), kind[1]
        self.name = _name("fc" if is_call else "rs" if is_reasoning else "msg")
        self.event = "output_text"
        if is_call or is_reasoning:
            self.event = "function_call_arguments" if is_call else "reasoning_text"
        self.part = None if is_call else _reasoning_part if is_reasoning else _text_part

    @property
    def place(self) -> dict[str, Any]:
        """Where an event about it belongs."""
        found = {"item_id": self.name, "output_index": self.index}
        return found if self.part is None else {**found, "content_index": 0}

    def shown(self, status: str) -> dict[str, Any]:
        """The item as the response has it."""
        if isinstance(self.delta, CallDelta):
            return _call(self.name, self.delta, status, self.text)
        if self.kind[1]:
            return _reasoning(self.name, self.text, status)
        return _message(self.name, self.text, status)


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _message(name: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [] if status == "in_progress" else [_text_part(text)]
    return {
        "type": "message",
        "id": name,
        "status": status,
        "role": "assistant",
        "content": content,
    }


def _reasoning(name: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [] if status == "in_progress" else [_reasoning_part(text)]
    return {"type": "reasoning", "id": name, "summary": [], "content": content, "status": status}


def _call(
    name: str, call: CallDelta, status: str = "completed", arguments: str | None = None
) -> dict[str, Any]:
    return {
        "type": "function_call", "id": name, "call_id": call.id, "name": call.name,
        "arguments": call.arguments if arguments is None else arguments, "status": status,
    }  # fmt: skip
