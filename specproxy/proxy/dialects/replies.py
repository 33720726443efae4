"""Figures in a reply: token counts, times and draft counts, in whichever object the server puts them.

| server | where |
|---|---|
| llama-server | `timings` of the final object or chunk; in a streamed Responses reply beside `response` |
| Ollama's own API | `eval_count`, `eval_duration` and so on in the last object |
| any OpenAI API | `usage`, also within `response` |
| Anthropic's API | `usage`, also within `message`; counts are running totals |
| LM Studio | `*_draft_tokens_count` in `stats` or `usage` |
| vLLM | `metrics.speculative_decoding`; `metrics.generation_time_ms` where it is told to give times |
| SGLang | `sglext.spec_tokens_details` |
| mlx_vlm.server | `timings` of a chat, and of a chat's stream that has usage |

llama-server starts its decode clock when the first token has been sampled, at the end of the prompt, so
`predicted_ms` covers `predicted_n - 1` decode steps' tokens (its own `predicted_per_second` divides by n-1).
Ollama hands the same two numbers on as `eval_duration` and `eval_count`; vLLM's `generation_time_ms` is from
the first token to the last. Observation.time_per_token therefore divides by n-1.

mlx_vlm.server (0.7), which alone tells a `peak_memory`, gives the time of all n tokens at the pace of those
behind the first, so that one is taken off. Its drafts are those of all requests that ran meanwhile: counts
above a reply's own tokens are dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson

from specproxy.proxy.dialects.fields import Json, mapping, number, whole

__all__ = ["Figures", "parse_object", "salvage"]

_NS = 1e-9

# Ollama's `load_duration` is never zero: finding the resident runner takes some of it. From here on it was a
# load.
LOAD_S = 0.25

# What can be dug out of the end of an object whose beginning is gone. Inside a JSON string both quotes of a key
# are escaped, so what looks like a key is one.
_SCALARS = re.compile(
    rb'"(eval_count|eval_duration|prompt_eval_count|prompt_eval_duration|load_duration|done|stop'
    rb'|stop_type)"\s*:\s*(\d+|true|false|"\w*")'
)
_OBJECTS = re.compile(rb'"(timings|usage|stats|metrics|sglext)"\s*:\s*(?=\{)')
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}]', re.DOTALL)


@dataclass(slots=True)
class Figures:
    """What is known so far; times in seconds. `timed` says that the server itself gave the decode time."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_s: float | None = None
    decode_s: float | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    load_s: float = 0.0
    timed: bool = False
    counted: bool = False

    def read(self, payload: Json) -> None:
        """Take in the figures of one object of the reply; later figures replace earlier ones."""
        inner = mapping(payload.get("response")) or mapping(payload.get("message"))
        for usage in (inner.get("usage"), payload.get("usage")):
            if isinstance(usage, dict):
                self._read_usage(usage)
        for owner in (inner, payload):
            if timings := mapping(owner.get("timings")):
                self._read_timings(timings)
        if "eval_count" in payload:
            self._read_ollama(payload)
        self._read_drafts(
            mapping(payload.get("stats")), "total_draft_tokens_count", "accepted_draft_tokens_count"
        )
        metrics = mapping(payload.get("metrics"))
        if (decode_s := _seconds(metrics.get("generation_time_ms"), 1e-3)) is not None and self.counted:
            self.decode_s, self.timed = decode_s, True
            self.prefill_s = _seconds(metrics.get("time_to_first_token_ms"), 1e-3)
        spec = mapping(metrics.get("speculative_decoding"))
        self._read_drafts(spec, "num_draft_tokens", "num_accepted_draft_tokens")
        spec = mapping(mapping(payload.get("sglext")).get("spec_tokens_details"))
        self._read_drafts(spec, "spec_num_proposed_drafts", "spec_num_correct_drafts")

    def _read_timings(self, timings: Json) -> None:
        decoded, by_mlx_vlm = _count(timings.get("predicted_n")), "peak_memory" in timings
        if decoded:
            self.output_tokens = decoded
            self.decode_s = _seconds(timings.get("predicted_ms"), 1e-3)
            self.timed = self.decode_s is not None
            if self.decode_s is not None and by_mlx_vlm:
                self.decode_s *= (decoded - 1) / decoded
        self.cached_tokens = _count(timings.get("cache_n"))
        self.prompt_tokens = _count(timings.get("prompt_n")) + self.cached_tokens
        self.prefill_s = _seconds(timings.get("prompt_ms"), 1e-3)
        if not by_mlx_vlm or _count(timings.get("draft_n_accepted")) <= decoded:
            self._read_drafts(timings, "draft_n", "draft_n_accepted")

    def _read_ollama(self, payload: Json) -> None:
        self.output_tokens = _count(payload.get("eval_count"))
        self.prompt_tokens = _count(payload.get("prompt_eval_count"))
        self.decode_s = _seconds(payload.get("eval_duration"), _NS)
        self.prefill_s = _seconds(payload.get("prompt_eval_duration"), _NS)
        load_s = _seconds(payload.get("load_duration"), _NS) or 0.0
        self.load_s = load_s if load_s >= LOAD_S else 0.0
        self.timed = self.decode_s is not None

    def _read_usage(self, usage: Json) -> None:
        details = mapping(usage.get("prompt_tokens_details")) or mapping(usage.get("input_tokens_details"))
        cached = _count(details.get("cached_tokens")) or _count(usage.get("cache_read_input_tokens"))
        prompt = _count(usage.get("prompt_tokens")) or _count(usage.get("input_tokens"))
        if "cache_read_input_tokens" in usage:  # Anthropic counts cached tokens apart
            prompt += cached + _count(usage.get("cache_creation_input_tokens"))
        output = _count(usage.get("completion_tokens")) or _count(usage.get("output_tokens"))
        self.counted = self.counted or output > 0
        if not self.timed:
            self.output_tokens = output or self.output_tokens
            self.prompt_tokens = prompt or self.prompt_tokens
            self.cached_tokens = cached or self.cached_tokens
        self._read_drafts(usage, "total_draft_tokens_count", "accepted_draft_tokens_count")

    def _read_drafts(self, owner: Json, drafted: str, accepted: str) -> None:
        if count := _count(owner.get(drafted)):
            self.draft_tokens = count
            self.accepted_tokens = min(count, _count(owner.get(accepted)))


def parse_object(data: bytes) -> Json | None:
    """The JSON object in `data`, or None."""
    value = _value(data)
    return value if isinstance(value, dict) else None


def salvage(tail: bytes) -> Json:
    """Figures out of the end of a JSON object that was too long to keep. Of equal keys the last one counts."""
    found: Json = {}
    for scalar in _SCALARS.finditer(tail):
        found[scalar.group(1).decode()] = _value(scalar.group(2))
    last = {match.group(1).decode(): match.end() for match in _OBJECTS.finditer(tail)}
    for name, start in last.items():
        value = parse_object(tail[start : _closing(tail, start)])
        if value is not None:
            found[name] = value
    return found


def _value(text: bytes) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _closing(data: bytes, start: int) -> int:
    """Index just after the brace that closes the one at `start`, or the end of the data."""
    depth = 0
    for match in _STRUCTURE.finditer(data, start):
        depth += {b"{": 1, b"}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.end()
    return len(data)


def _count(value: object) -> int:
    return max(0, whole(value) or 0)


def _seconds(value: object, unit: float) -> float | None:
    amount = number(value)
    return amount * unit if amount is not None and amount > 0 else None
