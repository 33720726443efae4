"""The dependency audit: it ends with 1 for a known vulnerability alone, and claims no look-up that failed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.ports import free_port

AUDIT = Path(__file__).parents[1] / ".ci" / "audit"
CLICK = version("click")
ADVISORY = {
    "id": "PYSEC-1",
    "aliases": ["CVE-1"],
    "summary": "it is\nbad",
    "fixed_in": ["99.1"],
    "withdrawn": None,
}

pytestmark = pytest.mark.timeout(60)  # processes of a busy machine take their time

Page = Callable[[str, str | None], object]  # of a package's version, or of its newest; None: there is none


@contextmanager
def index(answer: Page) -> Iterator[str]:
    """An index that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, _, rest = self.path.removeprefix("/pypi/").partition("/")
            page = answer(name, rest.removesuffix("/json") if "/" in rest else None)
            body = page if isinstance(page, bytes) else json.dumps(page).encode()
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/pypi"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def audit(url: str) -> tuple[int, str]:
    """Exit code and what was printed."""
    command = [sys.executable, str(AUDIT), "--index", url]
    env = os.environ | {"NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


def page(of: str, *advisories: dict[str, object]) -> object:
    return {"info": {"version": of}, "vulnerabilities": list(advisories)}


def looked_up(said: str) -> tuple[int, int]:
    """How many packages the last line says were looked up, and of how many."""
    found = re.search(r"among the (\d+) of (\d+) packages", said.splitlines()[-1])
    assert found is not None, said
    return int(found[1]), int(found[2])


def test_a_known_vulnerability_fails() -> None:
    """It is named with its other names, and what mends it."""
    with index(lambda name, of: page(of or "0", *([ADVISORY] if name == "click" else []))) as url:
        code, said = audit(url)
    assert code == 1
    assert f"click {CLICK}: PYSEC-1, CVE-1; fixed in 99.1. it is bad\n" in said
    known, everything = looked_up(said)
    assert known == everything > 20
    assert "1 known vulnerabilities" in said


def test_nothing_known_passes() -> None:
    """An advisory that was withdrawn is none."""
    with index(lambda name, of: page(of or "0", ADVISORY | {"withdrawn": "2026-01-01"})) as url:
        code, said = audit(url)
    known, everything = looked_up(said)
    assert (code, known) == (0, everything)
    assert said.startswith("audit: no known vulnerability")


def test_the_newest_versions_page_speaks_for_that_version_alone() -> None:
    """Where an index has no pages of versions: what is installed is looked up only if it is the newest."""

    def newest(name: str, of: str | None) -> object:
        return None if of else page(CLICK if name == "click" else "99999", ADVISORY)

    with index(newest) as url:
        code, said = audit(url)
    assert code == 1
    assert looked_up(said)[0] == said.count("PYSEC-1") < 5  # click, and what happens to have its version
    assert f"click {CLICK}: PYSEC-1" in said
    assert re.search(r"only a newer version can be looked up: .*pytest ", said)


@pytest.mark.parametrize("kind", ["empty", "foreign", "down"])
def test_what_was_not_looked_up_is_not_called_clean(kind: str) -> None:
    """It does not fail, and says that nothing was looked up, and why."""
    reason = {"empty": "not in the index", "foreign": "has no advisories", "down": "cannot be reached"}[kind]
    with index(lambda name, of: None if kind == "empty" else b"<html>") as url:
        code, said = audit(f"http://127.0.0.1:{free_port()}" if kind == "down" else url)
    assert code == 0
    assert "no known" not in said
    assert said.splitlines()[-1].startswith("audit: NOTHING WAS LOOKED UP: none of ")
    assert reason in said
