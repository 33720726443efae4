"""The HTTP server in front: aiohttp's low-level server around `Handlers`, and a shutdown that drains.

The low-level server is used because `web.Application` costs every request its routing, which has nothing to
choose from here, and matches decoded paths.
"""

from __future__ import annotations

from aiohttp import web

from specproxy.errors import ConfigError
from specproxy.proxy.handlers import Handlers

__all__ = ["ProxyServer"]

_LINE_LIMIT = 64 * 1024
_HEADER_COUNT = 256
_LAST_MOMENTS_S = 0.2  # for handlers to notice that they were cancelled


class ProxyServer:
    """Listens, and hands every request to `handlers`. Start it in the event loop that it is to run in."""

    def __init__(self, handlers: Handlers) -> None:
        self.handlers = handlers
        self._runner: web.ServerRunner | None = None

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of every listening socket."""
        return [address[:2] for address in self._runner.addresses] if self._runner is not None else []

    async def start(self, host: str, port: int) -> None:
        """Listen on `host`; port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        runner = web.ServerRunner(
            web.Server(
                self.handlers.handle,
                handler_cancellation=True,
                auto_decompress=False,
                access_log=None,
                max_line_size=_LINE_LIMIT,
                max_field_size=_LINE_LIMIT,
                max_headers=_HEADER_COUNT,
            ),
            shutdown_timeout=_LAST_MOMENTS_S,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except (OSError, OverflowError) as error:
            await runner.cleanup()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"cannot listen on {host}:{port}: {reason}", hint="choose another --port"
            ) from error
        self._runner = runner

    async def stop(self, grace_s: float = 10.0) -> None:
        """Take no new requests, let those in flight end for up to `grace_s` seconds, then close. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in runner.sites:
            await site.stop()
        await self.handlers.drain(grace_s)
        await runner.cleanup()
        await self.handlers.aclose()
