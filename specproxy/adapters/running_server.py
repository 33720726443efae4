"""A server that somebody else runs and whose lanes may displace each other: Ollama, llama-server's router."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specproxy.adapters.ask import post_json
from specproxy.adapters.base import NgramDrafts
from specproxy.adapters.http import HttpBackend
from specproxy.adapters.llama_router import until_loaded
from specproxy.adapters.tokens import Tokenizer
from specproxy.errors import BackendError, LaneUnavailable
from specproxy.records import Lane

__all__ = ["RunningServer"]

LOAD_TIMEOUT_S = 900.0
RUNNING = "model is already running"  # a router's answer for one that is loaded, or being so


class RunningServer(HttpBackend):
    """An `HttpBackend` that can have a lane loaded without a request (`LoadsLanes`).

    `kind` is what was found there, as in `ProbeResult`.
    """

    kind = ""

    _ngrams: Mapping[str, NgramDrafts] = MappingProxyType({})
    _vocabulary: Tokenizer | None = None

    def look_up(self, lengths: Mapping[str, tuple[int, int]], file: Path | None) -> None:
        """Note how models draft by n-grams, by name, and the file that all of them have loaded (None: it is not
        here). The server is not asked to cut texts: it would load the model for that."""
        if file is None or not lengths:
            self._ngrams = {}
            return
        if self._vocabulary is None or self._vocabulary.path != file:
            self._forget()
            self._vocabulary = Tokenizer(file)
        self._ngrams = {name: NgramDrafts(*both, self._vocabulary) for name, both in lengths.items()}

    def ngrams(self, lane: Lane) -> NgramDrafts | None:
        """How a lane drafts by n-grams, where that is known."""
        return self._ngrams.get(lane.upstream_model or lane.target)

    async def aclose(self) -> None:
        await super().aclose()
        self._forget()

    def _forget(self) -> None:
        if self._vocabulary is not None:
            self._vocabulary.kill()

    async def load(self, lane: Lane) -> None:
        """Bring a lane into memory, in the place of another; returns when it is there.

        Cancelling stops waiting, not the load.

        Raises:
            BackendError: it could not be loaded, or the server loads nothing by itself.
        """
        path, body = _how(self.kind, lane)
        status, reply = await post_json(self.transport.open, path, body, timeout_s=LOAD_TIMEOUT_S)
        told = _told(reply)
        if status != 200 and told != RUNNING:
            raise LaneUnavailable(f"{lane.id} could not be loaded: {told or f'status {status}'}")
        self.brought_in(lane)
        if self.kind == "llama-router":  # which answers when the load begins
            try:
                await until_loaded(self.transport, body["model"])
            except BackendError:
                for now in self.lanes():
                    if now.lane.id == lane.id:  # whether it is well, the next look tells
                        self.mark(lane.id, now.health, now.note, resident=False)
                raise


def _told(reply: Any) -> str:
    """What an answer gives as the error; empty where it gives none."""
    error = reply.get("error") if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _how(kind: str, lane: Lane) -> tuple[str, dict[str, Any]]:
    """The request that loads a lane and decodes nothing.

    Raises:
        LaneUnavailable: no such request is known for this kind of server.
    """
    if kind == "llama-router":
        return "/models/load", {"model": lane.upstream_model or lane.target}
    if kind != "ollama":
        raise LaneUnavailable(f"{lane.id} is loaded by requests alone")
    options = {name.rpartition("/")[2]: value for name, value in lane.overrides}
    return "/api/generate", {"model": lane.target, "stream": False, **({"options": options} if options else {})}
