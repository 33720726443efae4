"""What a bench has shown: figures of every lane and of adaptive routing, against plain on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from specproxy.cli.bench_client import Sample
from specproxy.cli.bench_run import Result, Round
from specproxy.strategies.paired import Gain, Pair, gain

__all__ = ["arm_row", "decode_pair", "figures", "gain_json", "total_pair"]

Row = dict[str, Any]


def figures(result: Result, arms: Sequence[tuple[str, str]], plain: str) -> Row:
    """Rows for each arm (name, strategy) over all prompts and by kind; `plain` is what they are compared with.

    Prompts that were sent before are in none of them.
    """
    rounds = [one for one in result.rounds if not one.seen_before]
    kinds = sorted({one.kind for one in rounds})
    return {
        "arms": [arm_row(name, strategy, rounds, plain) for name, strategy in arms],
        "kinds": [
            {"kind": kind} | arm_row(name, strategy, [one for one in rounds if one.kind == kind], plain)
            for kind in kinds
            for name, strategy in arms
        ],
    }


def arm_row(name: str, strategy: str, rounds: Sequence[Round], plain: str) -> Row:
    """Figures of one arm; speeds are plain's time over its own, on prompts that both have answered."""
    samples = [one.samples[name] for one in rounds if name in one.samples]
    both = [
        (one.samples[plain], one.samples[name], str(one.line))
        for one in rounds
        if {plain, name} <= one.samples.keys()
    ]
    decode = [pair for base, own, line in both if (pair := decode_pair(base, own, line))]
    total = [total_pair(base, own, line) for base, own, line in both]
    drafted = sum(sample.drafted for sample in samples)
    timed = [sample for sample in samples if sample.per_token_s is not None]
    decode_s = sum(sample.decode_s or 0.0 for sample in timed)
    seconds = sum(sample.total_s for sample in timed)
    return {
        "arm": name,
        "strategy": strategy,
        "speculation": _speculation(strategy, samples),
        "prompts": len(samples),
        "tokens": sum(sample.tokens for sample in samples),
        "tok_s": sum(sample.tokens - 1 for sample in timed) / decode_s if decode_s else None,
        "ttft_ms": _mean_ms([sample.ttft_s for sample in samples]),
        "total_s": sum(sample.total_s for sample in samples),
        "before_decoding": 1 - decode_s / seconds if seconds else None,
        "acceptance": sum(sample.accepted for sample in samples) / drafted if drafted else None,
        "decode": _gain(decode, name == plain),
        "end_to_end": _gain(total, name == plain),
    }


def decode_pair(plain: Sample, own: Sample, cluster: str) -> Pair | None:
    """Decoding the tokens that plain gave, at each one's speed; None where one of the two is not known."""
    base, speed = plain.per_token_s, own.per_token_s
    if base is None or speed is None:
        return None
    return Pair(base * (plain.tokens - 1), speed * (plain.tokens - 1), cluster)


def total_pair(plain: Sample, own: Sample, cluster: str) -> Pair:
    """The whole request. Answers of another length count as if they were as long as plain's."""
    decode = decode_pair(plain, own, cluster)
    if decode is None or plain.tokens == own.tokens or own.decode_s is None:
        return Pair(plain.total_s, own.total_s, cluster)
    return Pair(plain.total_s, own.total_s - own.decode_s + decode.other_s, cluster)


def _gain(pairs: Sequence[Pair], is_plain: bool) -> Row | None:
    """None for plain itself, which is what the others are compared with."""
    return None if is_plain else gain_json(gain(pairs, np.random.default_rng(0)))


def gain_json(found: Gain | None) -> Row | None:
    """As JSON-serialisable data."""
    return None if found is None else asdict(found)


def _speculation(strategy: str, samples: Sequence[Sample]) -> str:
    """``on`` or ``off``; of adaptive routing, how many requests it was on for."""
    if strategy:
        return "off" if strategy == "plain" else "on"
    on = sum(sample.strategy != "plain" for sample in samples)
    return f"on for {on} of {len(samples)}"


def _mean_ms(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) * 1e3 if known else None
