"""Child processes that serve: started, watched, restarted with back-off, and never left behind.

A child announces where it listens by a line of output, so that it can take a free port itself: no port is
chosen beforehand that somebody else might take. Its output is kept as a short tail, for error messages, and
can be written to a rotating file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path

from specproxy.adapters import tether
from specproxy.adapters.tasks import Tasks
from specproxy.errors import LaneStartError

__all__ = ["Backoff", "Child", "ChildSpec", "LogTail", "keep"]

log = logging.getLogger(__name__)

LISTENING = re.compile(r"listening on (https?://\S+:\d+|unix://\S+)")
COMPLAINT = re.compile(r"error|fail|cannot|couldn't|abort|exception|assert| E ", re.IGNORECASE)
STAMP = re.compile(r"^[\d.]+ [A-Z] (?:\S+ +)?")  # how llama-server begins a line of its log
STOP_GRACE_S = 5.0  # from SIGTERM to SIGKILL
REFUSED = 78  # exit code of a child of ours that cannot do what it was started for (EX_CONFIG of sysexits.h)
MAX_LINE = 1 << 16  # bytes of one line of output that are looked at


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `log_file` collects the output of all runs, in two files of at most 4 MB.

    `listening` finds the address in a line of output, as a URL or as host and port; `on_line` hears every line.
    A `family` is a command that starts processes of its own: they end with it, however it ends. `up_timeout_s`
    is how long it may take to be of use, in seconds.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    log_file: Path | None = None
    listening: re.Pattern[str] = LISTENING
    on_line: Callable[[str], None] | None = None
    family: bool = False
    up_timeout_s: float = 1200.0


class LogTail:
    """The last lines of a child's output."""

    def __init__(self, lines: int = 200, file: Path | None = None) -> None:
        self._lines: deque[str] = deque(maxlen=lines)
        self._handler: RotatingFileHandler | None = None
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._handler = RotatingFileHandler(file, maxBytes=4_000_000, backupCount=1, delay=True)

    def add(self, line: str) -> None:
        """Take one line without its newline."""
        self._lines.append(line)
        if self._handler is not None:
            self._handler.emit(logging.LogRecord("child", logging.INFO, "", 0, line, None, None))

    def text(self, lines: int = 200) -> str:
        """The last lines, oldest first."""
        return "\n".join(list(self._lines)[-lines:])

    def complaints(self, lines: int = 2) -> str:
        """What went wrong, from the end of the output, on one line; may be empty.

        The first of the last errors says why, those behind it only what followed from that.
        """
        recent = [STAMP.sub("", line).strip() for line in list(self._lines)[-40:] if COMPLAINT.search(line)]
        return "; ".join(dict.fromkeys(recent[:lines]))

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._handler is not None:
            self._handler.close()


class Child:
    """One run of a command, tied to the life of this process."""

    def __init__(self, spec: ChildSpec, process: Process, tail: LogTail) -> None:
        self.spec = spec
        self.tail = tail
        self.started_at = time.monotonic()
        self._process = process
        self._stopped = False  # by us
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reader = Tasks().spawn(self._read(), name=f"output of {spec.name}")

    @classmethod
    async def start(cls, spec: ChildSpec) -> Child:
        """Start the command in a session of its own, so that Ctrl-C reaches us alone and we stop it in order.

        Raises:
            LaneStartError: the operating system refused.
        """
        options = ["--family"] if spec.family else []
        tied = [sys.executable, "-I", "-S", tether.__file__, *options, str(os.getpid()), *spec.command]
        try:
            process = await asyncio.create_subprocess_exec(
                *tied,
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                env={**os.environ, **spec.env},
                start_new_session=True,
                limit=MAX_LINE,
            )
        except OSError as error:
            raise LaneStartError(f"{spec.name}: cannot start a process: {error.strerror}") from error
        return cls(spec, process, LogTail(file=spec.log_file))

    @property
    def pid(self) -> int:
        """Process id of the command (of its watcher for a family, and where the system has no parent-death
        signal)."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    @property
    def refused(self) -> bool:
        """Whether it has ended because it cannot do what it was started for: the next one could not either."""
        return self.returncode == REFUSED

    async def address(self) -> str:
        """Base URL at which the child listens, once it has said so.

        Raises:
            LaneStartError: it ended before.
        """
        return await asyncio.shield(self._address)

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        return await self._process.wait()

    def ending(self) -> str:
        """How it ended, in words, with its last complaints."""
        code = self.returncode
        if code is None:
            return f"{self.spec.name} is running"
        how = f"ended with exit code {code}"
        if code < 0 or (self.spec.family and code > 128):
            number = -code if code < 0 else code - 128
            how = f"was killed by {_signal_name(number)}"
            if number == signal.SIGKILL and not self._stopped:
                how += ", as the system does when memory runs out"
        complaints = self.tail.complaints()
        if self.refused and complaints:
            return f"{self.spec.name}: {complaints.removeprefix('error: ')}"
        return f"{self.spec.name} {how}" + (f": {complaints}" if complaints else "")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask it to end, and kill it if it has not after `grace_s` seconds; idempotent.

        If the wait is cancelled it is killed at once.
        """
        self._stopped = self._stopped or self.returncode is None
        try:
            if self.returncode is None:
                self._signal(signal.SIGTERM)
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        except TimeoutError:
            log.warning("%s did not end within %g s and is killed", self.spec.name, grace_s)
        finally:
            if self.returncode is None:
                self._kill()
        await self._process.wait()
        await self._reader
        self.tail.close()

    def _kill(self) -> None:
        stdin = self._process.stdin
        if self.spec.family and stdin is not None:
            stdin.close()  # the watcher knows whom to kill
        else:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _read(self) -> None:
        """Keep reading, or the child blocks on a full pipe."""
        stream = self._process.stdout
        assert stream is not None
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # longer than the limit: what was buffered is dropped
                continue
            if not raw:
                break
            line = raw.decode("utf-8", "replace").rstrip()
            self.tail.add(line)
            if not self._address.done() and (found := self.spec.listening.search(line)):
                address = found[1].rstrip("/")
                self._address.set_result(address if "://" in address else f"http://{address}")
            if self.spec.on_line is not None:
                self.spec.on_line(line)
        await self._process.wait()
        if not self._address.done():
            self._address.set_exception(LaneStartError(self.ending()))
            self._address.exception()  # seen: nobody may be waiting for it


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(slots=True)
class Backoff:
    """How long to wait before the next start, and when to give up. Holds no clock.

    A child that was up for `stable_s` seconds counts as sound again. One that has never come up is given fewer
    chances: it will hardly heal.
    """

    first_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 30.0
    stable_s: float = 60.0
    chances: int = 5
    chances_unproven: int = 2
    failures: int = 0
    proven: bool = False

    def came_up(self) -> None:
        """It answered."""
        self.proven = True

    def died(self, up_s: float) -> float | None:
        """It died after `up_s` seconds of being up: seconds to wait, or None to give up."""
        self.failures = 1 if up_s >= self.stable_s else self.failures + 1
        if self.failures >= (self.chances if self.proven else self.chances_unproven):
            return None
        return float(min(self.longest_s, self.first_s * self.factor ** (self.failures - 1)))


async def _come_up(child: Child, up: Callable[[Child], Awaitable[None]]) -> None:
    """Await `up`, but not forever: a load that hangs would hold up every lane behind it.

    Raises:
        LaneStartError: it was not of use in time.
    """
    limit = asyncio.timeout(child.spec.up_timeout_s)
    try:
        async with limit:
            await up(child)
    except TimeoutError as error:
        if not limit.expired():
            raise
        reason = f"{child.spec.name} has not come up within {child.spec.up_timeout_s:g} s"
        raise LaneStartError(reason) from error


async def keep(
    spec: ChildSpec,
    *,
    up: Callable[[Child], Awaitable[None]],
    down: Callable[[str], Awaitable[None]],
    backoff: Backoff,
    gate: AbstractAsyncContextManager[object] | None = None,
) -> None:
    """Keep a child running until cancelled; then it is stopped.

    `up` is awaited with each new child, and returns once it is of use. `down` hears why it no longer is. A
    first child that says that it cannot do what it was started for (exit code `REFUSED`) is tried once. With
    a `gate` (a semaphore, used again for each start), children that share it come up one after another.

    Raises:
        LaneStartError: given up, with the last reason.
        Exception: whatever else `up` raised; the child is stopped.
    """
    while True:
        child: Child | None = None
        up_since: float | None = None
        try:
            async with gate or contextlib.nullcontext():
                child = await Child.start(spec)
                await _come_up(child, up)
            up_since = time.monotonic()
            backoff.came_up()
            await child.wait()
            reason = child.ending()
        except LaneStartError as error:
            reason = error.message
        finally:
            if child is not None:
                await child.stop()
        await down(reason)
        if child is not None and child.refused and not backoff.proven:
            raise LaneStartError(reason)
        delay = backoff.died(time.monotonic() - up_since if up_since is not None else 0.0)
        if delay is None:
            raise LaneStartError(f"{reason} (given up after {backoff.failures} failures in a row)")
        log.warning("%s; next start in %.1f s", reason, delay)
        await asyncio.sleep(delay)
