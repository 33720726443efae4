"""The Backend protocol: what an adapter must do, and the small types it does it with.

Response bytes are pushed into a Sink instead of being pulled by an iterator: at hundreds of streams, a task
switch for every event costs more than all the rest of the relay. `ResponseStream` in `adapters.http` turns
the push side into an async iterator for callers that are not on that path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from specproxy.errors import BackendError
from specproxy.records import Lane, LaneStatus, Strategy

__all__ = [
    "Backend",
    "CutsTexts",
    "DraftsNgrams",
    "Exchange",
    "Headers",
    "LoadsLanes",
    "NgramDrafts",
    "ProbeResult",
    "ResponseHead",
    "ServedModel",
    "Sink",
    "TellsDrafts",
    "UpstreamRequest",
]

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request as it goes upstream.

    `target` is the raw request target as the client sent it (``/v1/models?x=%2F``). `headers` are
    end-to-end headers in the client's order and spelling, without Host, Content-Length and
    Transfer-Encoding, which the transport writes. `body` is the whole body, or None if it is written in pieces
    through the exchange; then `length` is its length, or None for a chunked one. `replayable` says that the
    request may be sent again if a kept-alive connection turns out to be dead before the first response byte.
    """

    method: str
    target: str
    headers: Headers
    body: bytes | None = b""
    length: int | None = None
    replayable: bool = False


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status line and headers of a response, as the upstream sent them (all headers, hop-by-hop too)."""

    status: int
    reason: bytes
    headers: Headers
    version: str = "1.1"


class Sink(Protocol):
    """Receives one response. Calls come from the event loop in order: head, data…, then end or fail.

    No method may block or raise. After `end` or `fail` nothing more comes.
    """

    def head(self, head: ResponseHead) -> None:
        """The final response head; interim 1xx responses are not reported."""
        ...

    def data(self, parts: Sequence[bytes]) -> None:
        """Body bytes that arrived in one read, one item a chunk of the upstream's own framing."""
        ...

    def end(self, trailers: Headers) -> None:
        """The response is complete."""
        ...

    def fail(self, error: BackendError) -> None:
        """The exchange broke, before or after the head."""
        ...


class Exchange(Protocol):
    """One request in progress."""

    async def write(self, data: bytes) -> None:
        """Send a piece of a streamed request body; waits while the upstream reads slowly.

        Raises:
            UpstreamClosed: the upstream has gone.
        """
        ...

    async def write_end(self, trailers: Headers = ()) -> None:
        """The request body is complete; trailers can follow only where it is sent in chunks."""
        ...

    def pause(self) -> None:
        """Stop reading the response (back-pressure); idempotent."""
        ...

    def resume(self) -> None:
        """Read on; idempotent."""
        ...

    def abort(self) -> None:
        """Give up: the upstream connection is closed at once, the sink hears nothing more; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server has, as far as it says.

    `path` is of the weights and `draft` of a drafter for them, on the server's machine. `ctx` is in tokens for
    each slot. `drafting` tells whether drafts are made now (None: not known), `unrouted` as a clause why there
    is nothing to choose for this model, `parameters` are the server's own defaults for sampling.

    `group` is the same for models that are one and the same but for how they are decoded, which `strategy` then
    tells; `setup` is all that bears on their speed. `failed` is, as a clause, why it cannot be loaded. `ngram`
    are the lengths of what it looks up and drafts, where it drafts as ``ngram-simple`` and in no other way.
    """

    name: str
    path: str = ""
    draft: str = ""
    digest: str = ""
    loaded: bool = True
    ctx: int | None = None
    slots: int | None = None
    drafting: bool | None = None
    weights: int = 0  # parameters of the model, in numbers
    experts: int = 0
    experts_used: int = 0
    mtp_layers: int = 0
    capabilities: frozenset[str] = frozenset()
    adapted: bool = False
    parameters: tuple[tuple[str, str], ...] = ()
    unrouted: str = ""
    aliases: tuple[str, ...] = ()
    group: str = ""
    strategy: Strategy | None = None
    setup: str = ""
    failed: str = ""
    ngram: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found at a backend.

    `silent` is one that takes connections and does not answer in time, as a server does that is busy with
    another request; `loading` one that answers, but has no model ready yet.
    """

    reachable: bool
    kind: str = "unknown"  # llama-server, llama-router, llama-swap, ollama, lmstudio, vllm, sglang, openai
    version: str = ""
    models: tuple[str, ...] = ()
    detail: dict[str, object] = field(default_factory=dict)
    served: tuple[ServedModel, ...] = ()
    loading: bool = False
    silent: bool = False


@runtime_checkable
class Backend(Protocol):
    """A server or engine that answers requests on one or more lanes."""

    name: str

    async def start(self) -> None:
        """Bring the lanes up as far as this backend owns them; returns once they can be listed.

        A lane that comes up later reports STARTING meanwhile. Cancelling stops what was started.

        Raises:
            ConfigError: it can never work as configured.
        """
        ...

    def lanes(self) -> tuple[LaneStatus, ...]:
        """Lanes as they are now. Never blocks."""
        ...

    async def probe(self) -> ProbeResult:
        """Ask the backend what it is and has; an unreachable backend is a result, not an error."""
        ...

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        """Start an exchange and return at once; connection errors reach ``sink.fail``."""
        ...

    async def aclose(self) -> None:
        """Stop what `start` started, and close connections; idempotent."""
        ...


@runtime_checkable
class TellsDrafts(Protocol):
    """A backend that knows about drafts what its replies do not say."""

    def take_drafts(self, lane_id: str) -> tuple[int, int]:
        """Tokens drafted and accepted by the request that a lane has just answered; (0, 0) where that is not
        known. Never blocks."""
        ...


class CutsTexts(Protocol):
    """Something that knows a model's vocabulary."""

    @property
    def usable(self) -> bool:
        """Whether it is worth asking."""
        ...

    async def cut(self, *texts: str) -> list[list[int]]:
        """Token ids of each text, without those that open or end one.

        Raises:
            BackendError: it cannot be told.
        """
        ...


@dataclass(frozen=True, slots=True)
class NgramDrafts:
    """How a lane drafts, which it does as llama-server's ``ngram-simple``: the length in tokens of what is
    looked up, and of the longest draft. `vocabulary` is the model's, where the lane itself cuts no text into
    tokens.
    """

    size: int
    longest: int
    vocabulary: CutsTexts | None = None


@runtime_checkable
class DraftsNgrams(Protocol):
    """A backend whose n-gram lanes are such that what they would have drafted can be found out afterwards."""

    def ngrams(self, lane: Lane) -> NgramDrafts | None:
        """How a lane drafts; None where it does not do so by n-grams alone, or otherwise than that. Never
        blocks."""
        ...


@runtime_checkable
class LoadsLanes(Protocol):
    """What a backend with lanes under reload control may offer: a load that no request has to wait for."""

    async def load(self, lane: Lane) -> None:
        """Bring a lane into memory, in the place of another; returns when it is there.

        Cancelling stops waiting, not the load.

        Raises:
            BackendError: it could not be loaded; what is in memory now, `lanes` says.
        """
        ...
