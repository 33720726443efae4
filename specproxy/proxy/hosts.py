"""Which host a server runs on, as far as its URL says: lanes share the cores of their host, and of no other."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import psutil

from specproxy.config import is_loopback
from specproxy.proxy.load import THIS_MACHINE

__all__ = ["host_of", "own_names"]

FROM_CONTAINERS = ("host.docker.internal", "host.containers.internal")  # the machine that a container runs on


def own_names() -> frozenset[str]:
    """Names and addresses of this machine beside the loopback ones."""
    addresses = (each.address for found in psutil.net_if_addrs().values() for each in found)
    plain = (address.partition("%")[0].lower() for address in addresses)  # without the scope of IPv6
    return frozenset({socket.gethostname().lower(), *FROM_CONTAINERS, *plain})


def host_of(url: str, own: frozenset[str]) -> str:
    """The host of a base URL, `THIS_MACHINE` for loopback, sockets, and the `own` names and addresses.

    Names are not looked up, so two names of one host count as two.
    """
    host = (urlsplit(url).hostname or "").lower()
    if not host or host == "0.0.0.0" or host == "::" or is_loopback(host) or host in own:  # noqa: S104  # compared
        return THIS_MACHINE
    return host
