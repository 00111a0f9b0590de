"""Talks to a server of OpenAI's API: the requests of ``maxjax chat --url`` and ``maxjax bench --url``."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserInputError, first_line
from ..text.chat import write_messages
from .options import TINY

# A server may compile programs before its first answer.
_SECONDS = 600


class RemoteServer(NamedTuple):
    """Where a server is, and what is sent with each request.

    Attributes:
        url: its address, with or without ``/v1``.
        key: the API key; None for none.
        model: the name of the model; None: the first that the server lists.
    """

    url: str
    key: str | None = None
    model: str | None = None

    def chosen(self) -> RemoteServer:
        """The same with the name of a model.

        Raises:
            UserInputError: the server cannot be reached, or lists no model.
        """
        if self.model is not None:
            return self
        with (
            self.open("/models") as response,
            contextlib.suppress(ValueError, LookupError, TypeError),
        ):
            return self._replace(model=str(json.loads(response.read(1 << 20))["data"][0]["id"]))
        raise UserInputError(f"{self.url} lists no model: pass --served-name")

    def open(self, path: str, body: Any = None) -> Any:
        """Sends a request, and returns the response.

        Raises:
            UserInputError: the server cannot be reached, or refuses the request; the message is the server's.
        """
        root = self.url.rstrip("/")
        root = root if root.endswith("/v1") else f"{root}/v1"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(
                root + path, data, {"content-type": "application/json"}
            )
            if self.key is not None:  # not for another host that the server redirects to
                request.add_unredirected_header("authorization", f"Bearer {self.key}")
            if request.type not in ("http", "https"):
                raise UserInputError(f"--url must begin with http:// or https://, not {self.url!r}")
            return urllib.request.urlopen(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            raise UserInputError(f"{self.url}: {_told(error)}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UserInputError(f"{self.url} does not answer: {reason}") from None


def _told(error: urllib.error.HTTPError) -> str:
    """The server's message."""
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
        return str(json.loads(error.read(1 << 16))["error"]["message"])
    return f"{error.code} {error.reason}"


class AnswerEvent(NamedTuple):
    """A piece of an answer: when it came (``time.perf_counter``), and the event's body."""

    time: float
    body: dict[str, Any]


def pieces(server: RemoteServer, path: str, body: dict[str, Any]) -> Iterator[AnswerEvent]:
    """The events of a streamed answer.

    Raises:
        UserInputError: the server refuses the request, or ends the answer with an error.
    """
    body = {
        **body,
        "model": server.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with server.open(path, body) as response:
        try:
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                found = json.loads(line[6:])
                if "error" in found:
                    raise UserInputError(f"{server.url}: {found['error'].get('message')}")
                yield AnswerEvent(time.perf_counter(), found)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UserInputError(
                f"{server.url} has ended its answer: {first_line(error)}"
            ) from None


# Options of the command line, and the fields of requests that mean the same.
_FIELDS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "min_new_tokens": "min_tokens",
}  # fmt: skip
# Options of the model that a server has chosen already.
_OF_MODELS = ("revision", "mesh", "activations", "cache_dtype", "debug_nans")


def server_of(options: argparse.Namespace) -> RemoteServer:
    """The server that ``--url``, ``--served-name`` and ``--api-key`` name.

    Raises:
        UserInputError: it cannot be reached, or the file of the key cannot be read.
    """
    given = [name for name in _OF_MODELS if getattr(options, name, None)]
    if options.model != TINY:
        given.append("model")
    if given:
        options.error(
            f"--{given[0].replace('_', '-')} cannot be given with --url: the server has chosen"
        )
    key = None
    if options.api_key is not None:
        try:
            key = options.api_key.read_text("utf-8").split("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserInputError(f"{options.api_key}: {first_line(error)}") from error
    return RemoteServer(options.url, key, options.served_name).chosen()


def chat_fields(options: argparse.Namespace, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat's requests that the options choose."""
    for name in values:
        if name not in _FIELDS:
            options.error(
                f"--{name.replace('_', '-')} cannot be given with --url: the API has no such field"
            )
    found: dict[str, Any] = {_FIELDS[name]: value for name, value in values.items()}
    others = {"stop": options.stop, "seed": options.seed, "max_tokens": options.max_new_tokens,
              "chat_template_kwargs": dict(options.template_arg) or None}  # fmt: skip
    return found | {name: value for name, value in others.items() if value is not None}


class RemoteAnswer(str):
    """An answer of a server: its text, the numbers of its tokens, and why it has ended."""

    tokens: range = range(0)
    prompt_tokens: range = range(0)
    finish_reason: str = "length"


class RemoteStream(Iterator[str]):
    """The pieces of an answer as they come.

    Attributes:
        completion: the answer so far.
    """

    def __init__(self, chat: RemoteConversation):
        self._chat = chat
        self._text, self._reason = "", "length"
        self._usage: dict[str, int] = {}
        self._pieces = self._read()

    def _read(self) -> Iterator[str]:
        is_thinking = False
        for _, body in pieces(self._chat.server, "/chat/completions", self._chat.body()):
            self._usage = body.get("usage") or self._usage
            for choice in body.get("choices") or ():
                self._reason = choice.get("finish_reason") or self._reason
                delta = choice.get("delta") or {}
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                if bool(thought) != is_thinking and (thought or delta.get("content")):
                    is_thinking = bool(thought)
                    yield "<think>\n" if is_thinking else "\n</think>\n"
                if thought:
                    yield thought
                if content := delta.get("content"):
                    self._text += content
                    self._chat.messages[-1]["content"] = self._text
                    yield content

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answer: the server learns it from the connection."""
        self._pieces.close()  # type: ignore[attr-defined]

    @property
    def completion(self) -> RemoteAnswer:
        found = RemoteAnswer(self._text)
        found.tokens = range(self._usage.get("completion_tokens", 0))
        found.prompt_tokens = range(self._usage.get("prompt_tokens", 0))
        found.finish_reason = self._reason
        return found


class RemoteConversation:
    """A chat with a server; the methods are those of :class:`maxjax.Conversation` that ``maxjax chat`` calls.

    Args:
        server: the server, with the name of its model.
        opening: the messages at the beginning, which :meth:`reset` keeps.
        settings: fields of the requests.
    """

    def __init__(self, server: RemoteServer, opening: list[Any], settings: dict[str, Any]):
        self.server, self._settings = server, settings
        self._opening = list(opening)
        self.messages: list[Any] = list(opening)

    def body(self) -> dict[str, Any]:
        """The body of the next request."""
        messages = [_sent(message) for message in self.messages[:-1]]
        return {"messages": messages, **self._settings}

    def say(self, message: str | dict[str, Any]) -> RemoteStream:
        """Adds a user's text or a message, and returns the stream of the answer to it."""
        said = {"role": "user", "content": message} if isinstance(message, str) else message
        self.messages += [said, {"role": "assistant", "content": ""}]
        return RemoteStream(self)

    def make_room(self, message: str | dict[str, Any]) -> int:
        """0: the server says when its context is full."""
        return 0

    def reset(self) -> None:
        """Forgets all messages but the opening ones."""
        self.messages = list(self._opening)

    def save(self, path: Path) -> None:
        """Writes the messages as a JSON file, as :meth:`maxjax.Conversation.save` does."""
        write_messages(path, self.messages)


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the API has it: pictures are addresses, and the files of a saved chat are read."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    from ..images.decode import data_address

    parts = [
        {"type": "image_url", "image_url": {"url": data_address(part)}}
        if isinstance(part, dict) and part.get("type") == "image"
        else part
        for part in content
    ]
    return {**message, "content": parts}
