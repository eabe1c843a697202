"""Answers to requests that cannot be served, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from common.errors import GPT2Error

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class Refusal(GPT2Error):
    """The request gets a status other than 200. param: the field at fault.

    retry: seconds after which the same request may succeed.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.retry = status, param, retry

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}
