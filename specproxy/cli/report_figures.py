"""What was really served, against plain: each request beside a plain one that is like it.

Nothing is sent twice, so there is no pair of equals. A request on another lane is compared with the plain
request of the same model, kind and temperature that comes nearest in context, load and time: at that one's
time per token, its own tokens would have taken so long. Partners that are as near take turns; requests that
share one stand or fall together in the intervals. What cannot be compared fairly is left out and counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specproxy.cli.bench_figures import gain_json
from specproxy.records import Observation, Outcome
from specproxy.strategies.paired import Pair, gain

__all__ = ["SERVED", "Matched", "match", "report_rows", "why_left_out"]

SERVED = "as served"
DONORS = 2000  # latest plain requests of a workload that are looked at
DAY_S = 86_400.0
REUSE = 0.25  # how much further away a partner counts for each request that it has already

Row = dict[str, Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Matched:
    """A request and its plain partner: itself on plain, None where there is none."""

    seen: Observation
    plain: Observation | None


def why_left_out(seen: Observation) -> str:
    """Why a request can teach nothing about speed; empty if it can."""
    if seen.outcome is not Outcome.COMPLETE:
        return "did not end well"
    if seen.repeat:
        return "repeated an earlier prompt"
    if seen.time_per_token is None or seen.weight <= 0:
        return "had no timings"
    return "loaded a model" if seen.load_s > 0 else ""


def match(observations: Iterable[Observation]) -> tuple[list[Matched], Counter[str]]:
    """Requests with their plain partners, and how many were left out for which reason."""
    left_out: Counter[str] = Counter()
    groups: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for seen in observations:
        if why := why_left_out(seen):
            left_out[why] += 1
        else:
            groups[seen.target, seen.workload.key].append(seen)
    return [one for group in groups.values() for one in _pair_up(group)], left_out


def _pair_up(group: Sequence[Observation]) -> Iterator[Matched]:
    donors = sorted((one for one in group if one.strategy == "plain"), key=lambda one: one.at)[-DONORS:]
    places = np.array([_place(one) for one in donors]).reshape(-1, 3)
    used = np.zeros(len(donors))
    for seen in group:
        if seen.strategy == "plain":
            yield Matched(seen, seen)
        elif not donors:
            yield Matched(seen, None)
        else:
            nearest = int((np.abs(places - _place(seen)).sum(axis=1) + REUSE * used).argmin())
            used[nearest] += 1
            yield Matched(seen, donors[nearest])


def _place(seen: Observation) -> Floats:
    """Where a request stands: a factor of e in context or load counts like a day."""
    context = seen.prompt_tokens + seen.output_tokens / 2
    return np.array([np.log(max(context, 1.0)), np.log(max(seen.concurrency, 1.0)), seen.at / DAY_S])


def report_rows(matched: Sequence[Matched]) -> Row:
    """Rows over all kinds and by kind: of each strategy, and of everything as it was served."""
    kinds = sorted({one.seen.workload.kind for one in matched})
    strategies = sorted({one.seen.strategy for one in matched}, key=lambda name: (name != "plain", name))
    by_kind: list[Row] = []
    for kind in kinds:
        mine = [one for one in matched if one.seen.workload.kind == kind]
        by_kind += [{"kind": kind} | row for row in _arms(mine, strategies)]
    return {"arms": list(_arms(matched, strategies)), "kinds": by_kind}


def _arms(matched: Sequence[Matched], strategies: Sequence[str]) -> Iterator[Row]:
    for strategy in strategies:
        mine = [one for one in matched if one.seen.strategy == strategy]
        if mine:
            yield _row(strategy, "off" if strategy == "plain" else "on", mine, strategy == "plain")
    routed = [one for one in matched if one.seen.rule != "pin"]
    on = sum(one.seen.strategy != "plain" for one in routed)
    yield _row(SERVED, f"on for {on} of {len(routed)}", routed, False)


def _row(arm: str, speculation: str, matched: Sequence[Matched], is_plain: bool) -> Row:
    seen = [one.seen for one in matched]
    decode_s, total_s = sum(one.decode_s or 0.0 for one in seen), sum(one.total_s for one in seen)
    drafted = sum(one.draft_tokens for one in seen)
    first = [one.ttft_s for one in seen if one.ttft_s is not None]
    pairs = [] if is_plain else [pair for one in matched if (pair := _pairs(one)) is not None]
    rng = np.random.default_rng(0)
    return {
        "arm": arm,
        "strategy": "" if arm == SERVED else arm,
        "speculation": speculation,
        "prompts": len(seen),
        "tokens": sum(one.output_tokens for one in seen),
        "tok_s": sum(one.output_tokens - 1 for one in seen) / decode_s if decode_s else None,
        "ttft_ms": sum(first) / len(first) * 1e3 if first else None,
        "total_s": total_s,
        "before_decoding": 1 - decode_s / total_s if total_s else None,
        "acceptance": sum(one.accepted_tokens for one in seen) / drafted if drafted else None,
        "unmatched": sum(one.plain is None for one in matched),
        "decode": gain_json(gain([decode for decode, _ in pairs], rng)),
        "end_to_end": gain_json(gain([total for _, total in pairs], rng)),
    }


def _pairs(one: Matched) -> tuple[Pair, Pair] | None:
    """Decoding, and the whole request with everything before decoding as it was."""
    if one.plain is None or one.plain.time_per_token is None or one.seen.decode_s is None:
        return None
    decode = one.plain.time_per_token * (one.seen.output_tokens - 1)
    before = max(0.0, one.seen.total_s - one.seen.decode_s)
    cluster = one.plain.request_id
    return (
        Pair(decode, one.seen.decode_s, cluster),
        Pair(before + decode, before + one.seen.decode_s, cluster),
    )
