"""A real redis-server, empty, on a port of its own."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.ports import free_port

__all__ = ["RunningRedis", "running_redis"]


@dataclass
class RunningRedis:
    """A redis-server that can be stopped and started again; what it holds is lost with it unless it `keeps`.

    With a `password` it answers nobody else; `url` has it.
    """

    directory: str
    port: int
    keeps: bool = True
    password: str = ""
    _child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        who = f":{self.password}@" if self.password else ""
        return f"redis://{who}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start and wait until it listens."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.directory]
        command += ["--appendonly", "yes" if self.keeps else "no", "--appendfsync", "always", "--save", ""]
        if self.password:
            command += ["--requirepass", self.password]
        self._child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 0.5) as sock:
                    sock.sendall(b"PING\r\n")
                    if sock.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                        return
            except OSError:
                time.sleep(0.01)
        raise AssertionError("redis-server did not start")

    def stop(self) -> None:
        """Kill it."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


@contextmanager
def running_redis(directory: str, password: str = "") -> Iterator[RunningRedis]:
    """A server for as long as the block lasts."""
    server = RunningRedis(directory, free_port(), password=password)
    server.start()
    try:
        yield server
    finally:
        server.stop()
