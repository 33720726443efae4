"""The composition root: settings in, a running proxy out.

Start-up order: statistics, then listen (a taken port ends it before any child has started), then backends.
Until a lane is ready requests get an error in their dialect. Shutdown: drain, stop children, save.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import numpy as np
import structlog

from specproxy import __version__
from specproxy.adapters.machine import memory_stalls
from specproxy.adapters.tasks import Tasks
from specproxy.config import Settings
from specproxy.errors import RequestError, StoreError
from specproxy.logs import set_level
from specproxy.proxy.admin import Admin
from specproxy.proxy.app import ProxyServer
from specproxy.proxy.board import Board
from specproxy.proxy.capture import CAPTURE_FILE, Capture
from specproxy.proxy.dialects import dialect_of, read_facts
from specproxy.proxy.engine_memory import EngineMemory
from specproxy.proxy.facts import pressed
from specproxy.proxy.fleet import Fleet
from specproxy.proxy.forward import Limits
from specproxy.proxy.guard import Guard
from specproxy.proxy.handlers import Handlers
from specproxy.proxy.headers import PIN_HEADER
from specproxy.proxy.idle import IdleLoader
from specproxy.proxy.media import MediaShare
from specproxy.proxy.pairs import pairs_json
from specproxy.proxy.profiler import Profiler
from specproxy.proxy.quarantine import Quarantine
from specproxy.proxy.recorder import HeldPolicy, Recorder
from specproxy.proxy.reload import Changes, Reloader, compare
from specproxy.proxy.replayer import ReplayAccount, Replayer
from specproxy.proxy.router import Router
from specproxy.proxy.server_limits import ServerLimits
from specproxy.proxy.status import Believe, board_json, lane_json
from specproxy.proxy.text_replay import TextReplayer
from specproxy.records import Candidate, Decision, Health, Lane, LaneStatus, Situation, TempBucket, Workload
from specproxy.store import Store, StoreWriter, open_store
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.learner import Learner, LearnerSettings
from specproxy.strategies.rules import alone

__all__ = ["Service"]

SAVE_EVERY_S = 5.0
WATCH_EVERY_S = 0.5
MEMORY_EVERY_S = 30.0
RECENT_SHOWN = 20  # latest requests that an open page is told of
STATE_FILE = "state.db"
ENGINE_FILE = "engine/workloads.json"
QUARANTINE = "quarantine"  # name of its state in the store

R = TypeVar("R", bound=Recorder)

log = structlog.get_logger("specproxy")

LANE_NEWS = {Health.READY: log.info, Health.STARTING: log.debug, Health.STOPPED: log.debug}


class Service:
    """One proxy. `start`, then `aclose` even if `start` raised."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.board = Board()
        self.url = ""
        self._started_at = 0.0
        self._is_up = False
        self._tasks = Tasks()
        self._fleet = Fleet(settings)
        learner = settings.learner
        self.policy = Learner(
            LearnerSettings(
                allowance_requests=learner.allowance_requests, allowance_share=learner.allowance_share
            )
        )
        self._looking_rng = np.random.default_rng()  # looking at beliefs draws, and must not disturb decisions
        self._quarantine = Quarantine()
        self._held = HeldPolicy(self.policy, self.policy) if settings.store is not None else None
        policy = self._held or self.policy
        self.router = Router(
            (),
            policy,
            rng=np.random.default_rng(),
            primary=self._fleet.primary,
            quarantine=self._quarantine,
            aliases=settings.model_aliases,
            alone=alone,
        )
        self._replays = ReplayAccount()
        self._replayer = TextReplayer(self.router, policy, self._replays)
        self._profiler = Profiler(
            self.router,
            self.policy,
            at_hand=self._fleet.at_hand,
            replayer=self._replayer,
            on_news=self._learned,
            on_done=self._profiled,
        )
        self._writer: StoreWriter | None = None
        self._recorder: Recorder | None = None
        self._memory: EngineMemory | None = None
        self._server: ProxyServer | None = None
        self._healths: dict[str, Health] = {}
        self._facts: dict[str, LaneFacts] = {}
        self._guard = Guard()
        self._media = MediaShare()
        self.router.on_observation(self._media)
        self._capture = Capture(settings.state_dir / CAPTURE_FILE, 0, 0, self._tasks)
        self._waiting: tuple[str, ...] = ()  # settings that were changed and need a restart

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, load statistics, bring backends up. Returns once lanes can be listed, ready or not.

        Raises:
            ConfigError: it cannot run as configured (port taken, model file unusable, draft that does not fit).
        """
        self._started_at = time.time()
        self._fleet.on_change(self._backends_changed)
        self.router.on_lane_error(self._fleet.lane_failed)
        self.router.on_observation(self._fleet.observed)
        self.router.set_backends(self._fleet.backends, self._fleet.hosts())
        await self._open_store()
        await self._listen()
        await self._fleet.start()
        self._backends_changed()
        if (engine := self._fleet.engine) is not None:
            memory = EngineMemory(self.settings.state_dir / ENGINE_FILE, engine.lanes, self.board.explain_steps)
            await memory.load()
            self._memory = memory
            assert self._server is not None
            self._server.handlers.advise(memory.header)
            pupil = self._held or self.policy
            replayer = Replayer(engine.report, engine.lanes, pupil, memory.learn, self._replays)
            self.router.on_observation(replayer)
            self._tasks.spawn(replayer.run(), name="replay")
        self._tasks.spawn(self._replayer.run(), name="replay texts")
        idle = IdleLoader(self.router, self.policy, on_load=self._loaded)
        self._tasks.spawn(idle.run(), name="loads in idle time")
        self._tasks.spawn(self._profiler.run(), name="profile lanes")
        self._tasks.spawn(self._save_regularly(), name="save statistics")
        self._tasks.spawn(self._watch_lanes(), name="watch lanes")
        self._tasks.spawn(self._watch_memory(), name="watch memory")
        self._is_up = True

    async def aclose(self, force: asyncio.Event | None = None) -> None:
        """Drain requests for up to the grace period (cut short when `force` is set), save, stop everything."""
        if self._server is not None:
            await self._drain(self._server, force)
            await self._server.stop(0.0)
        await self._tasks.aclose()
        await self._fleet.aclose()
        if self._recorder is not None:
            self._recorder.save()
        if self._memory is not None:
            await self._memory.save()
        if self._writer is not None:
            await self._writer.aclose()
        if self._is_up:
            log.info("stopped")

    async def _drain(self, server: ProxyServer, force: asyncio.Event | None) -> None:
        """Let requests in flight end; new ones are answered with 503 meanwhile."""
        done = asyncio.Event()

        async def drain() -> None:
            await server.handlers.drain(self.settings.grace)
            done.set()

        async def give_up(force: asyncio.Event) -> None:
            await force.wait()
            done.set()

        self._tasks.spawn(drain(), name="drain")
        if force is not None:
            self._tasks.spawn(give_up(force), name="wait for a second signal")
        await done.wait()

    def take(self, wanted: Settings) -> Changes:
        """Take changed settings in, as far as that goes without a restart.

        Raises:
            ConfigError: they do not go with what cannot change; nothing has changed then.
        """
        changes = compare(self.settings, wanted)
        self.settings, self._waiting = changes.settings, changes.waiting
        self._apply()
        if "log.level" in changes.applied:
            set_level(self.settings.log.level)
        return changes

    def watch_settings(self, reloader: Reloader) -> None:
        """Let `reloader` run for as long as the service does."""
        self._tasks.spawn(reloader.run(), name="watch settings")

    def _apply(self) -> None:
        """Bring everything that can change at once in line with the settings."""
        settings = self.settings
        token = settings.token.get_secret_value() if settings.token is not None else None
        self._guard.set(token, settings.origins)
        self._capture.requests, self._capture.size = settings.capture.requests, settings.capture.size
        allowed = settings.learner.model_dump()
        self.policy.settings = replace(self.policy.settings, **allowed)
        # what is learned together has to come by way of the store
        self._profiler.budget_s = settings.profile if settings.store is None else 0.0
        if self._server is not None:
            given = settings.limits
            self._server.handlers.set_limits(Limits(given.inspect, given.body, given.requests, given.queue))
            self._server.limits = ServerLimits(given.connections, given.head, given.headers, given.patience)

    async def _listen(self) -> None:
        handlers = Handlers(
            self.router,
            admin=Admin(self, self._guard),
            guard=self._guard.check,
            reader=self._guard.reader,
            replayer=self._replayer,
        )
        handlers.capture(self._capture.offer)
        handlers.on_arrival(self._profiler.arrived)
        self._profiler.forwarding = lambda: handlers.forwarding
        self._server = ProxyServer(handlers)
        self._apply()
        await self._server.start(self.settings.host, self.settings.port)
        host, port = self._server.addresses[0]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _open_store(self) -> None:
        if self.settings.store is not None:
            await self._open_shared_store(self.settings.store.get_secret_value())
            return
        store, note = await asyncio.to_thread(open_store, self.settings.state_dir / STATE_FILE)
        if note:
            log.warning("statistics", note=note)
        await self._record(Recorder, store)
        await self._restore_quarantine()

    async def _open_shared_store(self, url: str) -> None:
        from specproxy.proxy.sharing import SharedRecorder  # only now, since it takes a while to import
        from specproxy.store.redis import RedisStore

        recorder = await self._record(SharedRecorder, RedisStore(url))
        recorder.share(self._quarantine)
        assert self._held is not None
        self._held.pupil = recorder
        self._tasks.spawn(recorder.follow(), name="learn together")

    async def _record(self, kind: type[R], store: Store) -> R:
        """Restore what the store holds, and have every observation recorded from now on."""
        self._writer = StoreWriter(store, on_error=lambda error: log.warning("statistics", error=str(error)))
        recorder = kind(self._writer, self.policy, self.board, take_changes=self.policy.take_events)
        self._recorder = recorder
        await recorder.restore()
        self.router.on_observation(recorder)
        return recorder

    async def _restore_quarantine(self) -> None:
        assert self._writer is not None
        try:
            state = await self._writer.run(lambda store: store.load_policy(QUARANTINE))
            if state is not None:
                self._quarantine.load(state)
        except (StoreError, ValueError) as error:
            log.warning("earlier quarantine cannot be used", error=str(error))

    # --- background ------------------------------------------------------------------------------

    def _backends_changed(self) -> None:
        self.router.set_backends(self._fleet.backends, self._fleet.hosts())
        self._tell_facts()
        self._log_lanes()

    def _tell_facts(self) -> None:
        """Tell the policy what it does not know yet about lanes."""
        lanes, stalls = {status.lane.id: status.lane for status in self.router.lanes()}, memory_stalls()
        for lane_id, known in self._fleet.facts().items():
            facts = pressed(known, lanes[lane_id], stalls) if lane_id in lanes else known
            if self._facts.get(lane_id) != facts:
                self._facts[lane_id] = facts
                self.policy.set_facts(lane_id, facts)

    async def _save_regularly(self) -> None:
        assert self._recorder is not None
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            self._recorder.save()
            if self._memory is not None:
                await self._memory.save()

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_EVERY_S)
            self._tell_facts()

    async def _watch_lanes(self) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            self._log_lanes()

    def _learned(self) -> None:
        if self._recorder is not None:
            self._recorder.learned()

    def _profiled(self, target: str, sentence: str) -> None:
        log.info("lanes measured in idle time", target=target, found=sentence)
        if self._recorder is not None:
            self._recorder.event("profiled", sentence, target)

    def _loaded(self, lane: Lane) -> None:
        log.info("lane loaded in idle time", lane=lane.id)
        if self._recorder is not None:
            self._recorder.event("lane_loaded", "while nothing else was going on", lane.id)

    def _log_lanes(self) -> None:
        """Log and record every change of a lane's health."""
        for status in self.router.lanes():
            lane, health = status.lane, status.health
            if self._healths.get(lane.id) == health:
                continue
            self._healths[lane.id] = health
            LANE_NEWS.get(health, log.warning)(f"lane {health}", lane=lane.id, note=status.note or None)
            if self._recorder is not None and health is not Health.STARTING:
                self._recorder.event(f"lane_{health}", status.note, lane.id)

    # --- what the admin routes look at -----------------------------------------------------------

    def lanes(self) -> Sequence[LaneStatus]:
        """Every lane as it is now."""
        return self.router.lanes()

    def status(self, *, everything: bool = False) -> dict[str, Any]:
        """What `specproxy status` shows; `everything` adds what earlier set-ups have measured."""
        lanes = self.lanes()
        return self._told(lanes, everything, self._believe(lanes))

    def live(self) -> dict[str, Any]:
        """What an open page shows: the status without what is costly to find out, and the latest requests."""
        told = self._told(self.lanes(), False, lambda *_: {})
        del told["workloads"]
        return told | {"recent": self.board.recent(RECENT_SHOWN)}

    def _told(self, lanes: Sequence[LaneStatus], everything: bool, believe: Believe) -> dict[str, Any]:
        since, speeds = self.board.since(), self.board.speeds()
        now = {status.lane.fingerprint for status in lanes}
        board = board_json(self.board, None if everything else now, believe=believe)
        board["requests"]["in_flight"] = self.router.load.in_flight
        rung = self._fleet.rung
        return {
            "version": __version__,
            "listen": self.url,
            "uptime_s": time.time() - self._started_at,
            "policy": {"name": self.policy.name, **self.settings.learner.model_dump()},
            "rung": rung.json() if rung is not None else None,
            "survey": self._fleet.survey,
            "upstreams": [upstream.json() for upstream in self._fleet.upstreams],
            "lanes": [lane_json(s, since, self._fleet.address(s.lane), speeds.get(s.lane.id)) for s in lanes],
            **board,
            "pairs": pairs_json(self.board, lanes, self.settings.draft.name if self.settings.draft else ""),
            "media": self._media.json(),
            "quarantine": self._quarantine.dump()["sentences"],
            "engine": self._memory.json(self.board.rows(frozenset(now))) if self._memory is not None else [],
            "learning_curve": self.policy.curves(),
            "gate": [account._asdict() for account in self.policy.accounts()],
            "replay": self._replays.json(),
            "recoveries": {
                name: [each._asdict() for each in rows] for name, rows in self.policy.recoveries().items()
            },
            "profile": self._profiler.json(),
            "events": [asdict(event) for event in self._recorder.events] if self._recorder else [],
            "restart_needed": list(self._waiting),
        }

    def _believe(self, lanes: Sequence[LaneStatus]) -> Believe:
        """What the policy believes of each lane now, by target and workload, as a function of these."""

        def believe(target: str, key: str) -> Mapping[str, Candidate]:
            ready = tuple(s for s in lanes if s.lane.target == target and s.health is Health.READY)
            if not ready:
                return {}
            kind, _, temperature = key.partition("/")
            situation = Situation(Workload(kind, TempBucket(temperature)), ready, time.time())
            return {c.lane: c for c in self.policy.choose(situation, self._looking_rng).candidates}

        return believe

    def quarantine(self, lane: str, reason: str, fingerprint: str | None = None) -> LaneStatus:
        """Take a lane out of service, and remember it over restarts.

        Raises:
            RequestError: there is no such lane, it has changed, or it is the only plain one of its model.
        """
        found = self._named(lane).lane
        if fingerprint is not None and fingerprint != found.fingerprint:
            raise RequestError(f"lane {lane} is not what it was", status=409, code="lane_changed")
        if found.strategy.is_plain and not any(
            s.lane.strategy.is_plain and s.lane.target == found.target and s.lane.id != lane
            for s in self.lanes()
            if s.health is not Health.QUARANTINED
        ):
            message = f"lane {lane} is the only plain one of {found.target or 'its model'}, so it has to go on"
            raise RequestError(message, status=409, code="only_plain_lane")
        self._quarantine.put(found, reason)
        return self._quarantine_changed(lane)

    def lift(self, lane: str, reason: str) -> LaneStatus:
        """Put a lane back into service.

        Raises:
            RequestError: there is no such lane, or it is not in quarantine.
        """
        if not self._quarantine.lift(self._named(lane).lane):
            raise RequestError(f"lane {lane} is not in quarantine", status=409, code="not_quarantined")
        if self._recorder is not None:
            self._recorder.event("quarantine_lifted", reason, lane)
        return self._quarantine_changed(lane)

    def _quarantine_changed(self, lane: str) -> LaneStatus:
        self._log_lanes()
        if self._writer is not None and self.settings.store is None:  # a shared one asks for it itself
            self._writer.save_policy(QUARANTINE, self._quarantine.dump(), time.time())
        return self._named(lane)

    def _named(self, lane: str) -> LaneStatus:
        lanes = self.lanes()
        found = next((status for status in lanes if status.lane.id == lane), None)
        if found is None:
            names = ", ".join(status.lane.id for status in lanes) or "none"
            raise RequestError(
                f"there is no lane {lane}", status=404, code="no_such_lane", hint=f"lanes: {names}"
            )
        return found

    def explain(self, path: str, headers: Mapping[str, str], body: bytes) -> Decision:
        """Where a request would go, without running it or learning from it.

        Raises:
            RequestError: it would be passed on unread, or pins a strategy that does not exist here.
            LaneUnavailable: no lane could take it.
        """
        dialect = dialect_of("POST", path.partition("?")[0])
        if dialect is None:
            raise RequestError(f"{path} is no route that generates text, so it is passed on as it is")
        facts = read_facts(dialect, body)
        if facts is None:
            raise RequestError("this is no JSON object, so it would be passed on as it is")
        return self.router.preview(facts, pin=headers.get(PIN_HEADER.decode()))
