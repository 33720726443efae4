"""Where routes find what they share."""

from __future__ import annotations

from aiohttp import web

from specproxy.adapters.embedded.service import Service

__all__ = ["SERVICE"]

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
