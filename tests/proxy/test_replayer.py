"""Replay in the background: what is taught, to which lanes, and what is left out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from specproxy.errors import UpstreamClosed
from specproxy.proxy.replayer import WAITING, Replayer
from specproxy.records import EngineReport, Lane, LaneStatus, Observation, Outcome
from specproxy.strategies.replay import ReplayResult
from tests.proxy.samples import NGRAM, PLAIN, decision, lane_status, observation

REPEATS = EngineReport(
    "r1", "plain", 10, prompt_ids=(1, 2, 3, 4, 5, 6, 7), output_ids=(1, 2, 3, 4, 5, 6, 7, 1, 2, 3)
)


class Pupil:
    """A policy that writes down what it is taught."""

    def __init__(self) -> None:
        self.taught: list[tuple[str, str, ReplayResult]] = []
        self.news = asyncio.Event()

    def learn_replay(self, lane: Lane, observation: Observation, result: ReplayResult) -> None:
        self.taught.append((lane.id, observation.request_id, result))
        self.news.set()


class School:
    """A replayer on two lanes, with reports by request id."""

    def __init__(self, *lanes: Lane) -> None:
        self.pupil = Pupil()
        self.reports: dict[str, EngineReport | Exception] = {}
        self.lanes: tuple[LaneStatus, ...] = tuple(map(lane_status, lanes or (PLAIN, NGRAM)))
        self.replayer = Replayer(self.fetch, lambda: self.lanes, self.pupil)

    async def fetch(self, request_id: str) -> EngineReport | None:
        report = self.reports.pop(request_id, None)
        if isinstance(report, Exception):
            raise report
        return report

    async def lesson(self) -> None:
        """Let the replayer work until something was taught."""
        task = asyncio.ensure_future(self.replayer.run())
        await self.pupil.news.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_on_plain_teaches_the_ngram_lane() -> None:
    """Only the n-gram lane of the same target hears what its drafter would have done."""
    other = replace(NGRAM, id="other", target="another model")
    school = School(PLAIN, NGRAM, other)
    school.reports["r1"] = REPEATS
    school.replayer(observation(PLAIN), decision(PLAIN))
    await school.lesson()
    [(lane, request, result)] = school.pupil.taught
    assert (lane, request, result.tokens) == ("ngram", "r1", 9)
    assert result.accepted >= 5
    assert result.steps < 9


async def test_every_report_is_told_whoever_learns_from_it() -> None:
    """Also one that is too short to be replayed."""
    school, told = School(), []
    replayer = Replayer(school.fetch, lambda: school.lanes, school.pupil, lambda _, report: told.append(report))
    short = EngineReport("r0", "plain", 1, prompt_ids=(1, 2), output_ids=(3,))
    school.reports |= {"r0": short, "r1": REPEATS}
    for request_id in ("r0", "r1"):
        replayer(observation(PLAIN, request_id=request_id), decision(PLAIN))
    task = asyncio.ensure_future(replayer.run())
    await school.pupil.news.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert told == [short, REPEATS]


async def test_a_lost_report_is_passed_over() -> None:
    """Neither a missing report nor an engine that is away stops the next replay."""
    school = School()
    school.reports |= {"gone": UpstreamClosed("gone"), "r2": REPEATS}
    for request_id in ("missing", "gone", "r2"):
        school.replayer(observation(PLAIN, request_id=request_id), decision(PLAIN))
    await school.lesson()
    assert [request for _, request, _ in school.pupil.taught] == ["r2"]


async def test_only_complete_requests_of_the_engine_count() -> None:
    """Aborted ones, those of other backends and those without a lane are not even asked for."""
    school = School()
    school.replayer(observation(PLAIN, outcome=Outcome.CLIENT_GONE), decision(PLAIN))
    school.replayer(observation(PLAIN), decision(replace(PLAIN, id="elsewhere")))
    school.replayer(observation(PLAIN), None)
    school.reports["r9"] = REPEATS
    school.replayer(observation(PLAIN, request_id="r9"), decision(PLAIN))
    await school.lesson()
    assert [request for _, request, _ in school.pupil.taught] == ["r9"]


async def test_a_backlog_is_bounded() -> None:
    """What ends faster than it can be replayed is left out, without waiting."""
    school = School()
    for n in range(WAITING + 5):
        school.reports[str(n)] = REPEATS
        school.replayer(observation(PLAIN, request_id=str(n)), decision(PLAIN))
    task = asyncio.ensure_future(school.replayer.run())
    while len(school.pupil.taught) < WAITING:
        school.pupil.news.clear()
        await school.pupil.news.wait()
    task.cancel()
    assert len(school.reports) == 5
