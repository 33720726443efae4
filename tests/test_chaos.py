"""A short, fixed part of `make chaos`: single faults against the whole proxy, and the judge of endings."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks.chaos import arena as chaos
from benchmarks.chaos.arena import MIXED, Tally, arena, patiently
from benchmarks.chaos.client import CLIENT_FAULTS, Seen, judge
from benchmarks.chaos.faults import FAULTS, SHAPES, Ending
from benchmarks.chaos.itself import PROCESS_FAULTS

OPENAI = SHAPES["openai"]


async def test_faults_lose_nothing_and_leak_nothing(tmp_path: Path) -> None:
    """Every fault of an upstream and of a client, one after the other, on both lanes and in all dialects."""
    tally = Tally()
    async with arena(tmp_path, tally, seed=3) as here:
        for number, fault in enumerate(MIXED):
            shape = list(SHAPES.values())[number % len(SHAPES)]
            await here.upstream_fault(fault, shape, on_drafts=False)
            await here.upstream_fault(fault, shape, on_drafts=True)
        for number, name in enumerate(CLIENT_FAULTS):
            await here.client_fault(name, list(SHAPES.values())[number % len(SHAPES)])
    assert (tally.lost, tally.hung, tally.leaked_tasks, tally.leaked_sockets) == (0, 0, 0, 0)
    assert tally.requests >= 2 * len(MIXED) + len(CLIENT_FAULTS)
    assert {ending for ending, n in tally.endings.items() if n} == {"complete", "error", "cut"}


async def test_a_killed_proxy_keeps_its_state(tmp_path: Path) -> None:
    """SIGKILL with a stream open: the database is sound, and all that was committed is known afterwards."""
    tally = Tally()
    await PROCESS_FAULTS["proxy_is_killed"](tmp_path, tally)
    assert (tally.lost, tally.hung) == (0, 0)


@pytest.mark.parametrize(
    ("fault", "root"),
    [
        ("proxy_has_a_full_disk", True),
        ("proxy_has_a_full_disk", False),
        ("proxy_cannot_write_its_state_dir", True),
        ("proxy_has_a_file_for_a_state_dir", False),
    ],
)
async def test_requests_do_not_need_a_disk(
    fault: str, root: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or read-only one, mounted where we may and imitated where we may not, costs no request."""
    if not root:
        monkeypatch.setattr("benchmarks.chaos.itself.os.geteuid", lambda: 1000)
    tally = Tally()
    await PROCESS_FAULTS[fault](tmp_path, tally)
    assert (tally.lost, tally.hung) == (0, 0)
    assert tally.requests >= 3
    assert not (tmp_path / "disk").is_mount()


def test_there_are_enough_kinds() -> None:
    """At least thirty kinds of faults, by name."""
    assert len(MIXED) + len(CLIENT_FAULTS) + len(PROCESS_FAULTS) >= 60


CONTENT = b"".join(FAULTS["well"](OPENAI).content)
PART = b"".join(FAULTS["closes_in_mid_stream"](OPENAI).content)


@pytest.mark.parametrize(
    ("fault", "seen", "ending"),
    [
        ("well", Seen(200, CONTENT, True), Ending.COMPLETE),
        ("well", Seen(200, CONTENT, False), None),  # cut where nothing was
        ("well", Seen(200, CONTENT + b"x", True), None),  # a byte too many
        ("closes_in_mid_stream", Seen(200, PART, False), Ending.CUT),
        ("closes_in_mid_stream", Seen(200, PART, True), None),  # a fabricated ending
        ("closes_in_mid_stream", Seen(200, PART + OPENAI.last, False), None),  # and one in the text
        ("closes_without_an_answer", Seen(502, b"Bad Gateway", True), None),  # an error in no dialect
        ("closes_without_an_answer", Seen(0, b"", False), None),  # no answer at all
    ],
)
def test_the_judge_sees_what_is_wrong(fault: str, seen: Seen, ending: Ending | None) -> None:
    """Only the permitted endings pass; everything else is named."""
    found, wrong = judge(OPENAI, fault, seen)
    assert (found if not wrong else None) == ending
    assert bool(wrong) == (ending is None)


async def test_what_hangs_is_told_from_what_is_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that never ends is given up; time in which this process could not run does not count."""
    monkeypatch.setattr(chaos, "LIMIT_S", 0.5)
    with pytest.raises(TimeoutError):
        await patiently(asyncio.sleep(60))

    async def kept_waiting() -> str:
        for _ in range(3):
            time.sleep(0.4)  # noqa: ASYNC251 (as if the machine did)
            await asyncio.sleep(0)
        return "ended"

    assert await patiently(kept_waiting()) == "ended"
    with pytest.raises(ZeroDivisionError):
        await patiently(_fails())


async def _fails() -> None:
    raise ZeroDivisionError
