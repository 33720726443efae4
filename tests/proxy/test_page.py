"""The page without a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from specproxy.proxy.admin import page
from specproxy.proxy.board import Board
from specproxy.records import TempBucket, Workload
from tests.proxy.samples import NGRAM, decision, observation
from tests.test_cli_tables import status

PAGE = page().decode()


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
    assert {
        "speed",
        "curve",
        "share",
        "tpt",
        "accept",
        "complete",
        "lanes",
        "kinds",
        "recent",
        "events",
        "saved",
    } <= looked_up
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE)


def test_the_fields_it_reads_are_in_the_status() -> None:
    """Columns read fields of the API by the names that the API has."""
    data = status(Workload("tool_call", TempBucket.GREEDY))
    board = Board()
    board.observe(observation(NGRAM), decision())
    rows = {
        "LANES": data["lanes"][0],
        "KINDS": data["kinds"][0],
        "TIMES": data["time_to_complete"][0],
        "RECENT": board.recent()[0],
    }
    for name, row in rows.items():
        block = re.search(rf"const {name} = (\[\[.*?\]\]);", PAGE, re.DOTALL)
        assert block is not None
        assert set(re.findall(r"\br\.(\w+)", block[1])) <= set(row), name
