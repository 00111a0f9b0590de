"""``maxjax chat``: a chat with a language model or a server, in a terminal or line by line on stdin.

Only the answers go to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import select
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import UserInputError
from ..paths import local_path
from .answer import Shown, nan_error, remote_stats, say, show, stats, tokens
from .model import (
    chosen_key,
    model_arguments,
    open_model,
    sampling_arguments,
    sampling_values,
    server_arguments,
    system_message,
    template_variables,
)
from .options import file_path
from .terminal import explain

_HELP = """\
/image FILE  attach a picture to the next message; without FILE, take the attached ones back
/reset       start again
/save FILE   write the chat as JSON, which --load reads
/help        show this
/quit        leave; so does Ctrl-D
Ctrl-C ends an answer. A line that begins with a space is no command, even with a / after it."""
_MAX_NEW_TOKENS = 2048
# Lines of pasted text arrive closer together than anybody types.
_PASTE_SECONDS = 0.05


def chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    model_arguments(parser)
    sampling_arguments(parser)
    parser.add_argument("--load", type=file_path, metavar="FILE", help="continue a saved chat")
    server_arguments(parser)


def chat(options: argparse.Namespace) -> Iterable[str]:
    """Chats with a language model that has a chat template. /help shows the commands.

    If stdin is not a terminal, each of its lines is a turn; in a terminal, pasted text is a single
    turn. An answer has up to 2048 tokens unless --max-new-tokens or generation_config.json says
    otherwise. When the context is full, the oldest turns are dropped from it.
    """
    values = sampling_values(options)
    opening, later = _messages(options)
    with_whom = _with_server if options.url is not None else _with_model
    chat = with_whom(options, values, opening)
    chat.conversation.messages += later
    options.code = chat.run()
    return []


def _with_model(options: argparse.Namespace, values: dict[str, Any], opening: list[Any]) -> _Chat:
    """A chat with a model of this process."""
    if options.api_key is not None or options.served_name is not None:
        options.error("--api-key and --served-name are for --url")
    opened = open_model(options)
    from ..engine.generate.conversation import Conversation
    from ..engine.generate.defaults import GenerationDefaults, chosen_sampling
    from ..engine.pictures import read_pictures

    model = opened.model
    defaults = getattr(model, "generation", None) or GenerationDefaults()
    sampling = chosen_sampling(defaults, None, values)
    seed, key = chosen_key(options, sampling)
    is_limited = defaults.max_new_tokens is not None or defaults.max_length is not None
    conversation = Conversation(
        model, opened.tokenizer, opening,
        max_new_tokens=options.max_new_tokens or (None if is_limited else _MAX_NEW_TOKENS),
        stop=options.stop, key=key, chunk=options.chunk,
        cache_dtype=options.cache_dtype,
        template_kwargs=template_variables(options, opened.tokenizer),
        skip_special_tokens=False,  # they separate the reasoning of some models from the answer
        **values,
    )  # fmt: skip
    told = iter([opened.seconds])  # the time of loading is printed once only
    return _Chat(
        options, conversation, f"{type(model).__name__}, context {model.max_length:,} tokens", model,
        lambda answer: stats(answer, sampling, seed, next(told, None)),
        lambda part: read_pictures(model, opened.tokenizer, [part]),
    )  # fmt: skip


def _with_server(options: argparse.Namespace, values: dict[str, Any], opening: list[Any]) -> _Chat:
    """A chat with a server of OpenAI's API."""
    from .remote import RemoteConversation, chat_fields, server_of

    server = server_of(options)
    conversation = RemoteConversation(server, opening, chat_fields(options, values))
    return _Chat(options, conversation, f"{server.model} of {server.url}", None, remote_stats)


class _Chat:
    """The loop of a chat.

    Args:
        options: the parsed options.
        conversation: the chat; ``/reset`` keeps the messages that it was made with.
        partner: whom it is with, for the greeting.
        model: the model, in which NaNs are searched; None for a server.
        stats: makes the lines of ``--stats`` for an answer.
        check_picture: raises UserInputError for a part of a message that is no picture for the model.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        conversation: Any,
        partner: str,
        model: Any,
        stats: Callable[[Shown], Iterable[str]],
        check_picture: Callable[[dict[str, Any]], Any] = lambda part: None,
    ):
        self._options, self.conversation = options, conversation
        self._partner, self._model, self._stats = partner, model, stats
        self._check_picture = check_picture
        # The pictures of the next message, by the names of their files.
        self._attached: list[tuple[str, dict[str, Any]]] = []
        self._terminal = sys.stdin is not None and sys.stdin.isatty()
        self._failed = False

    def run(self) -> int:
        """Runs all turns and returns the exit code: 1 if stdin is no terminal and a turn failed."""
        if self._terminal:
            self._greet()
        while (line := self._ask()) is not None:
            command = line[:1] == "/" and "\n" not in line
            word = line.split(maxsplit=1)[0] if command else ""
            if word == "/quit":
                break
            try:
                if re.fullmatch(r"/[A-Za-z]*", word):
                    self._command(word, line[len(word) :].strip())
                elif line.strip():
                    self._turn(line.strip())
            except BrokenPipeError:
                raise
            except Exception as error:
                if self._options.debug:
                    raise
                self._failed = True
                hint = " (/help shows the commands)" if self._terminal else ""
                say([f"maxjax: {explain(error, self._options.option_for)}{hint}"])
        return int(self._failed and not self._terminal)

    def _greet(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() its history and keys)
        say([f"{self._partner}. /help shows the commands."])

    def _ask(self) -> str | None:
        """The next input; None at the end. In a terminal, a first Ctrl-C shows a hint."""
        if not self._terminal:
            line = sys.stdin.buffer.readline() if sys.stdin else b""
            return line.decode("utf-8", "surrogateescape").rstrip("\r\n") if line else None
        for hint in ("(Ctrl-C once more or Ctrl-D leaves)", ""):
            try:
                return self._input()
            except EOFError:
                say([""])
                return None
            except KeyboardInterrupt:
                say(["", hint] if hint else [""])
        return None

    def _input(self) -> str:
        """A typed line, or all lines of pasted text."""
        lines = [self._line("> ")]
        while select.select([sys.stdin], [], [], _PASTE_SECONDS)[0]:
            try:
                lines.append(self._line(""))
            except EOFError:
                break
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # input() would write it to stdout
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def _turn(self, text: str) -> None:
        messages = self.conversation.messages
        before = len(messages)
        pictures = [part for _, part in self._attached]
        content = [*pictures, {"type": "text", "text": text}]
        try:
            answer = self._answer({"role": "user", "content": content} if pictures else text)
        except BaseException as error:
            if len(messages) > before and not messages[-1]["content"]:
                del messages[before:]  # drop a turn with an empty answer
            if not isinstance(error, KeyboardInterrupt):
                raise
            say(["(interrupted)"])  # before the first text, or by a second Ctrl-C
            return
        finally:
            if len(messages) > before:
                self._attached.clear()
        if self._options.stats:
            say(self._stats(answer))
        if self._terminal and answer.completion.finish_reason == "length" and not answer.stopped:
            say([f"(cut off after {tokens(answer.completion.tokens)})"])

    def _answer(self, message: str | dict[str, Any]) -> Shown:
        if left_out := self.conversation.make_room(message):
            say(
                [f"(the context is full: the oldest {left_out} messages are left out from here on)"]
            )
        stream = self.conversation.say(message)
        try:
            return show(stream)
        except FloatingPointError as error:
            found = nan_error(self._model, stream.completion, self._options.debug_nans)
            raise found from error

    def _command(self, word: str, rest: str) -> None:
        if word == "/help":
            say(_HELP.split("\n"))
        elif word == "/image":
            self._attach(rest)
        elif word == "/reset":
            self._attached.clear()
            self.conversation.reset()
        elif word == "/save":
            self._save(rest)
        else:
            raise UserInputError(
                f"there is no command {word}; the commands are /image FILE, /reset, /save FILE, /help and /quit"
            )

    def _attach(self, name: str) -> None:
        """Attaches a picture; it is read now, so that a saved chat has it whatever becomes of the file."""
        from ..images.decode import data_address

        if not name:
            say([f"({len(self._attached)} taken back)"])
            return self._attached.clear()
        path = Path(local_path(name)).expanduser()
        part = {"type": "image_url", "image_url": {"url": data_address(path)}}
        self._check_picture(part)
        self._attached.append((path.name, part))
        say([f"(attached to the next message: {', '.join(name for name, _ in self._attached)})"])

    def _save(self, name: str) -> None:
        if not name:
            raise UserInputError("/save needs a FILE")
        path = Path(local_path(name)).expanduser()
        if path.exists():
            try:
                read_chat(path)
            except UserInputError:
                raise UserInputError(
                    f"{path} exists and is not a saved chat: it is not overwritten"
                ) from None
        self.conversation.save(path)


# --- saved chats ----------------------------------------------------------------------------


def _messages(options: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """The system messages at the beginning of the chat, and the messages after them."""
    opening = system_message(options)
    later = [] if options.load is None else read_chat(options.load)
    while later and later[0]["role"] == "system":
        if options.system is not None:
            raise UserInputError(f"{options.load} has a system message already: leave --system out")
        opening.append(later.pop(0))
    return opening, later


def read_chat(path: Path) -> list[dict[str, Any]]:
    """Reads the messages of a saved chat.

    Raises:
        UserInputError: the file is not a saved chat.
        OSError: the file cannot be read.
    """
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise UserInputError(f"{path} is not a saved chat: it is not JSON") from None
    good = isinstance(found, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one
        for one in found
    )
    if not good:
        raise UserInputError(
            f"{path} is not a saved chat: it must be a list of objects with role and content"
        )
    return found
