"""Process of the server: its socket, uvicorn, and an orderly end."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Literal

import uvicorn

from onelaunch.decode.serve.app import make_app
from onelaunch.decode.serve.connection import H11Connection
from onelaunch.decode.serve.service import Service
from onelaunch.device.tools import package_installed

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
"""Addresses that only this machine reaches."""

_HOST_HEADERS = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Values of the header ``Host``, without port, of requests to a loopback address."""

_IDLE_CONNECTIONS = 256
"""Connections beyond those of requests that wait; further ones get status 503."""

_SWITCH_SECONDS = 1e-3
"""Longest time in which the thread of the device keeps the event loop from running Python code: a hang-up is noticed so soon."""


def event_loop() -> Literal["uvloop", "asyncio"]:
    """Return the name of the event loop: that of uvloop where it is installed, whose requests take up to 0.2 ms less."""
    return "uvloop" if package_installed("uvloop") else "asyncio"


class Server(uvicorn.Server):
    """Server that reports its address and the end of loading, and refuses waiting requests once it shuts down.

    Args:
        config: Configuration of uvicorn.
        service: Service to shut down.
        started: Function that is called with the URL when the server listens.
        ready: Function that is called once the model is loaded.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, started: Callable[[str], None], ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._tell, self._ready = service, started, ready
        self._told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report the URL."""
        await super().startup(sockets)
        if sockets:
            host, port = sockets[0].getsockname()[:2]
            self._tell(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end, ten times a second: also if the model could not be loaded. Report once that it is."""
        if self._service.loaded and not self._told:
            self._told = True
            self._ready()
        return await super().on_tick(counter) or self._service.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse the requests that wait, let the running one end, and stop."""
        self._service.queue.close()
        await super().shutdown(sockets)


def serve(
    service: Service,
    *,
    host: str,
    port: int,
    api_key: str | None,
    grace_seconds: int,
    started: Callable[[str], None],
    ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM, whose usual effect follows an orderly shutdown.

    Args:
        service: Service with the model.
        host: Address to listen at.
        port: Port; 0 for any free one.
        api_key: Key that requests must show; ``None`` for none.
        grace_seconds: Time for the running request to end after the signal.
        started: Function that is called with the URL when the server listens.
        ready: Function that is called once the model is loaded.

    Raises:
        OSError: the address is taken, or not this machine's.
        Exception: the model cannot be loaded.
    """
    hosts = _HOST_HEADERS if host in LOOPBACK and api_key is None else None
    app = make_app(service, api_key=api_key, hosts=hosts)
    # The server's own socket: uvicorn would end the process if the address was taken.
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    config = uvicorn.Config(
        app, http=H11Connection, loop=event_loop(), ws="none", lifespan="on", proxy_headers=False, server_header=False,
        access_log=False, log_level="error", limit_concurrency=service.limits.waiting + _IDLE_CONNECTIONS,
        timeout_graceful_shutdown=grace_seconds,
    )  # fmt: skip
    # Only errors are logged: bytes that are not HTTP would otherwise be a line each.
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        Server(config, service, started, ready).run(sockets=[listener])
    finally:
        sys.setswitchinterval(before)
        listener.close()
    if service.failure is not None:
        raise service.failure
