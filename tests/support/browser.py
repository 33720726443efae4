"""A real headless Chromium, driven over its DevTools protocol: as little of it as looking at a page takes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

__all__ = ["BROWSER", "Page", "browsing"]

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
    "--disable-background-networking", "--remote-debugging-port=0",
)  # fmt: skip


class Page:
    """One tab. `said` collects what the console says, errors and unhandled exceptions among it; `asked` holds
    the URL of every request that it made."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        """Take in what the browser tells, until it is closed."""
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._waiting.pop(data["id"]).set_result(data)
            elif data["method"] == "Network.requestWillBeSent":
                self.asked.append(data["params"]["request"]["url"])
            elif data["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(json.dumps(data["params"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        reply = await self._waiting[number]
        assert "error" not in reply, (method, reply["error"])
        result: dict[str, Any] = reply["result"]
        return result

    async def open(self, url: str) -> None:
        """Go there; returns once it has loaded."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        reply = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression holds; the test's own time-out ends a wait in vain."""
        look = f"const look = () => ({condition}) ? done() : setTimeout(look, 20);"
        await self.evaluate(f"new Promise(done => {{ {look} look(); }})")

    async def text(self, selector: str) -> str:
        """The text of the first element that fits."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def table(self, selector: str) -> list[list[str]]:
        """Text of every cell of a table's body."""
        rows: list[list[str]] = await self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector + ' tbody tr')})]"
            ".map(r => [...r.cells].map(c => c.textContent))"
        )
        return rows

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window's size in CSS pixels, and the colours that the user prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        """A picture of all of the page, as PNG."""
        reply = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(reply["data"])


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Page]:
    """A browser with one empty tab, gone again afterwards; `profile` is a directory that it may fill."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(  # noqa: ASYNC220 (quick)
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        port = await _port(process, profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                tabs = await reply.json(content_type=None)
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                listener = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
                listener.cancel()
                await asyncio.wait((listener,))
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # Debian's command is a script that starts the browser
        await asyncio.to_thread(process.wait)


async def _port(process: subprocess.Popen[bytes], file: Path) -> int:
    """Where it listens, as it says in a file of its profile."""
    while process.poll() is None:
        lines = file.read_text().splitlines() if file.is_file() else []  # noqa: ASYNC240 (a few bytes)
        if len(lines) == 2:
            return int(lines[0])
        await asyncio.sleep(0.01)  # another program is waited for, not an event of ours
    raise AssertionError("the browser ended before it listened")
