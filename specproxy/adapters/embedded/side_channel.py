"""The wire form of what learner and engine tell each other about a request.

Priors go in with the request as one header, a report is fetched by request id after the end; both are compact
JSON objects with a version `v`. Readers skip members that they don't know, and take what they know from newer
versions, so that proxy and engine may differ by a release. Numbers are read leniently, shapes strictly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import orjson

from specproxy.records import SIDE_CHANNEL_VERSION, DrafterReport, EnginePriors, EngineReport

__all__ = [
    "PRIORS_HEADER",
    "PULSE_PATH",
    "REPORTS_PATH",
    "REQUEST_ID_HEADER",
    "STRATEGY_HEADER",
    "decode_priors",
    "decode_report",
    "encode_priors",
    "encode_report",
]

STRATEGY_HEADER = "X-Specproxy-Engine-Strategy"
PRIORS_HEADER = "X-Specproxy-Priors"
REQUEST_ID_HEADER = "X-Specproxy-Request-Id"
REPORTS_PATH = "/specproxy-engine/reports/"
PULSE_PATH = "/specproxy-engine/pulse"

N = TypeVar("N", int, float)


def encode_priors(priors: EnginePriors) -> bytes:
    """Priors as a header value (ASCII, no line breaks)."""
    data = {
        "v": priors.version,
        "id": _ascii(priors.request_id),
        "workload": _ascii(priors.workload),
        "acceptance": {_ascii(name): pairs for name, pairs in priors.acceptance.items()},
        "match": priors.match_acceptance,
        "levels": {_ascii(name): counts for name, counts in priors.levels.items()},
        "steps": priors.steps,
        "last_used": {_ascii(name): steps for name, steps in priors.last_used.items()},
    }
    return orjson.dumps(data)


def decode_priors(data: bytes) -> EnginePriors:
    """Read what `encode_priors` wrote, or a newer version's.

    Raises:
        ValueError: it is not an object of that form.
    """
    fields = _object(data)
    acceptance, levels, last_used = (fields.get(name, {}) for name in ("acceptance", "levels", "last_used"))
    if not all(isinstance(each, dict) for each in (acceptance, levels, last_used)):
        raise ValueError("'acceptance', 'levels' or 'last_used' is not an object")
    return EnginePriors(
        request_id=_text(fields, "id"),
        workload=_text(fields, "workload"),
        acceptance={name: _pairs(pairs, float) for name, pairs in acceptance.items()},
        match_acceptance=_pairs(fields.get("match", ()), float),
        levels={name: _weights(counts) for name, counts in levels.items()},
        steps=_number(fields.get("steps", 0.0), float),
        last_used={name: _number(steps, float) for name, steps in last_used.items()},
        version=_version(fields),
    )


def encode_report(report: EngineReport) -> bytes:
    """A report as a JSON document."""
    data = {
        "v": report.version,
        "id": report.request_id,
        "strategy": report.strategy,
        "steps": report.steps,
        "drafters": [
            {
                "name": d.drafter,
                "steps": d.steps,
                "drafted": d.drafted,
                "accepted": d.accepted,
                "by_position": d.by_position,
                "by_match": d.by_match,
                "draft_s": d.draft_s,
                "levels": d.levels,
            }
            for d in report.drafters
        ],
        "widths": {str(width): pair for width, pair in report.widths.items()},
        "prompt_ids": report.prompt_ids,
        "output_ids": report.output_ids,
        "stopped_drafting": report.stopped_drafting,
        "plans": dict(report.plans),
    }
    return orjson.dumps(data)


def decode_report(data: bytes) -> EngineReport:
    """Read what `encode_report` wrote, or a newer version's.

    Raises:
        ValueError: it is not an object of that form.
    """
    fields = _object(data)
    widths = fields.get("widths", {})
    drafters, plans = fields.get("drafters", []), fields.get("plans", {})
    if not isinstance(widths, dict) or not isinstance(drafters, list) or not isinstance(plans, dict):
        raise ValueError("'widths', 'drafters' or 'plans' is of the wrong type")
    return EngineReport(
        request_id=_text(fields, "id"),
        strategy=_text(fields, "strategy"),
        steps=_number(fields.get("steps", 0), int),
        drafters=tuple(_drafter(entry) for entry in drafters),
        widths={int(width): _step_cost(pair) for width, pair in widths.items()},
        prompt_ids=_ids(fields.get("prompt_ids", ())),
        output_ids=_ids(fields.get("output_ids", ())),
        stopped_drafting=_text(fields, "stopped_drafting"),
        plans=tuple((label, _number(steps, int)) for label, steps in plans.items()),
        version=_version(fields),
    )


def _drafter(entry: object) -> DrafterReport:
    if not isinstance(entry, dict):
        raise ValueError("a drafter is not an object")
    return DrafterReport(
        drafter=_text(entry, "name"),
        steps=_number(entry.get("steps", 0), int),
        drafted=_number(entry.get("drafted", 0), int),
        accepted=_number(entry.get("accepted", 0), int),
        by_position=_pairs(entry.get("by_position", ()), int),
        by_match=_pairs(entry.get("by_match", ()), int),
        draft_s=_number(entry.get("draft_s", 0.0), float),
        levels=_weights(entry.get("levels", ())),
    )


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def _object(data: bytes) -> dict[str, Any]:
    value = orjson.loads(data)  # its error is a ValueError
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _version(fields: Mapping[str, Any]) -> int:
    return _number(fields.get("v", SIDE_CHANNEL_VERSION), int)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"'{name}' is not a string")
    return value


def _number(value: object, kind: type[N]) -> N:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return kind(value)


def _list(value: object) -> Iterable[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError("not an array")
    return value


def _pairs(value: object, kind: type[N]) -> tuple[tuple[N, N], ...]:
    # a pair may have grown further members in a newer version
    return tuple(
        (_number(first, kind), _number(second, kind)) for first, second, *_ in map(_list, _list(value))
    )


def _weights(value: object) -> tuple[float, ...]:
    return tuple(_number(weight, float) for weight in _list(value))


def _step_cost(value: object) -> tuple[int, float]:
    steps, seconds, *_ = _list(value)
    return _number(steps, int), _number(seconds, float)


def _ids(value: object) -> tuple[int, ...]:
    return tuple(_number(token, int) for token in _list(value))
