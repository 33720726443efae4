"""The documentation names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specproxy.proxy import admin, metrics
from specproxy.proxy.board import Board
from specproxy.proxy.guard import Guard
from specproxy.proxy.router import UNREAD
from specproxy.records import Health, LaneStatus, Outcome, TempBucket
from specproxy.strategies.classify import KINDS
from specproxy.strategies.rules import HAZARDS
from tests.proxy.samples import observation
from tests.support.proxy import lane

ROOT = Path(__file__).parent.parent
HTTP = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
DECISIONS = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")


def named(text: str) -> set[str]:
    """Everything between backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_metric_is_documented_and_no_other() -> None:
    """As a scrape shows them."""
    board = Board()
    board.observe(observation())
    page = metrics.render(board, [LaneStatus(lane("b"), Health.READY)]).decode()
    there = set(re.findall(r"^# TYPE (\S+)", page, re.M))
    assert {name for name in named(HTTP) if name.startswith("specproxy_")} == there


def test_every_route_of_ours_is_documented_and_no_other() -> None:
    """Those that the admin part answers."""
    routes = admin.Admin(None, Guard())._routes  # type: ignore[arg-type]  # nothing is asked of the view
    there = {f"{verb} {admin.PREFIX}{name}" for name, (verb, _) in routes.items()}
    assert {name for name in named(HTTP) if re.match(r"(GET|POST) /", name)} == there


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_documented(outcome: Outcome) -> None:
    """In the row of the requests' counter."""
    assert re.search(rf"\b{outcome}\b", HTTP)


@pytest.mark.parametrize("name", [*KINDS, UNREAD, *(flag for flag, _ in HAZARDS), *TempBucket])
def test_every_kind_hazard_and_temperature_is_documented(name: str) -> None:
    """By the name that headers and status use."""
    assert name in named(DECISIONS)
