"""One request of a bench: sent through the proxy, timed here, and looked up among what the proxy measured."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specproxy.cli.lane_client import PIN, RAN_ON, TIMEOUT_S, Prompt
from specproxy.cli.options import NO_ANSWER, opener
from specproxy.errors import BackendError

__all__ = ["BenchClient", "Sample", "body_of"]

REQUEST_ID = "X-Specproxy-Request-Id"
WORKLOAD = "X-Specproxy-Workload"
NOT_KEPT = "X-Specproxy-Capture"
LOOKS, BETWEEN_S = 100, 0.02  # the proxy books a request in the moments after its last byte


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request took: `total_s` by the clock here, the rest as the proxy measured it; None: not told.

    Times in seconds.
    """

    lane: str
    strategy: str
    workload: str
    total_s: float
    tokens: int
    ttft_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    drafted: int = 0
    accepted: int = 0
    repeat: bool = False

    @property
    def per_token_s(self) -> float | None:
        """Decode seconds a token; the first one comes out of the prompt."""
        return self.decode_s / (self.tokens - 1) if self.decode_s and self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class BenchClient:
    """Sends requests to the proxy at `base`, one at a time."""

    base: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = TIMEOUT_S

    def send(self, path: str, body: Mapping[str, Any], pin: str | None) -> Sample:
        """Send a request, to the lane `pin` or wherever the proxy sends it; blocks until the reply is whole.

        Raises:
            BackendError: it was refused, broke off, or ran on another lane.
        """
        headers = {"Content-Type": "application/json", NOT_KEPT: "no", **self.headers}
        headers |= {PIN: pin} if pin else {}
        request = urllib.request.Request(f"{self.base}{path}", json.dumps(body).encode(), headers)  # noqa: S310 (the user's own URL)
        begun = time.perf_counter()
        try:
            with opener().open(request, timeout=self.timeout_s) as reply:
                reply.read()
                told = reply.headers
        except urllib.error.HTTPError as error:
            raise BackendError(f"answered {error.code} {error.reason}") from error
        except NO_ANSWER as error:
            raise BackendError(f"gave no answer: {error}") from error
        total_s = time.perf_counter() - begun
        if pin and told.get(RAN_ON) != pin:
            raise BackendError(f"it ran on {told.get(RAN_ON) or 'no lane'} instead")
        row = self._measured(told.get(REQUEST_ID, ""))
        if row["outcome"] != "complete":
            raise BackendError(f"its answer was {row['outcome']}")
        return Sample(
            row["lane"],
            row["strategy"],
            told.get(WORKLOAD, ""),
            total_s,
            row["output_tokens"],
            row["ttft_s"],
            row["prefill_s"],
            row["decode_s"],
            row["drafted"],
            row["accepted"],
            row["repeat"],
        )

    def explain(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Where the proxy would send a request, and whether it has seen the prompt before.

        Raises:
            BackendError: it would not route it.
        """
        told: dict[str, Any] = self._ask("/specproxy/api/explain", json.dumps(body).encode(), {"X-Path": path})
        return told

    def _measured(self, request_id: str) -> dict[str, Any]:
        for _ in range(LOOKS):
            rows: list[dict[str, Any]] = self._ask("/specproxy/api/recent?limit=20")["recent"]
            for row in rows:
                if row["id"] == request_id:
                    return row
            time.sleep(BETWEEN_S)
        raise BackendError("the proxy has not told what it measured")

    def _ask(self, path: str, body: bytes | None = None, extra: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(f"{self.base}{path}", body, {**self.headers, **(extra or {})})  # noqa: S310 (the user's own URL)
        try:
            with opener().open(request, timeout=self.timeout_s) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise BackendError(f"the proxy answered {error.code} {error.reason}") from error
        except NO_ANSWER as error:
            raise BackendError(f"the proxy gave no answer: {error}") from error


def body_of(prompt: Prompt, model: str, max_tokens: int) -> dict[str, Any]:
    """The request's body: as a stream, without a prompt cache, and with what the prompt leaves open filled in.

    Of OpenAI's two routes these are temperature 0, a fixed seed, `max_tokens`, and counts at the stream's end;
    what was captured of other routes stays as it is, but for the stream.
    """
    if prompt.path not in ("/v1/chat/completions", "/v1/completions"):
        return {"model": model, **prompt.body, "stream": True}
    body = {"temperature": 0, "seed": 1, **prompt.body, "model": model, "stream": True, "cache_prompt": False}
    if not {"max_tokens", "max_completion_tokens", "n_predict"} & body.keys():
        body["max_tokens"] = max_tokens
    return body | {"stream_options": {"include_usage": True}}
