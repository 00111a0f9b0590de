"""A server over the tiny model, and one whose answers are given."""

import asyncio
import contextlib
import threading

import pytest
from starlette.testclient import TestClient

import maxjax
from maxjax.engine.generate.completion import Completion
from maxjax.serving.app import app, application
from maxjax.serving.server import Server

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="session")
def tiny():
    return maxjax.load("tiny")


@pytest.fixture(scope="session")
def engine(tiny):
    with maxjax.Engine(*tiny, slots=4) as engine:
        yield engine


@pytest.fixture(scope="session")
def client(engine):
    return TestClient(app(engine, name="tiny"))


def ask(client, path="/v1/chat/completions", headers=None, **fields):
    if path == "/v1/chat/completions":
        fields = {"messages": QUESTION, **fields}
    return client.post(path, json={"model": "tiny", **fields}, headers=headers)


def server_of(client):
    """What the application of a client answers with."""
    return next(route.app._server for route in client.app.routes if hasattr(route.app, "_server"))


def events(response):
    """The data of server-sent events, the end mark included."""
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [line.removeprefix("data: ") for line in lines]


async def _first(iterator):
    """The next item, if there is one."""
    with contextlib.suppress(StopAsyncIteration):
        yield await anext(iterator)


class GivenAnswer:
    """A PendingAnswer whose text is given, in pieces of ``size`` characters."""

    def __init__(self, text, size, waits, prompt=""):
        self._pieces = [text[i : i + size] for i in range(0, len(text), size)]
        self._text, self._waits, self.is_done, self.is_cancelled = text, waits, False, False
        self._prompt, self._callbacks = prompt, []
        self.prompt = f"{prompt} as it was read"

    @property
    def completion(self):
        i = len(self._text) // 2
        return Completion(
            self._text,
            tokens=[1, 2],
            finish_reason="stop",
            prompt_tokens=[3],
            prompt=self._prompt,
            cached_tokens=1,
            token_texts=[self._text[:i], self._text[i:]],
        )

    def cancel(self):
        self.is_cancelled = True

    def logprobs_from(self, start):
        return []

    def add_done_callback(self, function):
        self._callbacks.append(function)

    async def __aiter__(self):
        for piece in self._pieces:
            yield piece
        while self._waits and not self.is_cancelled:
            await asyncio.sleep(0.01)
        self.is_done = True
        for function in self._callbacks:
            function(self)

    async def pieces_from(self, start):
        if start == 0:
            self._iterator = aiter(self)
        return [piece async for piece in _first(self._iterator)]

    def __await__(self):
        async def end():
            async for _ in self:
                pass
            return self.completion

        return end().__await__()


class GivenEngine:
    """An engine that answers every prompt with a given text."""

    slots, adapters = 4, ("small",)

    def __init__(self, text, size=3, waits=False, prompt=""):
        self._given, self.asked, self.answers = (text, size, waits, prompt), [], []
        self._lock = threading.Lock()

    def submit(self, prompt, **settings):
        with self._lock:
            self.asked.append((prompt, settings))
            self.answers.append(GivenAnswer(*self._given))
        return self.answers[-1]


@pytest.fixture
def given(tiny):
    """Makes a client of a server that answers with a text, and its engine."""

    def make(
        text="Yes.",
        *,
        format=None,
        size=3,
        waits=False,
        prompt="",
        origins=(),
        hosts=None,
        **options,
    ):
        server = Server("tiny", format=format, **options)
        engine = GivenEngine(text, size, waits, prompt)
        server.use(*tiny, engine)
        server.is_ready = True
        return TestClient(application(server, origins, hosts)), engine

    return make
