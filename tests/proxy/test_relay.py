"""One attempt, between an exchange and a client that are both made up."""

from __future__ import annotations

from typing import Any

from specproxy.adapters.base import ResponseHead
from specproxy.proxy.client import RelayResponse
from specproxy.proxy.inbound import ClientRequest, RequestBody
from specproxy.proxy.later import Later
from specproxy.proxy.relay import Attempt
from specproxy.proxy.tap import Tap


class Client:
    """Takes everything."""

    connected = True
    blocked = False

    def __init__(self) -> None:
        self.got = b""

    def write(self, data: bytes) -> None:
        self.got += data

    def invite(self) -> None:
        """Never called: no client here asks."""

    async def drain(self) -> None:
        """Never called: it is never blocked."""


class Heard(Tap):
    """A tap that notes what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.told: list[Any] = []

    def head(self, status: int, headers: Any, now: float) -> None:
        self.told.append(status)

    def feed(self, parts: Any, now: float) -> None:
        self.told += parts


class Never(Later):
    """Has not come to it yet."""

    def add(self, work: Any) -> None:
        pass


def attempt() -> tuple[Attempt, Client, Heard]:
    client, tap = Client(), Heard()
    request = ClientRequest("POST", "/", (), RequestBody(lambda _: None))
    it = Attempt(RelayResponse(request, client), Never(), tap=tap)
    it.head(ResponseHead(200, b"OK", ((b"Content-Length", b"3"),)))
    return it, client, tap


async def test_what_was_passed_on_is_read_later() -> None:
    """In the order in which it came, once."""
    it, client, tap = attempt()
    it.data([b"ab"])
    it.data([b"c"])
    assert (client.got[-3:], tap.told) == (b"abc", [])
    it.read_on()
    it.read_on()
    assert tap.told == [200, b"ab", b"c"]


async def test_what_waits_to_be_read_is_bounded() -> None:
    """A stream that comes fast is read as it comes."""
    it, _, tap = attempt()
    piece = b"x" * 40_000
    it.data([piece])
    assert tap.told == []
    it.data([piece])
    assert tap.told == [200, piece, piece]
