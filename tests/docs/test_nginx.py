"""The block of docs/howto/nginx.md in a real nginx: streams, uploads, paths, and clients that leave."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.support.ports import free_port
from tests.support.proxy import running_proxy
from tests.support.upstream import CERTIFICATE, Conn, Upstream

pytestmark = [pytest.mark.nginx, pytest.mark.timeout(60)]

PAGE = (ROOT / "docs" / "howto" / "nginx.md").read_text(encoding="utf-8")
SHELL = """daemon off; pid {folder}/pid; error_log stderr warn; worker_processes 1;
events {{}}
http {{ access_log off; {temps} {block} }}
"""


def block(port: int, proxy: int) -> str:
    """The page's server block, with ports that are free and a certificate that exists."""
    found = re.search(r"^```nginx\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    text = found[1].replace("8443", str(port)).replace("8484", str(proxy))
    assert str(proxy) in text
    return re.sub(r"/etc/nginx/llm\.example\.pem", str(CERTIFICATE), text)


@asynccontextmanager
async def nginx(folder: Path, proxy: int) -> AsyncIterator[int]:
    """A running nginx; its port."""
    port = free_port()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temps = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "nginx.conf").write_text(SHELL.format(folder=folder, temps=temps, block=block(port, proxy)))
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program is not None
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    checked = await asyncio.to_thread(
        subprocess.run, [*command, "-t"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await _listening(port)
        yield port
    finally:
        child.terminate()
        await child.wait()


async def _listening(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.02)
    raise AssertionError("nginx does not listen")


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that speaks TLS and looks at no name."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def go() -> Iterator[asyncio.Event]:
    return asyncio.Event()


async def test_streams_arrive_piece_by_piece(tmp_path: Path, go: asyncio.Event) -> None:
    """The first event is with the client before the server has written the second."""

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(HEAD + b"b\r\ndata: one\n\n\r\n")
        await go.wait()
        await conn.send(b"b\r\ndata: two\n\n\r\n0\r\n\r\n")

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        nginx(tmp_path, proxy.port) as port,
    ):
        reader, writer = await connect(port)
        writer.write(post("/v1/chat/completions", b'{"messages": [], "stream": true}'))
        await reader.readuntil(b"data: one\n\n")
        go.set()
        await reader.readuntil(b"data: two\n\n")
        writer.close()


async def test_uploads_and_paths_pass_as_they_are(tmp_path: Path) -> None:
    """3 MB of body, and a slash that is part of a name."""
    seen: list[tuple[bytes, int]] = []

    async def script(conn: Conn) -> None:
        request = await conn.request()
        seen.append((request.request_line, len(request.body)))
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        nginx(tmp_path, proxy.port) as port,
    ):
        reader, writer = await connect(port)
        writer.write(post("/v1/models/a%2Fb?x=%20", b"x" * 3_000_000))
        assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        writer.close()
    assert seen == [(b"POST /v1/models/a%2Fb?x=%20 HTTP/1.1", 3_000_000)]


async def test_a_client_that_leaves_is_noticed(tmp_path: Path, go: asyncio.Event) -> None:
    """The server's connection ends too: nothing is generated for nobody."""

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(HEAD + b"b\r\ndata: one\n\n\r\n")
        assert await conn.reader.read() == b""
        go.set()

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        nginx(tmp_path, proxy.port) as port,
    ):
        reader, writer = await connect(port)
        writer.write(post("/v1/chat/completions", b'{"messages": [], "stream": true}'))
        await reader.readuntil(b"data: one\n\n")
        writer.transport.abort()
        async with asyncio.timeout(20):
            await go.wait()
