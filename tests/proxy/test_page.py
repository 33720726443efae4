"""The page: what it needs without a browser, and what it shows in a real one where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from specproxy.proxy.admin import Admin
from specproxy.proxy.board import Board
from specproxy.proxy.guard import Guard
from tests.proxy.samples import NGRAM, PLAIN, decision, observation
from tests.proxy.test_admin import FakeView
from tests.test_cli_tables import status

PAGE = resources.files("specproxy.proxy").joinpath("page.html").read_text(encoding="utf-8")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


class Outline(HTMLParser):
    """Ids, tags that stay open, and what would be loaded."""

    VOID = frozenset({"meta", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.labels += [given["aria-labelledby"] or ""] if "aria-labelledby" in given else []
        self.loaded += [given[name] or "" for name in ("src", "href", "srcset") if name in given]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline() -> Outline:
    parser = Outline()
    parser.feed(PAGE)
    assert parser.open == []
    return parser


def test_it_is_well_formed_and_loads_nothing() -> None:
    """Every tag is closed, no id comes twice, labels point somewhere; the icon is empty; it is small."""
    found = outline()
    assert len(set(found.ids)) == len(found.ids)
    assert set(found.labels) <= set(found.ids)
    assert found.loaded == ["data:,"]
    assert len(PAGE.encode()) < 150_000


def test_the_script_names_only_what_is_there() -> None:
    """Every element that is looked up exists, and nothing is put in as markup."""
    looked_up = set(re.findall(r'\$\("([\w-]+)"\)', PAGE))
    assert looked_up <= set(outline().ids)
    assert {"speed", "curve", "lanes", "kinds", "recent", "events", "saved"} <= looked_up
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE)


def test_the_fields_it_reads_are_in_the_status() -> None:
    """Columns read fields of the API by the names that the API has."""
    data = status()
    board = Board()
    board.observe(observation(NGRAM), decision())
    rows = {"LANES": data["lanes"][0], "KINDS": data["kinds"][0], "RECENT": board.recent()[0]}
    for name, row in rows.items():
        block = re.search(rf"const {name} = (\[\[.*?\]\]);", PAGE, re.DOTALL)
        assert block is not None
        assert set(re.findall(r"\br\.(\w+)", block[1])) <= set(row), name


# --- in a real browser --------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """The page, and an API that answers as often as `server.answers` says, from `server.first` on."""

    server: Any

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if "/api/" not in self.path:
            reply = Admin(FakeView(), Guard()).handle("GET", self.path, CIMultiDict(Host="127.0.0.1"), b"")
            self.reply(reply.status, reply.body, dict(reply.headers) | {"Content-Type": reply.content_type})
            return
        recent = "recent" in self.path
        if not recent:
            self.server.count += 1
        good = recent or self.server.first <= self.server.count < self.server.first + self.server.answers
        data = {"recent": self.server.recent} if recent else self.server.data
        self.reply(200 if good else 503, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def reply(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def sample() -> dict[str, Any]:
    data = status()
    data["requests"]["in_flight"] = 3
    data["events"] = [{"at": 1e9, "kind": "drift", "message": "ngram <b>slower</b>", "subject": "ngram"}]
    data["learning_curve"] = {"m.gguf": [[n, 0.3 * n / 40 - 0.05] for n in range(1, 41)]}
    return data


def requests() -> list[dict[str, Any]]:
    board = Board()
    for n in range(10):
        board.observe(observation(NGRAM if n % 2 else PLAIN, 0.01, request_id=str(n)), decision())
    return board.recent()


@contextmanager
def served(first: int = 1, answers: int = 10**6) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.count, server.first, server.answers = 0, first, answers  # type: ignore[attr-defined]  # for the handler
        server.data, server.recent = sample(), requests()  # type: ignore[attr-defined]  # for the handler
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def browse(server: Any, tmp_path: Path, *, milliseconds: int = 3000) -> tuple[str, str]:
    """The page's DOM after some virtual time, and what the console said."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom",
        "--enable-logging=stderr", f"--virtual-time-budget={milliseconds}",
        f"http://127.0.0.1:{server.server_port}/specproxy/",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    text = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", done.stdout, flags=re.DOTALL)
    return text, "\n".join(said)


@in_browser
@pytest.mark.timeout(90)
def test_values_on_the_page_are_the_apis(tmp_path: Path) -> None:
    """Charts, tables and tiles; no word on the console; what comes from a message is text, not markup."""
    with served() as server:
        dom, console = browse(server, tmp_path)
    assert console == ""
    ratio = next(row["ratio"] for row in sample()["kinds"] if row["strategy"] == "ngram")
    speed = f"{1 / ratio:.2f}x"
    for part in (
        "0.1.0 at http://127.0.0.1:8484",
        f'id="saved" class="">{round(abs(sample()["saved_s"]))} s<',
        'id="gain">+25%<',
        'id="total">40<',
        'id="flight">3<',
        "was killed by SIGKILL",
        "Rung 2 (lanes of our own)",
        "ngram &lt;b&gt;slower&lt;/b&gt;",
        "exploit",
        "<polyline",
        "<circle",
        "Decode speed against plain: code on ngram " + speed,
    ):
        assert part in dom, part
    assert dom.count("<tr>") == 3 + 2 + 2 + 10
    assert 'class="stale"' not in dom


@in_browser
@pytest.mark.timeout(90)
def test_a_proxy_that_is_gone_is_said_and_the_last_picture_stays(tmp_path: Path) -> None:
    """After one good answer all others fail."""
    with served(answers=1) as server:
        dom, _ = browse(server, tmp_path, milliseconds=7000)
    assert "The proxy does not answer (HTTP 503), trying again; what is below is from" in dom
    assert 'class="stale"' in dom
    assert "was killed by SIGKILL" in dom


@in_browser
@pytest.mark.timeout(90)
def test_it_recovers(tmp_path: Path) -> None:
    """The first looks fail, later ones don't."""
    with served(first=3) as server:
        dom, _ = browse(server, tmp_path, milliseconds=9000)
    assert "does not answer" not in dom
    assert 'class="stale"' not in dom
    assert "was killed by SIGKILL" in dom


@in_browser
@pytest.mark.timeout(90)
def test_an_empty_proxy_is_no_error(tmp_path: Path) -> None:
    """No lane, no request, no curve yet."""
    with served() as server:
        server.data |= {"lanes": [], "kinds": [], "events": [], "learning_curve": {}, "rung": None}
        server.recent = []
        dom, console = browse(server, tmp_path)
    assert console == ""
    for part in (
        "No lane yet.",
        "No request has been measured yet.",
        "Nothing can be compared",
        "None so far.",
    ):
        assert part in dom
