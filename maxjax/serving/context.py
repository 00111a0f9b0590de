"""RequestContext: a request while it is answered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server import Server


@dataclass
class RequestContext:
    """A request while it is answered.

    Attributes:
        server: what answers it.
        client: who has sent it: a digest of the key, or the address.
        body: its body.
        name: the name in its path, if the path has one.
        began: when it came, as ``time.perf_counter`` has it.
        usage: numbers of tokens, once they are known.
        status: status of the response.
    """

    server: Server
    client: str
    body: bytes = b""
    name: str = ""
    began: float = field(default_factory=time.perf_counter)
    usage: dict[str, int] = field(default_factory=dict)
    status: int = 200
    _has_begun: bool = False

    @property
    def engine(self) -> Any:
        """The engine that writes answers."""
        return self.server.engine

    def has_begun(self) -> None:
        """Notes that there is a first piece of an answer."""
        if not self._has_begun:
            self._has_begun = True
            self.server.metrics.first.observe(time.perf_counter() - self.began)
