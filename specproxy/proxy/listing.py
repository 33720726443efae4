"""Lists of models out of several servers: their entries one after another, none made up, none twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from specproxy.adapters.base import Backend, Headers, UpstreamRequest
from specproxy.adapters.http import fetch
from specproxy.errors import BackendError
from specproxy.records import Health, Lane

__all__ = ["LISTS", "askable", "merged_list"]

LISTS = {"/v1/models": "id", "/models": "id", "/api/tags": "name"}
"""Routes that list models, and by what their entries are told apart."""

ARRAYS = ("data", "models")
ANSWER_S = 5.0


def askable(backends: Sequence[Backend]) -> list[tuple[Backend, Lane]]:
    """Backends that have models which none before them has, each with a lane to ask it through."""
    found: list[tuple[Backend, Lane]] = []
    known: set[str] = set()
    for backend in backends:
        statuses = backend.lanes()
        targets = {name for s in statuses for name in (s.lane.models or {s.lane.target})}
        ready = next((s.lane for s in statuses if s.health is Health.READY), None)
        if ready is not None and not targets <= known:
            found.append((backend, ready))
            known |= targets
    return found


async def merged_list(
    asked: Sequence[tuple[Backend, Lane]], path: str, target: str, headers: Headers
) -> bytes | None:
    """The entries of all servers that answer, within what the first one says around them.

    None where fewer than two have a list: then there is nothing to merge.
    """
    replies = await asyncio.gather(*(_ask(backend, lane, target, headers) for backend, lane in asked))
    lists = [reply for reply in replies if reply is not None and any(key in reply for key in ARRAYS)]
    if len(lists) < 2:
        return None
    whole = dict(lists[0])
    for key in ARRAYS:
        if key in whole:
            whole[key] = _distinct(lists, key, LISTS[path])
    return orjson.dumps(whole)


async def _ask(backend: Backend, lane: Lane, target: str, headers: Headers) -> dict[str, Any] | None:
    request = UpstreamRequest("GET", target, headers, replayable=True)
    try:
        reply = await fetch(lambda req, sink: backend.open(req, lane, sink), request, timeout_s=ANSWER_S)
        body = orjson.loads(reply.body) if reply.head.status == 200 else None
    except (BackendError, orjson.JSONDecodeError):
        return None
    return body if isinstance(body, dict) else None


def _distinct(lists: Sequence[dict[str, Any]], key: str, name: str) -> list[Any]:
    """Entries of all lists, the first one of each name."""
    found: dict[str, Any] = {}
    for one in lists:
        entries = one.get(key)
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                found.setdefault(str(entry.get(name) or entry.get("model")), entry)
    return list(found.values())
