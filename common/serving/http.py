"""The parts of HTTP over ASGI that the server needs: limited bodies, answers, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, TypeVar

from common.serving.errors import Refusal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_Result = TypeVar("_Result")

JSON = "application/json"


class GoneError(Exception):
    """The client has closed the connection."""


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers by their names in lower case. The last of equal names counts."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(scope: Scope, receive: Receive, *, limit: int, seconds: float) -> bytes:
    """Return the whole body. Raises Refusal if it is too large or slow, and GoneError."""
    too_large = Refusal(413, f"the body is larger than {limit} bytes, which is the limit")
    length = headers_of(scope).get("content-length", "0")
    if not length.isdigit() or len(length) > 18 or int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise GoneError
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {seconds:g} seconds") from None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of ``work``. If the client closes the connection, end it and raise
    GoneError.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_answer(
    send: Send, status: int, body: bytes, kind: str = JSON, more: Mapping[str, str] | None = None
) -> None:
    """Send a whole response. more: further headers."""
    headers = {
        "content-type": kind,
        "content-length": str(len(body)),
        "x-content-type-options": "nosniff",
        "cache-control": "no-store",
        **(more or {}),
    }
    await send(_start(status, headers))
    await send({"type": "http.response.body", "body": body})


async def send_stream(send: Send, parts: AsyncIterator[bytes]) -> None:
    """Send server-sent events as they arrive."""
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "x-accel-buffering": "no",
    }
    await send(_start(200, headers))
    async for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _start(status: int, headers: Mapping[str, str]) -> Message:
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}
