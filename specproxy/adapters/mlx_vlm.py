"""mlx_vlm.server: the setting ``draft_model`` chooses a drafter for all requests, and loads both models anew.

No field of a request chooses one. Settings change at ``/v1/settings`` (mlx-vlm 0.7), and the next question
about the model loads what they say. Drafters are EAGLE-3, DFlash and MTP; a small model of the usual kind is
none.

With a drafter the server refuses a form for the text and a limit for thoughts, answers one request after the
other, and counts drafts in ``timings``: of every request that was there meanwhile, so that counts above a
request's own tokens are not its own.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from specproxy.adapters.ask import get_json, patch_json, post_json
from specproxy.adapters.base import Exchange, ProbeResult, Sink, UpstreamRequest
from specproxy.adapters.deferred import DeferredExchange
from specproxy.adapters.one_draft import OneDraft
from specproxy.adapters.openai_compat import ANSWER_S, Deployed
from specproxy.adapters.tasks import Tasks
from specproxy.adapters.watched import watch
from specproxy.errors import BackendError, LaneUnavailable
from specproxy.records import Control, Dialect, Health, Lane, Strategy

__all__ = ["MlxVlmBackend"]

LOAD_TIMEOUT_S = 900.0
SETTINGS = "/v1/settings"
LOADS = "/v1/messages/count_tokens"  # brings in what the settings say, and decodes nothing
DECODES = frozenset(
    f"{version}/{route}" for version in ("", "/v1") for route in ("chat/completions", "responses", "messages")
)
KINDS = {"dflash": "dflash", "dspark": "dspark", "eagle": "eagle3", "mtp": "mtp", "assistant": "mtp"}
"""What names of drafters have in them, and which kind that is."""

NO_SETTING = f"it has no setting draft_model at {SETTINGS}, as mlx-vlm 0.7 has: start it with --draft-model"


class MlxVlmBackend(OneDraft):
    """The server as it was started, and a lane for each drafter, one of them in memory at a time.

    A request for a lane that is not in memory waits until no other of ours is being answered, since the server
    answers nobody while it loads; those that come later wait behind it. A drafter that could not be loaded is
    taken out of the settings again, and left alone until the server was away.
    """

    kind: ClassVar[str] = "mlx-vlm"
    dialects: ClassVar[frozenset[Dialect]] = frozenset(
        {Dialect.OPENAI_CHAT, Dialect.OPENAI_RESPONSES, Dialect.ANTHROPIC}
    )

    def __init__(self, spec: Deployed) -> None:
        self._drafts: dict[str, str] = {}  # lane → drafter
        super().__init__(spec)
        self._tasks = Tasks()
        self._turn = asyncio.Lock()  # held while lanes change places
        self._changes = 0
        self._answering = 0
        self._quiet = asyncio.Event()  # nothing of ours is being answered
        self._quiet.set()
        self._settable = True
        self._failed: dict[str, str] = {}  # lanes that could not be loaded, with the reason

    def make_lanes(self) -> list[Lane]:
        spec = self.spec
        control = Control.RELOAD if spec.drafts else Control.INSTANCE
        load_s = spec.load_s if spec.drafts else 0.0
        lanes = [self.lane(spec.strategy, control, load_s=load_s, bound=spec.strategy.is_plain)]
        for draft in spec.drafts:
            suffix = self.suffix(draft)
            strategy = Strategy((self._kind_of(draft),))
            lane = self.lane(strategy, control, suffix=suffix, load_s=load_s, draft=draft, bound=False)
            self._drafts[lane.id] = draft
            lanes.append(lane)
        return lanes

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        if not self._drafts or not self.decodes(request):
            return self.transport.open(request, sink)
        begin = partial(watch, partial(self.transport.open, request), sink, self._answered)
        if self._turn.locked() or not self._is_here(lane):
            return DeferredExchange(partial(self._ready, lane), begin, sink, self._tasks)
        self._answers()
        return begin()

    def decodes(self, request: UpstreamRequest) -> bool:
        """Whether what is in memory makes a difference to a request."""
        return request.method == "POST" and request.target in DECODES

    async def load(self, lane: Lane) -> None:
        """Bring a lane into memory, in the place of another; returns when it is there.

        Raises:
            BackendError: it could not be loaded.
        """
        async with self._turn:
            await self._change_to(lane)

    async def aclose(self) -> None:
        await self._tasks.aclose()
        await super().aclose()

    async def check(self) -> ProbeResult:
        """Look at it, and at what it has in memory; not while lanes change places: it may answer nobody."""
        if self._turn.locked():
            return ProbeResult(False, self.kind, silent=True)
        changes = self._changes
        found = await super().check()
        if not found.reachable:
            self._failed.clear()
        elif self._drafts and self.lanes()[0].health is Health.READY:
            self._mark_out()
            with suppress(BackendError):  # the next look tells
                await self._compare(changes)
        return found

    # --- what is in memory ---

    async def _ready(self, lane: Lane) -> None:
        """Have a lane in memory, where it stays at least until the request has begun."""
        async with self._turn:
            await self._change_to(lane)
            self._answers()

    async def _change_to(self, lane: Lane) -> None:
        if self._is_here(lane):
            return
        await self._quiet.wait()
        self._changes += 1
        self.hold(None)
        draft = self._drafts.get(lane.id)
        if self._settable:
            await self._set(draft)
        trouble = await self._bring_in()
        if not trouble:
            self.hold(lane)
        elif draft is not None:  # without one the answer to the request itself will tell
            self._failed[lane.id] = f"it could not be loaded: {trouble}"
            self._mark_out()
            with suppress(BackendError):
                await self._set(None)
            raise LaneUnavailable(f"{lane.id} could not be loaded: {trouble}")

    async def _set(self, draft: str | None) -> None:
        """Change the setting; None brings back what the server was started with."""
        status, reply = await patch_json(
            self.transport.open, SETTINGS, {"draft_model": draft}, timeout_s=LOAD_TIMEOUT_S
        )
        if status != 200 or "draft_model" not in _part(reply, "applied"):
            raise LaneUnavailable(f"{self.name} does not take the setting draft_model (status {status})")

    async def _bring_in(self) -> str:
        """Have the server load what its settings say; returns what went wrong."""
        body = {"model": self._model, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        status, reply = await post_json(self.transport.open, LOADS, body, timeout_s=LOAD_TIMEOUT_S)
        return "" if status == 200 else str(_part(reply, "error").get("message") or f"status {status}")

    async def _compare(self, changes: int) -> None:
        """Bring `resident` up to what the server says, unless lanes have changed places since."""
        status, reply = await get_json(self.transport.open, SETTINGS, timeout_s=ANSWER_S)
        _, health = await get_json(self.transport.open, "/health", timeout_s=ANSWER_S)
        if changes != self._changes:
            return
        current = _part(reply, "current")
        self._settable = status == 200 and "draft_model" in current
        self._mark_out()
        if isinstance(health, dict) and "loaded_model" in health:
            first, *others = [status.lane for status in self.lanes()]
            set_now = current.get("draft_model")
            lane = next((lane for lane in others if self._drafts[lane.id] == set_now), first)
            self.hold(lane if health["loaded_model"] == self._model else None)

    def _mark_out(self) -> None:
        """Take lanes that cannot be had out of use."""
        for lane_id in self._drafts:
            note = self._failed.get(lane_id, "") if self._settable else NO_SETTING
            if note:
                self.mark(lane_id, Health.UNHEALTHY, note)

    # --- parts ---

    @property
    def _model(self) -> str:
        return self.spec.model or self.spec.target

    def _is_here(self, lane: Lane) -> bool:
        return any(status.resident and status.lane.id == lane.id for status in self.lanes())

    def _answers(self) -> None:
        self._answering += 1
        self._quiet.clear()

    def _answered(self, _how: str | None) -> None:
        self._answering -= 1
        if not self._answering:
            self._quiet.set()

    def _kind_of(self, draft: str) -> str:
        """The drafter by its name; a model that is its own drafter has MTP heads."""
        if draft == self._model:
            return "mtp"
        name = draft.lower()
        return next((kind for mark, kind in KINDS.items() if mark in name), "draft")


def _part(reply: Any, name: str) -> dict[str, Any]:
    """An object within a reply; an empty one where there is none."""
    part = reply.get(name) if isinstance(reply, dict) else None
    return part if isinstance(part, dict) else {}
