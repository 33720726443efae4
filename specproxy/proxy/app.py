"""The server in front: listens, closes what is idle for too long, and drains on shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from specproxy.adapters.tasks import Tasks
from specproxy.errors import ConfigError
from specproxy.proxy.handlers import Handlers
from specproxy.proxy.server import SPARE_CONNECTIONS, ClientConnection
from specproxy.proxy.server_limits import ServerLimits

__all__ = ["ProxyServer"]

log = logging.getLogger(__name__)

_SWEEP_S = 5.0
_LAST_MOMENTS_S = 1.0  # for the last bytes to reach their clients


class ProxyServer:
    """Listens, and hands every request to `handlers`. `limits` may be replaced: new connections get those."""

    def __init__(self, handlers: Handlers, limits: ServerLimits | None = None) -> None:
        self.handlers = handlers
        self.limits = limits or ServerLimits()
        self._tasks = Tasks()
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._turned_away = 0  # connections above the limit since the last sweep

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of every listening socket."""
        return [sock.getsockname()[:2] for sock in self._server.sockets] if self._server is not None else []

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._connections)

    async def start(self, host: str, port: int) -> None:
        """Listen on `host`; port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, host, port, backlog=1024)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {_why(error)}", hint=_advice(error)) from error
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)

    async def stop(self, grace_s: float = 10.0) -> None:
        """Take no new connections, give requests in flight `grace_s` seconds to end, close. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [c for c in self._connections if not c.busy]:
            connection.close()
        await self.handlers.drain(grace_s)
        await self._tasks.aclose()
        await self.handlers.aclose()
        await self._close_connections()

    async def _close_connections(self) -> None:
        """Close all; those whose client does not read are given up on after a moment."""
        ending = [connection.ended for connection in self._connections]
        for connection in list(self._connections):
            connection.close()
        if ending:
            await asyncio.wait(ending, timeout=_LAST_MOMENTS_S)
        for connection in list(self._connections):
            connection.abort()
            await connection.ended

    def _accept(self) -> ClientConnection:
        self._turned_away += len(self._connections) >= self.limits.connections + SPARE_CONNECTIONS
        return ClientConnection(self.handlers.handle, self._tasks, self.limits, self._connections)

    def expire(self, now: float) -> None:
        """Close connections that have been idle for too long; `now` is the loop's time."""
        for connection in list(self._connections):
            connection.expire(now)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self.expire(loop.time())
        if self._turned_away:
            log.warning(
                "%d connections closed: there are %d already (limits.connections)",
                self._turned_away,
                self.limits.connections,
            )
            self._turned_away = 0
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)


def _why(error: Exception) -> str:
    """What kept us from listening, without what asyncio says before it."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return reason.rpartition(": ")[2]


def _advice(error: Exception) -> str:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return "`specproxy status` tells whether a proxy runs there already; or choose another --port"
    if code == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "choose a --host that this machine has, such as 127.0.0.1"
    return "choose another --port"
