"""Which host a URL is on."""

from __future__ import annotations

import socket

import pytest

from specproxy.proxy.hosts import host_of, own_names
from specproxy.proxy.load import THIS_MACHINE

OWN = frozenset({"mine", "192.168.1.4", "fe80::1"})


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://127.0.0.1:8080",
        "http://127.0.7.7:8080",
        "http://LOCALHOST:11434/v1",
        "http://[::1]:8080",
        "http://0.0.0.0:8080",
        "http://[::]:8080",
        "http://Mine:8080",
        "http://192.168.1.4",
        "http://[fe80::1]:1",
        "unix:///run/engine.sock",
    ],
)
def test_this_machine(url: str) -> None:
    """Loopback, sockets, addresses that mean any, and the machine's own names."""
    assert host_of(url, OWN) == THIS_MACHINE


def test_others() -> None:
    """Whatever the port and the path: several servers on one host share it."""
    assert host_of("http://GPU.lan:8080", OWN) == host_of("https://gpu.lan/v1", OWN) == "gpu.lan"
    assert host_of("http://192.168.1.5:8080", OWN) == "192.168.1.5"


def test_what_this_machine_is_called() -> None:
    """Its name, its addresses, and what containers call it."""
    own = own_names()
    assert {socket.gethostname().lower(), "127.0.0.1", "host.docker.internal"} <= own
    assert not any("%" in name for name in own)
