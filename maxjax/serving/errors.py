"""RequestError: why a request gets no answer, in the form in which OpenAI's clients read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import OutOfMemoryError, UnsupportedModelError, UserInputError, first_line

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "server_error", 504: "timeout_error",
}  # fmt: skip


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: status of the response.
        message: what is wrong, and what to do about it.
        param: the field that is wrong.
        code: a word for programs, such as ``"model_not_found"``.
        headers: headers of the response.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """The body of the response.

        Example:
            >>> RequestError(404, "no such model", code="model_not_found").body()["error"]["type"]
            'not_found_error'
        """
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def unsupported(name: str, what: str | None = None) -> RequestError:
    """The error for a field, or a value of one, that this server does not have."""
    message = f"{what or name} is not supported by this server"
    return RequestError(400, message, param=name, code="unsupported_parameter")


@contextmanager
def checking() -> Iterator[None]:
    """While what a client has sent is checked, errors about types are the client's."""
    try:
        yield
    except (TypeError, ImportError) as error:
        raise RequestError(400, first_line(error)) from error


def error_of(error: BaseException) -> RequestError:
    """The error that a client is told; of an unexpected one only that it happened."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, (UserInputError, UnsupportedModelError)):
        return RequestError(400, first_line(error))
    if isinstance(error, FloatingPointError):
        return RequestError(500, "the model's logits are NaN or infinite: no token can be chosen")
    if isinstance(error, OutOfMemoryError):
        return RequestError(503, "the devices have no memory left", headers={"retry-after": "5"})
    return RequestError(500, "the server has failed to answer this request")
