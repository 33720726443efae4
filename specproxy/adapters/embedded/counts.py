"""Token counts, times and log probabilities of a reply, in the forms that clients expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specproxy.adapters.embedded.output import Answer
from specproxy.adapters.embedded.types import Finished, TokenLogprob

__all__ = ["finish_reason", "logprob_entries", "timings", "total", "usage"]


def timings(end: Finished) -> dict[str, Any]:
    """llama-server's `timings` (milliseconds). Draft counts are there only if something was drafted.

    As there, the first predicted token counts as the prompt's, so that a rate covers one token less. Two
    members are ours, where the engine chose itself how to draft: `draft_steps`, steps by drafter and length,
    and `draft_stopped`, why the last ones drafted nothing.
    """
    decoded = end.predicted_n - 1
    body: dict[str, Any] = {
        "cache_n": end.cached_n,
        "prompt_n": end.prompt_n,
        "prompt_ms": end.prompt_ms,
        "prompt_per_token_ms": _ratio(end.prompt_ms, end.prompt_n),
        "prompt_per_second": _ratio(end.prompt_n * 1000, end.prompt_ms),
        "predicted_n": end.predicted_n,
        "predicted_ms": end.predicted_ms,
        "predicted_per_token_ms": _ratio(end.predicted_ms, decoded),
        "predicted_per_second": _ratio(decoded * 1000, end.predicted_ms),
    }
    if end.draft_n:
        body |= {"draft_n": end.draft_n, "draft_n_accepted": end.draft_n_accepted}
    report = end.report
    if report is not None and report.strategy == "auto":
        body["draft_steps"] = dict(report.plans)
        if report.stopped_drafting:
            body["draft_stopped"] = report.stopped_drafting
    return body


def _ratio(a: float, b: float) -> float:
    return a / b if a > 0 and b > 0 else 0.0


def total(ends: Sequence[Finished]) -> Finished:
    """The counts of several replies to one prompt as one: the prompt once, predictions summed."""
    if len(ends) == 1:
        return ends[0]
    first = min(ends, key=lambda end: end.cached_n)  # the one that processed the prompt
    return Finished(
        reason=first.reason,
        prompt_n=first.prompt_n,
        cached_n=first.cached_n,
        prompt_ms=first.prompt_ms,
        predicted_n=sum(end.predicted_n for end in ends),
        predicted_ms=max(end.predicted_ms for end in ends),
        draft_n=sum(end.draft_n for end in ends),
        draft_n_accepted=sum(end.draft_n_accepted for end in ends),
        load_ms=first.load_ms,
    )


def usage(end: Finished) -> dict[str, Any]:
    """OpenAI's `usage`; the prompt counts whole, with what came from the cache named."""
    prompt = end.prompt_n + end.cached_n
    return {
        "completion_tokens": end.predicted_n,
        "prompt_tokens": prompt,
        "total_tokens": prompt + end.predicted_n,
        "prompt_tokens_details": {"cached_tokens": end.cached_n},
    }


def finish_reason(answer_calls: int, end: Finished) -> str:
    """OpenAI's `finish_reason`."""
    if end.reason == "stop":
        return "tool_calls" if answer_calls else "stop"
    return "length"


def logprob_entries(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`, token ids included as llama-server does."""
    return [
        _entry(entry.token, entry.text, entry.logprob) | {"top_logprobs": [_entry(*top) for top in entry.top]}
        for entry in logprobs
    ]


def _entry(token: int, text: bytes, logprob: float) -> dict[str, Any]:
    return {"id": token, "token": text.decode("utf-8", "replace"), "bytes": list(text), "logprob": logprob}


def answers_total(answers: Sequence[Answer]) -> Finished:
    """`total` over whole replies."""
    return total([answer.finished for answer in answers])
