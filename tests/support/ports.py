"""Free ports, and servers that come up on them."""

from __future__ import annotations

import socket
import time
import urllib.request

__all__ = ["free_port", "wait_for"]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(url: str, seconds: float = 30.0) -> None:
    """Wait until a server answers.

    Raises:
        TimeoutError: none does in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.02)
    raise TimeoutError(f"{url} did not come up within {seconds:.0f} s")
