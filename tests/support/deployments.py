"""A proxy in front of deployments, and a chat with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from specproxy.config import Deployment
from specproxy.proxy.deployments import deployed
from tests.support.client import RawClient, RawReply, post
from tests.support.proxy import Proxy, running_proxy
from tests.support.upstream import Upstream

__all__ = ["CHAT", "ask", "deployment", "proxied"]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def proxied(*deployments: Deployment, **environ: str) -> AsyncIterator[Proxy]:
    backends = deployed(deployments, environ)
    for backend in backends:
        await backend.start()
        await backend.check()
    async with running_proxy(*backends) as proxy:
        yield proxy


async def ask(proxy: Proxy, *headers: bytes, **fields: Any) -> RawReply:
    client = await RawClient.connect(proxy.port)
    reply = await client.ask(post("/v1/chat/completions", json.dumps(CHAT | fields).encode(), *headers))
    client.close()
    return reply


def deployment(*servers: Upstream, **fields: Any) -> Deployment:
    return Deployment(**{"urls": [server.url for server in servers], "target": "m"} | fields)
