"""The process that serves: the model in the main thread, HTTP in another."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.schema import ServeConfig
from common.errors import ConfigError, RunError, StopRequested
from common.interrupts import StopSignal
from common.log import LOG
from common.parallel.run import Run
from common.paths import require_package
from common.processes.addresses import is_loopback
from common.processes.heartbeat import beat
from common.serving.engine import Engine, Slots
from common.structured_files import read_text
from common.tokenizer import Tokenizer

if TYPE_CHECKING:
    import uvicorn

    from common.serving.app import App

KEY_VARIABLE = "GPT2_API_KEY"
_MAX_KEY_BYTES = 4096
_LAST_WORDS = 5.0
"""Seconds to write the last answers after the drain."""


def serve(config: Run, tokenizer: Tokenizer, open_slots: Callable[[int], Slots], backend: str | None = None) -> None:
    """Listen until SIGTERM or Ctrl-C. open_slots: loads the model with this number of slots.

    Raises ConfigError if it cannot listen, and RunError if the model has failed. Raises
    StopRequested once every request is answered or serve.drain_timeout is over.
    """
    for name in ("uvicorn", "starlette", "prometheus_client"):
        require_package(name, extra="serve", purpose="which the server is made of")
    from common.serving.app import App
    from common.serving.completions import CompletionService

    settings = config.serve
    key = read_key(settings, os.environ.get(KEY_VARIABLE))
    with listen(settings) as listener, StopSignal() as stop:
        engine = Engine(open_slots(settings.slots), queue_limit=settings.max_waiting)
        service = CompletionService(engine, tokenizer, config, backend)
        app = App(service, settings, key)
        server = http_server(app, settings)
        listener.listen()  # clients now wait instead of being refused
        http = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        http.start()
        if key is None and not is_loopback(settings.host):
            LOG.warning(
                f"serve.host={settings.host}: whoever reaches this machine may use the model; set serve.api_key_file"
            )
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        LOG.info(f"{service.name} is served at {address}/v1, with a page at {address}/")
        deadline: float | None = None

        def go_on() -> bool:
            """Return whether requests are still to be answered. A signal begins the drain."""
            nonlocal deadline
            beat(0, "serving")
            if stop.number is not None and deadline is None:
                app.is_draining = True
                deadline = time.monotonic() + settings.drain_timeout
                server.should_exit = True
                LOG.info(f"requests at work have {settings.drain_timeout:g} seconds to end")
            return http.is_alive() and (deadline is None or time.monotonic() < deadline)

        engine.run(go_on)
        while go_on():  # the model has failed: tell the clients
            time.sleep(0.1)
        server.should_exit = True
        http.join(_LAST_WORDS)
    if deadline is None:
        raise RunError(f"the server has ended: {engine.failure}")
    assert stop.number is not None
    outcome = "every request is answered"
    if time.monotonic() >= deadline:
        outcome = "requests that took longer than serve.drain_timeout were given up"
    raise StopRequested(stop.number, f"; {outcome}")


def read_key(settings: ServeConfig, variable: str | None) -> str | None:
    """Return the key from serve.api_key_file, else from the variable. Raises ConfigError."""
    name, key = KEY_VARIABLE, variable
    if settings.api_key_file is not None:
        name = f"serve.api_key_file={settings.api_key_file}"
        key = read_text(Path(settings.api_key_file), limit=_MAX_KEY_BYTES).strip()
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{name}: expected a key of visible ASCII characters on one line")
    return key


def listen(settings: ServeConfig) -> socket.socket:
    """Return a bound socket, which listens once the model is loaded. Raises ConfigError if it cannot be bound."""
    where = f"serve.host={settings.host} serve.port={settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)  # asyncio sends at once for TCP only
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not the name of a machine"
        raise ConfigError(f"{where}: {reason}; give an address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{where}: cannot listen there ({error.strerror}); choose another port, or 0 for a free one"
        ) from None
    return listener


def http_server(app: App, settings: ServeConfig) -> uvicorn.Server:
    """Return the server of an app. With ``should_exit`` it accepts no more connections, and ends once every request is
    answered.
    """
    import uvicorn

    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the app logs by itself
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_patient_protocol(settings.read_timeout),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=settings.max_connections,
            timeout_graceful_shutdown=int(settings.drain_timeout + _LAST_WORDS),
        )
    )


def _patient_protocol(seconds: float) -> type[Any]:
    """Return uvicorn's protocol with a time limit for the head of a request.

    Without it a client that sends a byte a second would hold a connection for ever.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PatientProtocol(H11Protocol):  # type: ignore[misc]
        waiting: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.waiting is not None:
                self.waiting.cancel()

        def watch(self) -> None:
            """Start the timer when a head is awaited, and stop it when the head has arrived."""
            is_awaited = self.cycle is None or self.cycle.response_complete
            if is_awaited and self.waiting is None:
                self.waiting = self.loop.call_later(seconds, self.transport.close)
            elif not is_awaited and self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None

    return PatientProtocol
