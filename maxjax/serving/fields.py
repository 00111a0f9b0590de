"""The fields of requests: their names and types, those without effect, and those that are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from .errors import RequestError, unsupported

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]

_ANY = object()
WITHOUT_EFFECT: dict[str, Any] = {
    "user": _ANY,
    "metadata": _ANY,
    "safety_identifier": _ANY,
    "prompt_cache_key": _ANY,
    "prompt_cache_retention": _ANY,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "best_of": (1,),
    "echo": (False,),
    "background": (False,),
    "truncation": ("disabled",),
}
"""Fields that change nothing here, and the values that are accepted: mostly the API's defaults. Other values are
refused. Null and an empty list or object count as absent."""

REFUSED = frozenset(
    "audio functions function_call prediction web_search_options suffix moderation conversation context_management "
    "include max_tool_calls previous_response_id".split()
)
"""Fields of OpenAI's API that are refused by name. A field of no API is refused too, as unknown."""


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that decide how an answer is written: OpenAI's, then those that vLLM and others add.

    Defaults of the settings of sampling are those of the model's ``generation_config.json``.
    """

    model: str
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool = False
    stop_token_ids: list[Natural] | None = None
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    structured_outputs: Structured | None = None

    @property
    def shows_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How an answer is streamed."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Structured(msgspec.Struct, forbid_unknown_fields=True):
    """What an answer must match: exactly one, as in vLLM."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema and its name. Answers always match it, whatever ``strict`` says."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool: functions alone are supported."""

    type: Literal["function"]
    function: FunctionTool


class Named(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The function that the answer must call."""

    type: Literal["function"]
    function: Named


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a function in an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function, and its arguments as JSON."""

    name: str
    arguments: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[Any]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/embeddings``."""

    model: str
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/rerank``, as Cohere and Jina have it."""

    model: str
    query: str
    documents: list[str | Document]
    top_n: Count | None = None
    return_documents: bool = True


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/tokenize``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[Natural]


T = TypeVar("T")


def decoded(body: bytes, kind: type[T]) -> T:
    """Reads the body of a request.

    Raises:
        RequestError: it is no JSON, lacks a field, or has one that is unknown, unsupported or of another type.

    Example:
        >>> decoded(b'{"model": "m", "tokens": [1], "user": "x"}', DetokenizeRequest).tokens
        [1]
        >>> decoded(b'{"model": "m", "tokens": [1], "store": true}', DetokenizeRequest)
        Traceback (most recent call last):
        maxjax.serving.errors.RequestError: store=true is not supported by this server
    """
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(400, "the body must be a JSON object")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    given = _without_effect(_present(found), known)
    if isinstance(messages := given.get("messages"), list):
        given["messages"] = [_as_sent_back(_present(one)) for one in messages]
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    except RecursionError as error:
        raise RequestError(400, "the body is nested too deeply") from error


def _present(item: Any) -> Any:
    """An object without fields that are null, or an empty list or object."""
    if not isinstance(item, dict):
        return item
    return {name: value for name, value in item.items() if value not in (None, [], {})}


def _as_sent_back(message: Any) -> Any:
    """A message without what OpenAI's client adds to answers that it has parsed."""
    if not isinstance(message, dict):
        return message
    found = {name: value for name, value in message.items() if name != "parsed"}
    for call in found.get("tool_calls") or ():
        if isinstance(call, dict):
            call.pop("index", None)
            if isinstance(call.get("function"), dict):
                call["function"].pop("parsed_arguments", None)
    return found


def _without_effect(given: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        if name in known:
            found[name] = value
        elif name in WITHOUT_EFFECT:
            accepted = WITHOUT_EFFECT[name]
            if accepted is not _ANY and not any(
                type(value) is type(one) and value == one for one in accepted
            ):
                raise unsupported(name, f"{name}={msgspec.json.encode(value).decode()[:80]}")
        elif name in REFUSED:
            raise unsupported(name)
        else:
            raise RequestError(400, f"unknown field {name[:80]!r}", param=name[:80])
    return found


def _named(message: str) -> RequestError:
    """The error of a field, which the message of msgspec names."""
    place = re.search(r" - at `\$\.?(.*)`$", message)
    missing = re.search(r"(?:missing required|unknown) field `([^`]*)`", message)
    path = place[1] if place else ""
    if missing:
        path = f"{path}.{missing[1]}".lstrip(".")
    text = message[: place.start()] if place else message
    return RequestError(
        400, f"{path}: {text}" if path and not missing else message, param=path or None
    )
