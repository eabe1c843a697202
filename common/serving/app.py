"""Addresses of the server, access to them, and a log line for each call."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.config.schema import ServeConfig
from common.log import LOG
from common.processes.addresses import is_loopback
from common.serving.completions import Completion, CompletionService, event
from common.serving.metrics import CONTENT_TYPE
from common.serving.protocol import Refusal

PAGE = Path(__file__).with_name("page.html")
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:;"
    " script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
}
_HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
_NO_CHAT = (
    "there is no chat here: GPT-2 continues text and has no format of conversations; post a prompt to /v1/completions"
)
_JSON = "application/json"
_COMPLETIONS = "/v1/completions"
_GONE = 499
"""Status in log and metrics of a client that has left; nginx uses the same number."""


class App:
    """An ASGI application. ``is_draining``: new completions are refused."""

    def __init__(self, service: CompletionService, settings: ServeConfig, key: str | None) -> None:
        """key: the key that clients must send; None if everybody may call."""
        self.is_draining = False
        self._service, self._settings = service, settings
        self._key = None if key is None else key.encode()
        self._is_local = is_loopback(settings.host)
        self._worker = ThreadPoolExecutor(1, "requests")
        model = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "gpt2-toolkit"}
        model["meta"] = service.facts
        page = Response(PAGE.read_bytes(), media_type="text/html", headers=_HEADERS | _PAGE_HEADERS)
        self._pages: dict[str, Callable[[], Response]] = {
            "/": lambda: page,
            "/health": self._health,
            "/metrics": lambda: Response(service.metrics.text(), 200, _HEADERS, CONTENT_TYPE),
            "/v1/models": lambda: _json({"object": "list", "data": [model]}),
            f"/v1/models/{service.name}": lambda: _json(model),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request in any case; the log and the metrics get its status."""
        request, begun, status = Request(scope, receive), time.monotonic(), 0
        note: dict[str, Any] = {}
        request.state.note = note

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            answer = await self._answer(request)
            await answer(scope, receive, sending)
        except ClientDisconnect:
            status = _GONE
        except Exception as error:
            if isinstance(error, Refusal):
                note.setdefault("error", str(error))
            else:
                LOG.exception("a request has failed")
                error = Refusal(500, "the server has failed; its log says why")
            if not status:
                await _refuse(error)(scope, receive, sending)
        finally:
            status = status or _GONE
            self._service.metrics.requests.labels(status).inc()
            client = request.client.host if request.client else "-"
            path = scope["path"].encode("unicode_escape").decode()[:100]  # which cannot break the line
            words = " ".join(f"{name}={json.dumps(value, ensure_ascii=True)}" for name, value in note.items())
            seconds = time.monotonic() - begun
            LOG.info(f"{client} {request.method[:20]} {path} {status} {seconds:.3f} s {words}".rstrip())

    async def _answer(self, request: Request) -> ASGIApp:
        path, method, headers = request.scope["path"], request.method, request.headers
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        # another name may belong to a page that has rebound its own name to this address
        if self._is_local and host and not is_loopback(name.strip("[]")):
            raise Refusal(403, "this server serves only this machine; call it localhost or 127.0.0.1")
        if path != "/health" and not self._is_allowed(headers.get("authorization", "")):
            raise Refusal(401, "no valid key; send the header Authorization: Bearer KEY")
        if path.startswith("/v1/chat"):
            raise Refusal(404, _NO_CHAT)
        if path not in (*self._pages, _COMPLETIONS):
            places = ", ".join((*self._pages, _COMPLETIONS))
            raise Refusal(404, f"there is no {path[:100]}; there are {places}")
        expected = "GET" if path in self._pages else "POST"
        if method != expected and (method, expected) != ("HEAD", "GET"):
            raise Refusal(405, f"{path} is for {expected}, not {method[:20]}")
        return self._pages[path]() if path in self._pages else await self._complete(request)

    def _is_allowed(self, authorization: str) -> bool:
        """Return whether the key was sent, as a bearer token or as the password of a browser."""
        if self._key is None:
            return True
        scheme, _, value = authorization.partition(" ")
        sent = value.strip().encode("latin-1")
        if scheme.lower() == "basic":
            try:
                sent = base64.b64decode(sent, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(sent, self._key)

    def _health(self) -> Response:
        if self._service.engine.failure is not None:
            return _json({"status": "failed"}, 503)
        return _json({"status": "draining" if self.is_draining else "ok"})

    async def _complete(self, request: Request) -> ASGIApp:
        if self.is_draining:
            raise Refusal(503, "the server is about to stop")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _JSON:  # a page of another site could post other types
            raise Refusal(415, f"expected the header Content-Type: {_JSON}")
        begun = time.monotonic()
        body = await self._body(request)
        loop = asyncio.get_running_loop()
        completion = await loop.run_in_executor(self._worker, self._service.open, body, loop)
        note = request.state.note
        note["prompt_tokens"] = completion.prompt_tokens
        if self._settings.log_prompts:
            note["prompts"] = completion.prompt_texts
        self._service.engine.submit(completion.jobs)
        return partial(self._reply, completion, note, begun)

    async def _body(self, request: Request) -> bytes:
        """Return the whole body. Raises Refusal if it is too large or slow, and ClientDisconnect."""
        limit, seconds = self._settings.max_body_bytes, self._settings.read_timeout
        too_large = Refusal(413, f"the body is larger than {limit} bytes, which is the limit")
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {seconds:g} seconds") from None
        return bytes(body)

    async def _reply(
        self, completion: Completion, note: dict[str, Any], begun: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send a completion. Raises Refusal, and ClientDisconnect if the client leaves."""
        limit = self._settings.request_timeout
        try:
            async with asyncio.timeout(limit - (time.monotonic() - begun)):
                await _unless_gone(receive, self._send(completion, scope, receive, send))
        except TimeoutError:
            refusal = Refusal(504, f"the request took more than {limit:g} seconds; ask for less")
            if completion.request.stream:
                with suppress(TimeoutError):  # the client may not read
                    async with asyncio.timeout(1):
                        last = {"type": "http.response.body", "body": event(refusal.body)}
                        await send(last)
            raise refusal from None
        finally:
            completion.cancel()
            note["tokens"] = completion.usage["completion_tokens"]
            self._service.metrics.request_seconds.observe(time.monotonic() - begun)

    async def _send(self, completion: Completion, scope: Scope, receive: Receive, send: Send) -> None:
        if completion.request.stream:
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            events = completion.events()
            stream = StreamingResponse(events, media_type="text/event-stream", headers=headers)
            await stream.stream_response(send)  # _unless_gone waits for the client's end
        else:
            answer = Response(await completion.answer(), media_type=_JSON, headers=_HEADERS)
            await answer(scope, receive, send)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``. If the client closes the connection, end it and raise ClientDisconnect."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _refuse(refusal: Refusal) -> Response:
    more: dict[str, str] = {}
    if refusal.retry is not None:
        more["retry-after"] = str(refusal.retry)
    if refusal.status == 401:
        more["www-authenticate"] = 'Basic realm="gpt2", charset="UTF-8"'
    if refusal.status in (408, 413):  # the rest of the body is not read
        more["connection"] = "close"
    return _json(refusal.body, refusal.status, more)


def _json(tree: Any, status: int = 200, more: dict[str, str] | None = None) -> Response:
    text = json.dumps(tree, ensure_ascii=False)
    return Response(text, status, media_type=_JSON, headers=_HEADERS | (more or {}))
