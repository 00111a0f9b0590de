"""Server: the model that is served, who may ask it, and how much at once."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.generate.request import Request
from ..errors import UserInputError
from ..text.chat import answer_format
from ..text.formats import format_named
from .admission import Admission
from .errors import RequestError
from .fetch import PictureFetcher
from .metrics import Metrics


@dataclass(frozen=True)
class RequestLimits:
    """What a client may ask for.

    Attributes:
        body_bytes: largest size of a body.
        body_seconds: longest time in which a body must come.
        seconds: longest time of an answer, waiting included.
        read_seconds: longest time in which a client must read what it has been sent.
        waiting: largest number of answers that wait for the engine.
        texts: largest number of texts or documents of one request.
    """

    body_bytes: int = 32 << 20  # several photographs in base64
    body_seconds: float = 30.0
    seconds: float = 600.0
    read_seconds: float = 60.0
    waiting: int = 1024
    texts: int = 2048


DEFAULT_LIMITS = RequestLimits()


class Server:
    """What requests are answered with.

    Args:
        name: name of the model.
        keys: the keys of which a client must send one; none: everybody may ask.
        shares_prefixes: whether clients with different keys share pages of the cache.
        limits: what a client may ask for.
        format: the format in which the model writes calls of functions; None: that of its chat template.
        image_hosts: hosts from which pictures are fetched, as patterns.

    Attributes:
        engine: writes answers; None before the model is there, or if it writes no text.
        model, tokenizer: the model, and its tokenizer; None before they are there.
        error: why the model could not be loaded; None otherwise.
        is_ready: whether requests are taken: the model is there, and its programs are compiled.
        is_ending: whether no new requests are taken.
        eos_ids: the tokens that end an answer.
        format: the name of the format of calls; None if the chat template has none that is known.
        fetcher: fetches pictures; None: no address of a network is taken.
        lock: held while texts are embedded or reranked, one request at a time.
    """

    def __init__(
        self, name: str, keys: Sequence[str] = (), shares_prefixes: bool = False,
        limits: RequestLimits = DEFAULT_LIMITS, format: str | None = None, image_hosts: Sequence[str] = (),
    ):  # fmt: skip
        self.name, self.limits = name, limits
        self._format = None if format is None else format_named(format).names[0]
        if isinstance(keys, str) or not all(isinstance(key, str) and key.strip() for key in keys):
            raise UserInputError("keys must be a list of API keys that are not empty")
        self._keys = [_digest(key) for key in keys]
        self.fetcher = PictureFetcher(image_hosts) if image_hosts else None
        self._secret = secrets.token_bytes(16)
        self._shares = shares_prefixes
        self.engine: Any = None
        self.model: Any = None
        self.tokenizer: Any = None
        self.error: BaseException | None = None
        self.is_ready = self.is_ending = False
        self.lock = threading.Lock()
        self.admission = Admission(1, limits.waiting)
        self.metrics = Metrics(lambda: self.engine)
        self.eos_ids: tuple[int, ...] = ()
        self.format: str | None = None

    def use(self, model: Any, tokenizer: Any, engine: Any = None) -> None:
        """Begins to answer with a model, and the engine that runs it if it writes text."""
        if engine is not None:
            # So many wait in the engine that a slot that ends finds the next text there.
            self.admission = Admission(2 * engine.slots, self.limits.waiting)
            self.eos_ids = Request(model, tokenizer, None, None, None, None, {}).eos_ids
            self.format = self._format or answer_format(tokenizer, tools=())
        self.model, self.tokenizer, self.engine = model, tokenizer, engine

    def fail(self, error: BaseException) -> None:
        """Learns that the model could not be loaded; no request is taken any more."""
        if not self.is_ending:
            self.error, self.is_ending = error, True

    @property
    def has_failed(self) -> bool:
        """Whether the model could not be loaded, or the engine has failed."""
        return self.error is not None or getattr(self.engine, "is_closed", False)

    @property
    def takes_requests(self) -> bool:
        """Whether requests are answered."""
        return self.is_ready and not self.is_ending and not self.has_failed

    def template_reads(self, name: str) -> bool:
        """Whether a chat template of the model has this word."""
        return any(
            name in source for source in getattr(self.tokenizer, "chat_templates", {}).values()
        )

    def unavailable(self) -> RequestError:
        """The error for a request that comes before the server is ready, or when it ends."""
        why = "is not ready yet: /ready tells when it is"
        if self.is_ending or self.has_failed:
            why = "ends" if self.is_ending else "has failed"
        return RequestError(503, f"the server {why}", headers={"retry-after": "5"})

    def client_of(self, headers: Mapping[str, str], address: str) -> str:
        """Who has sent a request.

        Raises:
            RequestError: the client must send a key, and has not sent one of these.
        """
        if not self._keys:
            return address
        kind, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip() if kind.lower() == "bearer" else "")
        # All keys are compared, each in constant time, so that the time tells nothing about them.
        if sum(hmac.compare_digest(digest, key) for key in self._keys):
            return digest.hex()
        raise RequestError(
            401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key", headers={"www-authenticate": "Bearer"},
        )  # fmt: skip

    def log_name(self, client: str) -> str:
        """What the log calls a client: its address, or a name that tells nothing about its key."""
        if not self._keys:
            return client
        return hmac.new(self._secret, client.encode(), "sha256").hexdigest()[:16]

    def salt(self, client: str, given: str | None) -> str:
        """The salt of a client's pages: only prompts with an equal one share them."""
        own = client if self._keys and not self._shares else ""
        return f"{own}\0{given}" if given else own

    def adapter(self, model: str) -> str | None:
        """The adapter that a request names as its model; None for the model alone.

        Raises:
            RequestError: there is no such model.
        """
        if model == self.name:
            return None
        if self.engine is not None and model in self.engine.adapters:
            return model
        raise RequestError(
            404, f"there is no model {model[:80]!r}: /v1/models lists them", param="model", code="model_not_found"
        )  # fmt: skip

    async def with_pictures(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A chat with the pictures that are to be fetched.

        Raises:
            RequestError: one cannot be fetched.
        """
        if self.fetcher is None or getattr(self.model, "vision", None) is None:
            return chat  # the engine refuses the pictures of a model that takes none
        return await self.fetcher.filled(chat)

    def check_writes(self) -> None:
        """Raises RequestError if the model writes no text."""
        if self.engine is None:
            raise RequestError(400, f"{self.name} writes no text: it embeds or reranks texts")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
