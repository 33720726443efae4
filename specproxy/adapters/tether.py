"""Run a command that cannot outlive its parent, even if the parent is killed with SIGKILL.

    python tether.py [--family] PARENT_PID COMMAND [ARGUMENT...]

Linux: the kernel is asked to kill this process when its parent dies, and the request survives exec, so the
command simply takes this process over. Elsewhere: this process stays, and kills the command when standard
input, a pipe from the parent, ends. With ``--family`` it does so on Linux too, and kills what the command has
started as well, however the command ends: the kernel's request does not reach that. Runs as a plain file with
the standard library alone, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

__all__ = ["exec_tied", "run_watched"]

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def exec_tied(parent: int, command: list[str]) -> None:
    """Become `command`, to be killed when `parent` dies (Linux).

    Raises:
        OSError: the command cannot be executed, or the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 - its purpose


def run_watched(command: list[str], *, family: bool = False) -> int:
    """Run `command` until it ends or standard input does; returns its exit code as a shell would.

    With `family` it leads a process group of its own, of which nobody is left behind.
    """
    group = 0 if family else None
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=group)  # noqa: S603 - its purpose
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())

    def watch() -> None:
        while os.read(0, 4096):
            pass
        if family:
            _kill_group(child.pid)
        child.kill()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    code = child.wait()
    if family:
        _kill_group(child.pid)
    return code if code >= 0 else 128 - code


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def main() -> int:
    """Run the command named by the arguments."""
    family = sys.argv[1] == "--family"
    parent, command = int(sys.argv[1 + family]), sys.argv[2 + family :]
    try:
        if sys.platform == "linux" and not family:
            exec_tied(parent, command)
        return run_watched(command, family=family)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
