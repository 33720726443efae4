"""Greedy requests to one lane of a running proxy, one at a time, and plain's log-probabilities for a text."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specproxy.cli.options import NO_ANSWER, opener
from specproxy.errors import BackendError
from specproxy.strategies.verify import Position

__all__ = ["LaneClient", "Prompt", "Said", "positions_of"]

TIMEOUT_S = 300.0
TOP = 5  # log-probabilities that are asked for at each token
PIN, VERIFY, RAN_ON = "X-Specproxy-Strategy", "X-Specproxy-Verify", "X-Specproxy-Lane"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked: `body` holds the prompt or the messages. `line` is that of its file, 0 without one."""

    path: str
    body: Mapping[str, Any] = field(repr=False)
    line: int = 0


@dataclass(frozen=True, slots=True)
class Said:
    """One answer: its text, and how many tokens it has (0: not told)."""

    text: bytes = field(repr=False)
    tokens: int = 0
    positions: tuple[Position, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class LaneClient:
    """Asks the proxy at `base` for greedy text of at most `max_tokens` tokens."""

    base: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_tokens: int = 96
    timeout_s: float = TIMEOUT_S

    def say(self, lane: str, model: str, prompt: Prompt, *, logprobs: bool = False) -> Said:
        """The lane's answer, without help from a prompt cache; blocks until it is there.

        Raises:
            BackendError: it is refused, cannot be read, or was made on another lane.
        """
        body = {**prompt.body, "model": model, "temperature": 0, "seed": 1, "max_tokens": self.max_tokens}
        body |= {"stream": False, "cache_prompt": False}
        chat = "messages" in prompt.body
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": TOP} if chat else {"logprobs": TOP}
        ran_on, reply = self._post(prompt.path, lane, body)
        if ran_on != lane:
            raise BackendError(f"it ran on {ran_on or 'no lane'} instead")
        try:
            choice = reply["choices"][0]
            text = choice["message"].get("content") or "" if chat else choice["text"]
            tokens = int((reply.get("usage") or {}).get("completion_tokens") or 0)
            return Said(text.encode(), tokens, positions_of(choice.get("logprobs")))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise BackendError("its answer cannot be read") from error

    def _post(self, path: str, lane: str, body: Mapping[str, Any]) -> tuple[str, Any]:
        headers = {"Content-Type": "application/json", PIN: lane, VERIFY: "1", **self.headers}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base}{path}", data, headers)  # noqa: S310 (the user's own URL)
        try:
            with opener().open(request, timeout=self.timeout_s) as reply:
                return reply.headers.get(RAN_ON, ""), json.load(reply)
        except urllib.error.HTTPError as error:
            raise BackendError(f"answered {error.code}: {_message(error)}") from error
        except NO_ANSWER as error:
            raise BackendError(f"gave no answer: {error}") from error


def positions_of(logprobs: Any) -> tuple[Position, ...]:
    """Tokens with their log-probabilities, from either of the two shapes that servers use; empty if neither."""
    try:
        if isinstance(logprobs, dict) and logprobs.get("content"):
            return tuple(
                Position(
                    _bytes(entry),
                    _number(entry["logprob"]),
                    tuple((_bytes(top), _number(top["logprob"])) for top in entry["top_logprobs"]),
                )
                for entry in logprobs["content"]
            )
        if isinstance(logprobs, dict) and logprobs.get("tokens"):
            columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
            return tuple(
                Position(text.encode(), _number(value), tuple((t.encode(), _number(v)) for t, v in top.items()))
                for text, value, top in zip(*columns, strict=True)
            )
    except (LookupError, TypeError, AttributeError, ValueError):
        return ()
    return ()


def _bytes(entry: Mapping[str, Any]) -> bytes:
    given = entry.get("bytes")
    return bytes(given) if given is not None else str(entry["token"]).encode()


def _number(value: Any) -> float:
    return float(value) if value is not None else -math.inf


def _message(error: urllib.error.HTTPError) -> str:
    try:
        detail = json.load(error)["error"]
        return str(detail["message"] if isinstance(detail, dict) else detail)
    except (*NO_ANSWER, LookupError, TypeError):
        return str(error.reason)
