"""The page in a real browser, on a real proxy: what it shows, and what it does when the proxy goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from specproxy.proxy.admin import Admin
from specproxy.proxy.app import ProxyServer
from specproxy.proxy.board import Board
from specproxy.proxy.guard import Guard
from specproxy.proxy.handlers import Handlers
from specproxy.proxy.router import Router
from specproxy.records import TempBucket, Workload
from tests.proxy.samples import NGRAM, PLAIN, decision, observation
from tests.proxy.test_admin import FakeView
from tests.support.browser import Page, browsing
from tests.support.proxy import ScriptedPolicy
from tests.test_cli_tables import status

CONTRAST = """
(() => {
  const parts = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  const light = c => { const [r, g, b] = parts(c); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(", 0)")) return c; } return "rgb(9,9,9)"; };
  let least = 21;
  for (const e of document.querySelectorAll("p, td, th, h1, h2, li, span, b, button, #state")) {
    const a = light(getComputedStyle(e).color), b = light(behind(e));
    least = Math.min(least, (Math.max(a, b) + .05) / (Math.min(a, b) + .05));
  }
  return least;
})()
"""

OVERLAPS = """
[...document.querySelectorAll("svg")].flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
  return texts.flatMap(([a, r], i) => texts.slice(i + 1)
    .filter(([, o]) => Math.min(r.bottom, o.bottom) - Math.max(r.top, o.top) > 3
      && Math.min(r.right, o.right) - Math.max(r.left, o.left) > 1)
    .map(([b]) => a + " on " + b));
})
"""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(90)]


@dataclass
class Shown(FakeView):
    """A proxy's status and requests that a test may change."""

    data: dict[str, Any]
    board: Board = field(default_factory=Board)

    def status(self, *, everything: bool = False) -> dict[str, Any]:
        return self.data

    def live(self) -> dict[str, Any]:
        return self.data | {"recent": self.board.recent(20)}


def view() -> Shown:
    data = status(Workload("tool_call", TempBucket.GREEDY))
    data["requests"]["in_flight"] = 3
    data["events"] = [
        {"at": 1e9, "kind": "drift", "message": "ngram <b>slower</b>", "subject": "ngram"},
        {"at": 1e9 + 1, "kind": "lane_quarantined", "message": "said something else", "subject": "mtp"},
    ]
    data["learning_curve"] = {"m.gguf": [[n, 0.3 * n / 40 - 0.05] for n in range(1, 41)]}
    data["engine"] = [
        {"workload": "code_edit/greedy", "auto_tok_s": 80.0, "fixed_tok_s": {"plain": 40.0, "ngram": 64.0},
         "auto_vs_best_fixed": 1.25},
        {"workload": "prose/greedy", "auto_tok_s": 36.0, "fixed_tok_s": {"plain": 40.0},
         "auto_vs_best_fixed": 0.9},
    ]  # fmt: skip
    shown = Shown(data)
    for n in range(10):
        shown.board.observe(observation(NGRAM if n % 2 else PLAIN, 0.01, request_id=str(n)), decision())
    return shown


@asynccontextmanager
async def served(shown: Shown, port: int = 0, *, watchers: int = 8) -> AsyncIterator[int]:
    """The proxy's own routes, on a real server; its port."""
    router = Router((), ScriptedPolicy(), rng=np.random.default_rng(1))
    server = ProxyServer(Handlers(router, admin=Admin(shown, Guard(), watchers=watchers)))
    await server.start("127.0.0.1", port)
    try:
        yield server.addresses[0][1]
    finally:
        await server.stop(0.0)


async def opened(page: Page, port: int) -> None:
    await page.open(f"http://127.0.0.1:{port}/specproxy/")
    await page.until("document.getElementById('total').textContent !== '–'")


async def asked(port: int, name: str) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/specproxy/api/{name}") as reply,
    ):
        return await reply.json()


def times(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return "–"
    return f"{1 / row[name]:.2f}x ({1 / row[f'{name}_hi']:.2f}–{1 / row[f'{name}_lo']:.2f})"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{int(100 * value + 0.5)}%"


async def test_values_on_the_page_are_the_apis(tmp_path: Path) -> None:
    """Tiles, tables and charts; nothing on the console; nothing asked of anyone else."""
    async with served(view()) as port, browsing(tmp_path) as page:
        await opened(page, port)
        data, recent = await asked(port, "status"), (await asked(port, "recent"))["recent"]
        assert await page.text("#saved") == f"{data['saved_s']:.0f} s"
        assert await page.text("#total") == str(data["requests"]["total"])
        assert await page.text("#flight") == str(data["requests"]["in_flight"])
        assert await page.text("#gain") == "+25%"
        kinds = await page.table("#kinds")
        assert [row[:6] for row in kinds] == [
            [
                r["workload"],
                r["lane"],
                str(r["n"]),
                percent(r["share"]),
                percent(r["acceptance"]),
                f"{r['tok_s']:.1f}",
            ]
            for r in data["kinds"]
        ]
        assert [row[7:9] for row in kinds] == [
            [times(r, "ratio"), times(r, "whole_ratio")] for r in data["kinds"]
        ]
        lanes = await page.table("#lanes")
        assert [row[:4] for row in lanes] == [
            [
                r["id"],
                r["strategy"] + (f":{r['n_max']}" if r["n_max"] else ""),
                r["health"],
                str(r["in_flight"]),
            ]
            for r in data["lanes"]
        ]
        assert [row[2:] for row in await page.table("#times")] == [
            [str(r["n"]), f"{r['p50_s']:.2f}\u00a0s", f"{r['p95_s']:.2f}\u00a0s"]
            for r in data["time_to_complete"]
        ]
        assert [row[3] for row in await page.table("#recent")] == [str(r["output_tokens"]) for r in recent]
        charts = await page.evaluate(
            "[...document.querySelectorAll('svg')].map(s => s.getAttribute('aria-label'))"
        )
        ngram = next(r for r in data["kinds"] if r["strategy"] == "ngram")
        assert f"Decode speed against plain: tool_call ngram {times(ngram, 'ratio')}" in charts
        assert f"Where requests went: tool_call: ngram {percent(ngram['share'])}, plain 50%" in charts
        assert sum("Guesses accepted: tool_call ngram 74%" in label for label in charts) == 1
        (against,) = [label for label in charts if label.startswith("Auto against fixed strategies: ")]
        assert "code_edit/greedy auto 80.0 (1.25x); code_edit/greedy ngram 64.0; " in against
        assert "prose/greedy auto 36.0 (0.90x)" in against
        assert await page.evaluate("document.querySelectorAll('#auto circle.bad').length") == 1
        assert len(charts) == 7
        assert page.said == []
        assert {url.split("/specproxy/")[0] for url in page.asked if not url.startswith("data:")} == {
            f"http://127.0.0.1:{port}"
        }


async def test_what_a_message_says_is_text_not_markup(tmp_path: Path) -> None:
    """Newest first; drift and quarantine stand out."""
    async with served(view()) as port, browsing(tmp_path) as page:
        await opened(page, port)
        events = await page.evaluate("[...document.querySelectorAll('#events li')].map(e => e.textContent)")
        assert "lane quarantined mtp: said something else" in events[0]
        assert "drift ngram: ngram <b>slower</b>" in events[1]
        assert await page.evaluate("document.querySelectorAll('#events b').length") == 0
        assert await page.evaluate("document.querySelectorAll('#events .bad').length") == 2


async def test_it_is_live(tmp_path: Path) -> None:
    """A change shows without another request than the stream; p pauses, and goes on."""
    shown = view()
    async with served(shown) as port, browsing(tmp_path) as page:
        await opened(page, port)
        shown.data["requests"] = shown.data["requests"] | {"total": 4711}
        await page.until("document.getElementById('total').textContent === '4711'")
        assert [url.rpartition("/")[2] for url in page.asked if "/api/" in url] == ["events"]
        await page.call("Input.dispatchKeyEvent", type="keyDown", key="p", text="p")
        assert await page.text("#pause") == "Go on"
        shown.data["requests"] = shown.data["requests"] | {"total": 4712}
        await page.call("Input.dispatchKeyEvent", type="keyDown", key="p", text="p")
        await page.until("document.getElementById('total').textContent === '4712'")
        assert page.said == []


async def test_a_proxy_that_goes_is_said_to_be_away_until_it_is_back(tmp_path: Path) -> None:
    """The last picture stays meanwhile, with its time."""
    shown = view()
    async with browsing(tmp_path) as page:
        async with served(shown) as port:
            await opened(page, port)
        await page.until("document.body.classList.contains('stale')")
        state = await page.text("#state")
        assert "The proxy does not answer" in state
        assert "what is below is from" in state
        assert len(await page.table("#kinds")) == 2
        shown.data["requests"] = shown.data["requests"] | {"total": 99}
        async with served(shown, port):
            await page.until("document.getElementById('total').textContent === '99'")
            assert "The proxy" not in await page.text("#state")
            assert not await page.evaluate("document.body.classList.contains('stale')")


async def test_where_streams_are_refused_it_looks_by_hand(tmp_path: Path) -> None:
    """As when too many pages are open."""
    async with served(view(), watchers=0) as port, browsing(tmp_path) as page:
        await opened(page, port)
        assert {"events", "status", "recent?limit=20"} <= {url.rpartition("/")[2] for url in page.asked}
        assert "The proxy" not in await page.text("#state")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_the_window(tmp_path: Path, width: int, dark: bool) -> None:
    """Nothing sticks out sideways; text keeps its contrast to what is behind it, in the dark too."""
    shown = view()
    for row in shown.data["kinds"]:  # as long as names get
        row |= {"workload": "translation", "lane": f"gpu.example:{9000 + len(row['lane'])}"}
    async with served(shown) as port, browsing(tmp_path) as page:
        await page.size(width, 900, dark=dark)
        await opened(page, port)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate("document.querySelectorAll('svg text').length") > 20
        assert await page.evaluate(OVERLAPS) == []
        assert await page.evaluate(CONTRAST) >= 4.5


async def test_an_empty_proxy_is_no_error(tmp_path: Path) -> None:
    """No lane, no request, no curve yet."""
    shown = view()
    shown.data |= {
        "lanes": [],
        "kinds": [],
        "events": [],
        "learning_curve": {},
        "rung": None,
        "time_to_complete": [],
    }
    shown.board = Board()
    async with served(shown) as port, browsing(tmp_path) as page:
        await opened(page, port)
        text = await page.text("main")
        for part in (
            "No lane yet.",
            "No request has been measured yet.",
            "Nothing can be compared",
            "No tool call or JSON answer yet.",
            "No lane has told of any guesses",
            "None so far.",
        ):
            assert part in text
        assert text.count("No tool call or JSON answer yet.") == 1
        assert await page.evaluate("document.getElementById('times').offsetParent === null")
        assert page.said == []


async def test_the_browser_leaves_no_process(tmp_path: Path) -> None:
    """Debian's command starts it from a script, which is not all there is to end."""
    async with browsing(tmp_path):
        assert running_with(tmp_path)
    deadline = asyncio.get_running_loop().time() + 10
    while running_with(tmp_path):  # killed, but the system takes a moment
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def running_with(profile: Path) -> list[int]:
    """Processes that use a profile; those that have ended and wait to be asked why have no command."""
    every = psutil.process_iter(["pid", "cmdline"])
    return [p.pid for p in every if any(str(profile) in part for part in p.info["cmdline"] or ())]


async def test_everything_is_reached_by_keyboard(tmp_path: Path) -> None:
    """Tab goes to the button and to every table that scrolls, and shows where it is."""
    async with served(view()) as port, browsing(tmp_path) as page:
        await opened(page, port)
        stops = []
        for _ in range(5):
            await page.call(
                "Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
            stops.append(await page.evaluate("document.activeElement.id || document.activeElement.className"))
            outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid"
        assert stops == ["pause", "wide", "wide", "wide", "wide"]
