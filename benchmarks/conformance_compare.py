"""Two replies side by side: identical, explained by what no two runs have in common, or different."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Reply", "Verdict", "compare", "parse"]

ADDED = re.compile(r"^(x-specproxy-.*|server-timing)$")
"""Headers that the proxy adds, as docs/http.md says."""

HOP_BY_HOP = frozenset({"connection", "keep-alive"})
"""Headers of one connection, which a proxy must not pass on (RFC 9110, 7.6.1)."""

FRAMING = "transfer-encoding"
"""How the body is sent on one connection: the proxy says it for its own, in a place of its own."""

EXPLAINED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^(created|created_at|completed_at|expires_at|date|last-modified)$"), "a time of day"),
    (re.compile(r"(_ms|_duration|_per_second|_per_token|^t_.*)$"), "a measured time"),
    (
        re.compile(r"^(id|(call|item|message|response|request)[_-]id|id_task)$"),
        "a number drawn anew",
    ),
    (re.compile(r"^seed$"), "a seed that the server drew"),
)
"""Fields and headers that differ between any two runs, by name, and why."""

REQUEST_COUNTER = re.compile(r"(chatcmpl|cmpl|resp|req|msg|call|fc|rs|toolu)[-_][A-Za-z0-9]+")
NUMBERS_OF_RUNS = "a number drawn anew"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: a status (0: nothing came), headers in their order, and a body as data or text."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: Any = None
    raw: bytes | None = None


@dataclass(slots=True)
class Verdict:
    """`outcome` is identical, explained or different; `notes` say which places differ and why that is all
    right, or what is wrong."""

    outcome: str = "identical"
    notes: list[str] = field(default_factory=list)

    def explain(self, place: str, why: str) -> None:
        """Note a difference that has its reason."""
        if self.outcome == "identical":
            self.outcome = "explained"
        note = f"{re.sub(r'[0-9]+', '#', place)}: {why}"
        if note not in self.notes and self.outcome == "explained":
            self.notes.append(note)

    def fault(self, note: str) -> None:
        """Note a difference that has none."""
        if self.outcome != "different":
            self.outcome, self.notes = "different", []
        self.notes.append(note)


def compare(direct: Reply, proxied: Reply) -> Verdict:
    """How the reply through the proxy differs from the direct one."""
    verdict = Verdict()
    if not direct.status or not proxied.status:
        verdict.fault(f"no reply: {_short(direct.body)}, {_short(proxied.body)}")
    if direct.status != proxied.status:
        verdict.fault(f"status {direct.status} became {proxied.status}")
    _headers(direct, proxied, verdict)
    if direct.raw is not None and direct.raw == proxied.raw:
        return verdict
    for place, one, other in _differences(direct.body, proxied.body, ""):
        name = place.rpartition(".")[2].partition("[")[0]
        reason = next((why for pattern, why in EXPLAINED if pattern.search(name)), "")
        if reason and type(one) is type(other):
            verdict.explain(place, reason)
        elif isinstance(one, str) and isinstance(other, str) and _same_but_ids(one, other):
            verdict.explain(place, NUMBERS_OF_RUNS)
        elif reason and isinstance(one, int | float) and isinstance(other, int | float):
            verdict.explain(place, reason)
        else:
            verdict.fault(f"{place or 'body'}: {_short(one)} became {_short(other)}")
    if verdict.outcome == "identical" and direct.raw != proxied.raw:
        verdict.fault("the same data in other bytes")
    return verdict


def _headers(direct: Reply, proxied: Reply, verdict: Verdict) -> None:
    theirs, ours = (
        [(n, v) for n, v in reply.headers if n.lower() not in HOP_BY_HOP and not ADDED.match(n.lower())]
        for reply in (direct, proxied)
    )
    if theirs != ours and sorted(theirs, key=_is_framing) == sorted(ours, key=_is_framing):
        verdict.explain("headers", "the framing of a connection is said in another place")
    theirs.sort(key=_is_framing)
    ours.sort(key=_is_framing)
    if [name for name, _ in theirs] != [name for name, _ in ours]:
        verdict.fault(f"headers {[n for n, _ in theirs]} became {[n for n, _ in ours]}")
        return
    for (name, one), (_, other) in zip(theirs, ours, strict=True):
        if one == other:
            continue
        reason = next((why for pattern, why in EXPLAINED if pattern.search(name.lower())), "")
        if name.lower() == "content-length" and direct.body != proxied.body:
            reason = "it follows from the body"
        if reason:
            verdict.explain(f"header {name}", reason)
        else:
            verdict.fault(f"header {name}: {one!r} became {other!r}")


def _is_framing(header: tuple[str, str]) -> bool:
    return header[0].lower() == FRAMING


def _differences(one: Any, other: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Every leaf at which two values differ, with its path."""
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            yield f"{place}{{}}", list(one), list(other)
            return
        for key in one:
            yield from _differences(one[key], other[key], f"{place}.{key}" if place else str(key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from _differences(mine, theirs, f"{place}[{i}]")
    elif type(one) is not type(other) or one != other:
        yield place, one, other


def _same_but_ids(one: str, other: str) -> bool:
    """Whether two texts differ only in identifiers of replies."""
    return REQUEST_COUNTER.sub("#", one) == REQUEST_COUNTER.sub("#", other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}…"


def parse(body: bytes, kind: str) -> Any:
    """A body as data: JSON, the lines of an NDJSON stream, the events of an SSE stream, or text."""
    text = body.decode("utf-8", "replace")
    if "event-stream" in kind:
        return [_event(line) for line in text.split("\n")]
    if "ndjson" in kind:
        return [_json(line) for line in text.split("\n")]
    return _json(text)


def _event(line: str) -> Any:
    name, colon, value = line.partition(": ")
    return {name: _json(value)} if colon else line


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
