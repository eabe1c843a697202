"""Addresses of the server, access to them, and a log line for each call."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from common.config.schema import ServeConfig
from common.log import LOG
from common.serving import http
from common.serving.completions import Completion, CompletionService, event
from common.serving.errors import Refusal
from common.serving.http import GoneError, Receive, Scope, Send
from common.serving.metrics import CONTENT_TYPE

PAGE = Path(__file__).with_name("page.html")
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:;"
    " script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
}
_NO_CHAT = (
    "there is no chat here: GPT-2 continues text and has no format of conversations; post a prompt"
    " to /v1/completions"
)
_GONE = 499
"""Status in log and metrics of a client that has left; nginx uses the same number."""


class App:
    """An ASGI application. ``is_draining``: new completions are refused."""

    def __init__(
        self, service: CompletionService, settings: ServeConfig, *, slots: int, key: str | None
    ) -> None:
        """key: the key that clients must send; None if everybody may call."""
        self.is_draining = False
        self._service, self._settings, self._slots = service, settings, slots
        self._key = None if key is None else key.encode()
        self._is_local = is_loopback(settings.host)
        self._started = int(time.time())
        self._page = PAGE.read_bytes()
        self._worker = ThreadPoolExecutor(1, "requests")
        self._routes = {
            "/": ("GET", self._send_page),
            "/health": ("GET", self._send_health),
            "/metrics": ("GET", self._send_metrics),
            "/v1/models": ("GET", self._send_models),
            f"/v1/models/{service.name}": ("GET", self._send_model),
            "/v1/completions": ("POST", self._complete),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request in any case; the log and the metrics get its status."""
        begun, note = time.monotonic(), scope.setdefault("note", {})
        status = 0

        async def sending(message: http.Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._answer(scope, receive, sending)
        except GoneError:
            status = _GONE
        except Refusal as refusal:
            if not status:
                await _refuse(sending, refusal)
            note.setdefault("error", str(refusal))
        except Exception:
            LOG.exception("a request has failed")
            if not status:
                await _refuse(sending, Refusal(500, "the server has failed; its log says why"))
        finally:
            seconds = time.monotonic() - begun
            self._service.metrics.statuses[status or _GONE] += 1
            LOG.info(_line(scope, status or _GONE, seconds, note))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        headers = http.headers_of(scope)
        if self._is_local and not _is_local_name(headers.get("host", "")):
            raise Refusal(
                403, "this server serves only this machine; call it localhost or 127.0.0.1"
            )
        if path != "/health" and not self._is_allowed(headers.get("authorization", "")):
            raise Refusal(401, "no valid key; send the header Authorization: Bearer KEY")
        if path.startswith("/v1/chat"):
            raise Refusal(404, _NO_CHAT)
        if path not in self._routes:
            places = ", ".join(self._routes)
            raise Refusal(404, f"there is no {path[:100]}; there are {places}")
        expected, answer = self._routes[path]
        if method != expected and (method, expected) != ("HEAD", "GET"):
            raise Refusal(405, f"{path} is for {expected}, not {method[:20]}")
        await answer(scope, receive, send)

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

    # ---- one function for each address ----

    async def _send_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        await http.send_answer(send, 200, self._page, "text/html; charset=utf-8", _PAGE_HEADERS)

    async def _send_health(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = self._service.engine.failure
        word = "draining" if self.is_draining else "ok"
        status = 200 if failure is None else 503
        await _send_json(send, status, {"status": word if failure is None else "failed"})

    async def _send_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = self._service.metrics.text(self._service.engine, self._slots)
        await http.send_answer(send, 200, text.encode(), CONTENT_TYPE)

    async def _send_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_json(send, 200, {"object": "list", "data": [self._model()]})

    async def _send_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_json(send, 200, self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._started,
            "owned_by": "gpt2-toolkit",
            "meta": self._service.facts,
        }

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.is_draining:
            raise Refusal(503, "the server is about to stop")
        kind = http.headers_of(scope).get("content-type", "").partition(";")[0].strip().lower()
        if kind != http.JSON:  # a page of another site could post other types
            raise Refusal(415, f"expected the header Content-Type: {http.JSON}")
        settings, begun = self._settings, time.monotonic()
        body = await http.read_body(
            scope, receive, limit=settings.max_body_bytes, seconds=settings.read_timeout
        )
        loop = asyncio.get_running_loop()
        completion = await loop.run_in_executor(self._worker, self._service.open, body, loop)
        note = scope["note"]
        note["prompt_tokens"] = completion.prompt_tokens
        if settings.log_prompts:
            note["prompts"] = completion.prompt_texts
        completion.submit()
        try:
            async with asyncio.timeout(settings.request_timeout - (time.monotonic() - begun)):
                await http.unless_gone(receive, self._reply(completion, send))
        except TimeoutError:
            refusal = self._timeout()
            if completion.request.stream:
                with suppress(TimeoutError):  # the client may not read
                    async with asyncio.timeout(1):
                        last = {"type": "http.response.body", "body": event(refusal.body)}
                        await send(last)
            raise refusal from None
        finally:
            completion.cancel()
            note["tokens"] = sum(len(job.sequence.tokens) for job in completion.jobs)
            self._service.metrics.request_seconds.add(time.monotonic() - begun)

    async def _reply(self, completion: Completion, send: Send) -> None:
        if completion.request.stream:
            await http.send_stream(send, self._guarded(completion))
        else:
            await http.send_answer(send, 200, await completion.answer())

    async def _guarded(self, completion: Completion) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. An error after its head becomes an event too."""
        async with aclosing(completion.events()) as events:
            try:
                async for each in events:
                    yield each
            except Refusal as refusal:
                yield event(refusal.body)

    def _timeout(self) -> Refusal:
        seconds = self._settings.request_timeout
        return Refusal(504, f"the request took more than {seconds:g} seconds; ask for less")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address. A name has no case and may end with a
    dot.
    """
    name = host.lower().removesuffix(".")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _is_local_name(host: str) -> bool:
    """Return whether a Host header names this machine.

    Another name may belong to a page that has rebound its own name to this address.
    """
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return not host or is_loopback(name.strip("[]"))


async def _refuse(send: Send, refusal: Refusal) -> None:
    more: dict[str, str] = {}
    if refusal.retry is not None:
        more["retry-after"] = str(refusal.retry)
    if refusal.status == 401:
        more["www-authenticate"] = 'Basic realm="gpt2", charset="UTF-8"'
    if refusal.status in (408, 413):  # the rest of the body is not read
        more["connection"] = "close"
    await _send_json(send, refusal.status, refusal.body, more)


async def _send_json(
    send: Send, status: int, tree: Any, more: dict[str, str] | None = None
) -> None:
    await http.send_answer(send, status, json.dumps(tree, ensure_ascii=False).encode(), more=more)


def _line(scope: Scope, status: int, seconds: float, note: dict[str, Any]) -> str:
    """Return one log line. Text from the client is escaped and cannot break it."""
    client = (scope.get("client") or ("-",))[0]
    path = scope["path"].encode("unicode_escape").decode()[:100]
    words = " ".join(
        f"{name}={json.dumps(value, ensure_ascii=True)}" for name, value in note.items()
    )
    return f"{client} {scope['method'][:20]} {path} {status} {seconds:.3f} s {words}".rstrip()
