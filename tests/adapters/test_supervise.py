"""Child processes: announced addresses, endings, restarts, and none left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters import tether
from specproxy.adapters.supervise import Backoff, Child, ChildSpec, LogTail, keep
from specproxy.errors import LaneStartError
from tests.support.loops import both_loops

SERVE = "import signal; print('x listening on http://127.0.0.1:81/ now', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SERVE


def python(code: str, name: str = "child") -> ChildSpec:
    """A child that runs `code`."""
    return ChildSpec(name, (sys.executable, "-S", "-c", code))


def gone(pid: int, timeout: float = 5.0) -> bool:
    """Whether a process, which need not be a child of ours, ends in time."""
    try:
        psutil.Process(pid).wait(timeout)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


# --- one child -----------------------------------------------------------------------------------


@both_loops
async def test_a_child_says_where_it_listens() -> None:
    child = await Child.start(python(SERVE))
    assert await child.address() == "http://127.0.0.1:81"
    assert await child.address() == "http://127.0.0.1:81"  # may be asked again
    assert child.returncode is None
    await child.stop()


async def test_unix_sockets_are_addresses_too() -> None:
    child = await Child.start(python("print('listening on unix:///run/x.sock')"))
    assert await child.address() == "unix:///run/x.sock"
    await child.stop()


@both_loops
async def test_an_early_end_is_an_error_with_its_complaint() -> None:
    child = await Child.start(python("import sys; print('all fine'); sys.exit('error: no such model')"))
    with pytest.raises(LaneStartError, match="child ended with exit code 1: error: no such model"):
        await child.address()
    await child.stop()


async def test_a_command_that_does_not_exist_is_an_early_end() -> None:
    child = await Child.start(ChildSpec("ghost", ("/nonexistent/llama-server",)))
    with pytest.raises(LaneStartError, match=r"ghost ended with exit code 127.*No such file"):
        await child.address()
    await child.stop()


async def test_stop_asks_first() -> None:
    child = await Child.start(python(SERVE))
    await child.address()
    await child.stop()
    assert child.returncode == -signal.SIGTERM
    assert child.ending() == "child was killed by SIGTERM"
    await child.stop()  # idempotent


@both_loops
async def test_stop_kills_what_does_not_listen() -> None:
    child = await Child.start(python(STUBBORN))
    await child.address()
    await child.stop(grace_s=0.05)
    assert child.returncode == -signal.SIGKILL


@both_loops
async def test_a_cancelled_stop_kills_at_once() -> None:
    child = await Child.start(python(STUBBORN))
    await child.address()
    stopping = asyncio.ensure_future(child.stop(grace_s=1000))
    await asyncio.sleep(0)
    stopping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stopping
    assert await child.wait() == -signal.SIGKILL
    await child.stop()


@both_loops
async def test_output_is_drained_whatever_its_lines_are_like() -> None:
    code = (
        "import sys; sys.stdout.write('z' * 5_000_000 + chr(10)); sys.stdout.buffer.write(b'\\xff\\n');" + SERVE
    )
    child = await Child.start(python(code))
    assert await child.address() == "http://127.0.0.1:81"
    await child.stop()
    assert len(child.tail.text()) < 200_000


async def test_the_environment_is_ours_plus_the_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_A", "ours")
    code = "import os; print('listening on http://h:1/' + os.environ['SPEC_A'] + os.environ['SPEC_B'])"
    child = await Child.start(ChildSpec("env", (sys.executable, "-c", code), env={"SPEC_B": "theirs"}))
    await child.address()
    await child.wait()
    await child.stop()
    assert "ourstheirs" in child.tail.text()


def test_the_tail_is_bounded_and_the_file_gets_everything(tmp_path: Path) -> None:
    tail = LogTail(lines=3, file=tmp_path / "logs" / "lane.log")
    for i in range(10):
        tail.add(f"line {i}")
    tail.close()
    assert tail.text() == "line 7\nline 8\nline 9"
    assert (tmp_path / "logs" / "lane.log").read_text().splitlines() == [f"line {i}" for i in range(10)]


def test_the_file_is_rotated(tmp_path: Path) -> None:
    """Two files at most, of four megabytes at most."""
    file = tmp_path / "lane.log"
    tail = LogTail(file=file)
    for _ in range(90):
        tail.add("x" * 100_000)
    tail.close()
    kept = sorted(tmp_path.iterdir())
    assert [path.name for path in kept] == ["lane.log", "lane.log.1"]
    assert all(0 < path.stat().st_size <= 4_000_000 for path in kept)


async def test_an_address_may_be_said_in_other_words() -> None:
    """As host and port too; every line of output is heard."""
    lines: list[str] = []
    spec = replace(
        python("print('on http://no:1'); print('Here at 127.0.0.1:81 now')"),
        listening=re.compile(r"Here at (\S+)"),
        on_line=lines.append,
    )
    child = await Child.start(spec)
    assert await child.address() == "http://127.0.0.1:81"
    await child.stop()
    assert lines == ["on http://no:1", "Here at 127.0.0.1:81 now"]


# --- keeping one -------------------------------------------------------------------------------


class Ups:
    """Records the children that came up and the reasons why they went down."""

    def __init__(self) -> None:
        self.children: asyncio.Queue[Child] = asyncio.Queue()
        self.reasons: list[str] = []

    async def up(self, child: Child) -> None:
        await child.address()
        self.children.put_nowait(child)

    async def down(self, reason: str) -> None:
        self.reasons.append(reason)


@both_loops
async def test_a_dead_child_is_replaced() -> None:
    ups = Ups()
    keeping = asyncio.ensure_future(
        keep(python(SERVE), up=ups.up, down=ups.down, backoff=Backoff(first_s=0.01))
    )
    first = await ups.children.get()
    os.kill(first.pid, signal.SIGKILL)
    second = await ups.children.get()
    assert second.pid != first.pid
    assert ups.reasons == ["child was killed by SIGKILL, as the system does when memory runs out"]
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert gone(second.pid)


async def test_a_child_that_never_comes_up_is_given_up_soon() -> None:
    ups = Ups()
    spec = python("import sys; sys.exit('cannot')")
    with pytest.raises(LaneStartError, match=r"cannot.*given up after 2 failures"):
        await keep(spec, up=ups.up, down=ups.down, backoff=Backoff(first_s=0.01))
    assert len(ups.reasons) == 2


async def test_a_child_that_refuses_is_not_tried_again() -> None:
    ups = Ups()
    spec = python("import sys; print('error: no such architecture'); sys.exit(78)")
    with pytest.raises(LaneStartError, match=r"^child: no such architecture$"):
        await keep(spec, up=ups.up, down=ups.down, backoff=Backoff(first_s=0.01))
    assert ups.reasons == ["child: no such architecture"]
    with pytest.raises(LaneStartError, match="given up after 3"):  # it could before: memory may be short now
        await keep(spec, up=ups.up, down=ups.down, backoff=Backoff(first_s=0.01, chances=3, proven=True))


async def test_a_crash_loop_ends() -> None:
    ups = Ups()
    with pytest.raises(LaneStartError, match="given up after 3 failures"):
        await keep(
            python("print('listening on http://h:1')"),
            up=ups.up,
            down=ups.down,
            backoff=Backoff(first_s=0.01, chances=3),
        )
    assert ups.children.qsize() == 3


async def test_a_load_that_hangs_is_a_failure() -> None:
    """It is stopped and holds up nobody; the reason says how long it had."""
    ups = Ups()
    spec = replace(python("import signal; signal.pause()"), up_timeout_s=0.05)
    with pytest.raises(LaneStartError, match=r"child has not come up within 0.05 s \(given up after 2"):
        await keep(spec, up=ups.up, down=ups.down, backoff=Backoff(first_s=0.01))
    assert len(ups.reasons) == 2


async def test_a_failing_check_stops_the_child() -> None:
    pids: list[int] = []

    async def refuse(child: Child) -> None:
        await child.address()
        pids.append(child.pid)
        raise ValueError("not what it says")

    with pytest.raises(ValueError, match="not what it says"):
        await keep(python(SERVE), up=refuse, down=Ups().down, backoff=Backoff())
    assert gone(pids[0])


@both_loops
async def test_children_behind_one_gate_come_up_one_after_another() -> None:
    gate, ups = asyncio.Semaphore(1), Ups()
    coming = most = 0

    async def up(child: Child) -> None:
        nonlocal coming, most
        coming += 1
        most = max(most, coming)
        await ups.up(child)
        coming -= 1

    keepers = [
        asyncio.ensure_future(keep(python(SERVE, f"c{i}"), up=up, down=ups.down, backoff=Backoff(), gate=gate))
        for i in range(3)
    ]
    names = [(await ups.children.get()).spec.name for _ in range(3)]
    assert (most, names) == (1, ["c0", "c1", "c2"])
    for keeper in keepers:
        keeper.cancel()
    await asyncio.gather(*keepers, return_exceptions=True)


# --- back-off ------------------------------------------------------------------------------------


def test_delays_double_up_to_a_bound() -> None:
    backoff = Backoff(first_s=1, longest_s=5, chances=6, proven=True)
    assert [backoff.died(0) for _ in range(6)] == [1, 2, 4, 5, 5, None]


def test_a_long_life_wipes_out_failures() -> None:
    backoff = Backoff(first_s=1, stable_s=60, chances=3, proven=True)
    assert [backoff.died(0), backoff.died(0), backoff.died(61), backoff.died(0)] == [1, 2, 1, 2]


@given(st.lists(st.floats(0, 59), min_size=1, max_size=30), st.integers(1, 8))
def test_short_lives_end_after_exactly_the_chances(lives: list[float], chances: int) -> None:
    backoff = Backoff(chances=chances, proven=True)
    given_up = [backoff.died(life) is None for life in lives]
    assert given_up == [i + 1 >= chances for i in range(len(lives))]


# --- nobody survives us --------------------------------------------------------------------------

OWNER = """
import asyncio, signal, sys
from specproxy.adapters.supervise import Child, ChildSpec
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
async def main():
    child = await Child.start(ChildSpec('c', (sys.executable, '-c', sys.argv[1])))
    await child.address()
    print(child.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_dies_with_its_parent(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.send_signal(how)
        assert gone(pid)
        owner.kill()


PARENT = (
    "import subprocess, sys;"
    "c = subprocess.Popen([sys.executable, '-c', 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print(1, flush=True); signal.pause()'], stdout=subprocess.PIPE); c.stdout.readline();"
    "print(f'listening on http://h:{c.pid}', flush=True);"
)


def family(code: str) -> ChildSpec:
    """A child with a child of its own that ignores SIGTERM, and whose process id is the port."""
    return replace(python(PARENT + code), family=True)


@both_loops
@pytest.mark.parametrize("code", ["c.wait()", "sys.exit(3)"])
async def test_children_of_a_child_end_with_it(code: str) -> None:
    """Whether it is stopped or has ended by itself."""
    child = await Child.start(family(code))
    grandchild = int((await child.address()).rpartition(":")[2])
    if "exit" in code:
        assert await child.wait() == 3
    await child.stop()
    assert gone(grandchild)


async def test_a_killed_member_of_a_family_is_told_as_any_other() -> None:
    child = await Child.start(family("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    await child.wait()
    await child.stop()
    assert child.ending() == "child was killed by SIGKILL, as the system does when memory runs out"


FAMILY_OWNER = """
import asyncio, sys
from dataclasses import replace
from specproxy.adapters.supervise import Child, ChildSpec
async def main():
    child = await Child.start(ChildSpec('c', (sys.executable, '-c', sys.argv[1]), family=True))
    print((await child.address()).rpartition(':')[2], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_children_of_a_child_die_with_us() -> None:
    """Even if we are killed: nobody is left to hold the memory."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY_OWNER, PARENT + "c.wait()"], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        grandchild = int(owner.stdout.readline())
        owner.kill()
        assert gone(grandchild)


WATCHED = "import sys; from specproxy.adapters import tether; sys.exit(tether.run_watched(sys.argv[1:]))"


def watched(code: str) -> subprocess.Popen[str]:
    """A child under the watcher of systems without a parent-death signal."""
    command = [
        sys.executable,
        "-c",
        WATCHED,
        sys.executable,
        "-c",
        "import os; print(os.getpid(), flush=True);" + code,
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_without_a_death_signal_the_end_of_the_pipe_kills() -> None:
    with watched(STUBBORN) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdin is not None
        pid = int(watcher.stdout.readline())
        watcher.stdin.close()  # what the kernel does when the parent dies
        assert gone(pid)
        assert watcher.wait(5) == 128 + signal.SIGKILL


def test_the_watcher_passes_on_sigterm_and_exit_codes() -> None:
    with watched(SERVE) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        watcher.stdout.readline()
        watcher.terminate()
        assert watcher.wait(5) == 128 + signal.SIGTERM
    with watched("import sys; sys.exit(7)") as watcher:
        assert watcher.wait(5) == 7


def test_a_parent_that_is_gone_already_stops_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, tether.__file__, "1", sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    )
    if sys.platform == "linux":
        assert done.returncode == 1
        assert not (tmp_path / "ran").exists()
