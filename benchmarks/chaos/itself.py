"""Faults of the proxy's surroundings, against `specproxy start` as a process of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.chaos.arena import Tally, patiently
from benchmarks.chaos.client import Seen, ask, judge
from benchmarks.chaos.faults import SHAPES, Ending
from benchmarks.chaos.upstream import ChaosUpstream
from benchmarks.live import get_json
from tests.support.ports import free_port

__all__ = ["PROCESS_FAULTS"]

ProcessFault = Callable[[Path, Tally], Awaitable[None]]
PROCESS_FAULTS: dict[str, ProcessFault] = {}
SHAPE = SHAPES["openai"]
DATABASE = "state.db"


def _fault(function: ProcessFault) -> ProcessFault:
    PROCESS_FAULTS["proxy_" + function.__name__.strip("_")] = function
    return function


@contextmanager
def _process(command: list[str], **given: Any) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command, **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | given)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


@asynccontextmanager
async def _proxy(state: Path, url: str, **given: Any) -> AsyncIterator[tuple[subprocess.Popen[bytes], int]]:
    """A proxy that has its lane, and its port."""
    port = free_port()
    command = [sys.executable, "-m", "specproxy", "start", "--port", str(port), "--upstream", url]
    env = os.environ | {"XDG_CONFIG_HOME": str(state.parent / "config")}
    with _process([*command, "--state-dir", str(state)], env=env, **given) as child:
        for _ in range(1500):
            if child.poll() is not None:
                raise RuntimeError(f"the proxy ended with {child.returncode}")
            try:
                status = await asyncio.to_thread(get_json, f"http://127.0.0.1:{port}/specproxy/api/status")
            except OSError:
                status = {"lanes": []}
            if any(lane["health"] == "ready" for lane in status["lanes"]):
                break
            await asyncio.sleep(0.02)
        yield child, port


async def _one(port: int, fault: str, tally: Tally) -> Seen:
    tally.requests += 1
    try:
        return await patiently(ask(port, SHAPE, f"{fault}|all|x"))
    except TimeoutError:
        tally.hung += 1
    except OSError as error:
        tally.wrong(f"{fault}: {error!r}")
    return Seen(0, b"", False)


async def _well(port: int, tally: Tally, why: str, fault: str = "well") -> None:
    """One request that has to end well."""
    ending, wrong = judge(SHAPE, fault, await _one(port, fault, tally))
    tally.endings[str(ending)] += 1
    if wrong:
        tally.wrong(f"{why}: {wrong}")


async def _counted(port: int, *, begun: bool = False) -> int:
    """Requests that the proxy has counted; with `begun` those too that are in flight."""
    status = await asyncio.to_thread(get_json, f"http://127.0.0.1:{port}/specproxy/api/status")
    return int(status["requests"]["total"]) + (int(status["requests"]["in_flight"]) if begun else 0)


async def _begun(port: int, requests: int) -> None:
    """Wait until so many requests have arrived: a busy machine takes its time."""
    while await _counted(port, begun=True) < requests:  # noqa: ASYNC110 (another process has no event)
        await asyncio.sleep(0.02)


async def _draining(port: int) -> None:
    """Wait until the proxy refuses new requests."""
    while True:
        try:
            await asyncio.to_thread(get_json, f"http://127.0.0.1:{port}/v1/models")
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:
                    return
        await asyncio.sleep(0.02)


async def _kept(state: Path, observations: int) -> None:
    """Wait until so many requests are in the state file."""
    with sqlite3.connect(f"file:{state / DATABASE}?mode=ro", uri=True) as db:
        while db.execute("SELECT count(*) FROM observation").fetchone()[0] < observations:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.02)
    db.close()


@asynccontextmanager
async def _upstream() -> AsyncIterator[str]:
    server = ChaosUpstream("plain")
    await server.open()
    try:
        yield server.server.url
    finally:
        await server.close()


async def _ended(child: subprocess.Popen[bytes], seconds: float = 20.0) -> int | None:
    """The exit code, None if it has not ended in time."""
    try:
        return await asyncio.to_thread(child.wait, seconds)
    except subprocess.TimeoutExpired:
        return None


# --- signals -------------------------------------------------------------------------------------


@_fault
async def _drains_on_sigterm(state: Path, tally: Tally) -> None:
    """Streams that are open end well, new requests are refused, then it exits with 0."""
    async with _upstream() as url, _proxy(state / "s", url) as (child, port):
        streams = [asyncio.create_task(_well(port, tally, "drain", "takes_its_time")) for _ in range(5)]
        await _begun(port, 5)
        child.send_signal(signal.SIGTERM)
        await asyncio.gather(*streams)
        if (code := await _ended(child)) != 0:
            tally.wrong(f"after SIGTERM it ended with {code}")


@_fault
async def _is_told_twice_to_end(state: Path, tally: Tally) -> None:
    """The second SIGTERM cuts the draining short: the stream breaks off, and is not made to look complete."""
    async with _upstream() as url, _proxy(state / "s", url) as (child, port):
        stream = asyncio.create_task(_one(port, "never_goes_on", tally))
        await _begun(port, 1)
        await asyncio.sleep(0.3)
        child.send_signal(signal.SIGTERM)
        await _draining(port)
        child.send_signal(signal.SIGTERM)
        seen = await stream
        tally.endings[str(Ending.CUT)] += 1
        if seen.whole or not seen.status:
            tally.wrong(f"a stream that was cut short looks like {seen}")
        if (code := await _ended(child)) != 0:
            tally.wrong(f"after two SIGTERM it ended with {code}")


@_fault
async def _is_killed(state: Path, tally: Tally) -> None:
    """The state survives SIGKILL with a stream open: sound, and with all that was committed."""
    async with _upstream() as url:
        async with _proxy(state / "s", url) as (child, port):
            for _ in range(10):
                await _well(port, tally, "before SIGKILL")
            stream = asyncio.create_task(_one(port, "never_goes_on", tally))
            await _begun(port, 11)
            await _kept(state / "s", 10)
            child.kill()
            seen = await stream
            if seen.whole:
                tally.wrong("a stream ended well although the proxy was killed")
        with sqlite3.connect(state / "s" / DATABASE) as db:
            if (found := db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
                tally.wrong(f"the state is damaged after SIGKILL: {found}")
        db.close()
        async with _proxy(state / "s", url) as (_, port):
            if (counted := await _counted(port)) != 10:
                tally.wrong(f"after SIGKILL {counted} requests were known, not 10")


@_fault
async def _loses_its_upstream_by_sigkill(state: Path, tally: Tally) -> None:
    """An upstream that is killed while it streams cuts the stream; once it is back, all is well."""
    port_up = free_port()
    command = [sys.executable, "-m", "benchmarks.chaos.upstream", "--port", str(port_up)]
    url = f"http://127.0.0.1:{port_up}"
    with _process(command) as server:
        async with _proxy(state / "s", url) as (_, port):
            await _well(port, tally, "before the upstream is killed")
            streams = [asyncio.create_task(_one(port, "never_goes_on", tally)) for _ in range(4)]
            await _begun(port, 5)
            await asyncio.sleep(0.5)
            server.kill()
            for seen in await asyncio.gather(*streams):
                tally.endings[str(Ending.CUT)] += 1
                if seen.whole or not seen.status:
                    tally.wrong(
                        f"the upstream was killed, and the client got {seen.status}, whole: {seen.whole}"
                    )
            seen = await _one(port, "well", tally)
            tally.endings[str(Ending.ERROR)] += 1
            if seen.status not in (502, 503) or not SHAPE.is_error(seen.content):
                tally.wrong(f"without its upstream the proxy answered {seen.status} {seen.content[:100]!r}")
            with _process(command):
                await _until_listening(port_up)
                await _well(port, tally, "after the upstream has come back")


async def _until_listening(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return


# --- state ---------------------------------------------------------------------------------------


def _small_files() -> None:
    """No file may grow: what a full disk does, without needing one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 * 1024, 48 * 1024))


@contextmanager
def _disk(place: Path, options: str) -> Iterator[bool]:
    """A disk of its own, in memory; gives False where we may not mount one, and then it is a directory."""
    place.mkdir()
    mounted = False
    if os.geteuid() == 0 and shutil.which("mount"):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def _fill(file: Path) -> None:
    """Write until nothing fits on the disk any more."""
    with file.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


@_fault
async def _has_a_full_disk(state: Path, tally: Tally) -> None:
    """Statistics cannot be written; requests do not care, and the state is sound once there is room again."""
    with _disk(state / "disk", "size=1m") as mounted:
        place, filler = state / "disk" / "s", state / "disk" / "filler"
        given = {} if mounted else {"preexec_fn": _small_files}
        async with _upstream() as url, _proxy(place, url, **given) as (child, port):
            if mounted:
                _fill(filler)
            for _ in range(80):
                await _well(port, tally, "full disk")
            if (counted := await _counted(port)) != 80:
                tally.wrong(f"with a full disk {counted} of 80 requests were counted")
            child.send_signal(signal.SIGTERM)
            if (code := await _ended(child)) != 0:
                tally.wrong(f"with a full disk it ended with {code}")
        filler.unlink(missing_ok=True)
        with sqlite3.connect(place / DATABASE) as db:
            if (found := db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
                tally.wrong(f"the state is damaged after a full disk: {found}")
        db.close()
        await _serves(place, tally, "room again")


async def _serves(state: Path, tally: Tally, why: str, **given: Any) -> None:
    async with _upstream() as url, _proxy(state, url, **given) as (child, port):
        for _ in range(3):
            await _well(port, tally, why)
        child.send_signal(signal.SIGTERM)
        if (code := await _ended(child)) != 0:
            tally.wrong(f"{why}: it ended with {code}")


@_fault
async def _cannot_write_its_state_dir(state: Path, tally: Tally) -> None:
    """A read-only disk; where we may not mount one, a directory without the right to write."""
    with _disk(state / "disk", "ro"):
        place = state / "disk"
        if os.access(place, os.W_OK):
            place.chmod(0o500)
        await _serves(place, tally, "read-only state")


@_fault
async def _has_a_file_for_a_state_dir(state: Path, tally: Tally) -> None:
    """What should be a directory is none."""
    place = state / "s"
    place.write_text("no directory")
    await _serves(place, tally, "no state directory")


@_fault
async def _finds_damaged_state(state: Path, tally: Tally) -> None:
    """Random bytes in place of the database: moved aside, a new one begun."""
    place = state / "s"
    place.mkdir()
    (place / DATABASE).write_bytes(os.urandom(40_000))
    await _serves(place, tally, "damaged state")
    if not list(place.glob(f"{DATABASE}.damaged-*")):
        tally.wrong("damaged state was not kept aside")


@_fault
async def _finds_state_cut_short(state: Path, tally: Tally) -> None:
    """A database that lost its second half."""
    place = state / "s"
    await _serves(place, tally, "fresh state")
    whole = (place / DATABASE).read_bytes()
    (place / DATABASE).write_bytes(whole[: len(whole) // 2])
    await _serves(place, tally, "state cut short")


@_fault
async def _finds_state_of_a_newer_version(state: Path, tally: Tally) -> None:
    """It is left as it is, and statistics are kept in memory."""
    place = state / "s"
    place.mkdir()
    with sqlite3.connect(place / DATABASE) as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    before = (place / DATABASE).read_bytes()
    await _serves(place, tally, "newer state")
    if (place / DATABASE).read_bytes() != before:
        tally.wrong("state of a newer version was changed")


@_fault
async def _cannot_write_its_log(state: Path, tally: Tally) -> None:
    """Standard output and error are full."""

    if not os.path.exists("/dev/full"):  # noqa: ASYNC240 (no disk is asked)
        return
    with open("/dev/full", "wb") as out, open("/dev/full", "wb") as err:  # noqa: ASYNC230 (as above)
        await _serves(state / "s", tally, "full log", stdout=out, stderr=err)
