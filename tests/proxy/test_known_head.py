"""Heads that come again on a connection: what is taken from memory is what the parser would have said."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters.tasks import Tasks
from specproxy.proxy.bodies import read_up_to
from specproxy.proxy.client import RelayResponse
from specproxy.proxy.inbound import ClientRequest, RequestBody
from specproxy.proxy.known_head import KnownHead
from specproxy.proxy.server import ClientConnection
from specproxy.proxy.server_limits import ServerLimits
from tests.support.relay import settled

Seen = tuple[str, str, tuple[tuple[bytes, bytes], ...], bytes, str]

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\ncontent-length:%d\r\nA: b\r\n\r\n"
HEADS = (
    CHAT,
    CHAT.replace(b"A: b", b"A: c"),
    b"POST / HTTP/1.1\r\nContent-Length: %d\r\nHost: x\r\nX-Length: 7\r\nX: content-length: 3\r\n\r\n",
    b"FETCH / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
    b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    b"\r\nPOST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
)
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("9.9.9.9", 1) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def served(reads: list[bytes]) -> list[Seen]:
    """What a connection makes of these reads: method, target, headers, body and peer of its requests."""
    seen: list[Seen] = []

    async def handle(request: ClientRequest, response: RelayResponse) -> None:
        assert request.fault is None
        body, _ = await read_up_to(request.body, 1 << 20)
        seen.append((request.method, request.target, request.headers, body, request.peer))
        response.send(200, b"OK", (), b"")

    async def run() -> None:
        connection = ClientConnection(handle, Tasks(), ServerLimits(), set())
        connection.connection_made(Wire())
        for data in reads:
            connection.data_received(data)
            await asyncio.sleep(0)
        await settled(lambda: not connection.busy)
        connection.connection_lost(None)

    asyncio.run(run())
    return seen


def message(head: int, body: bytes) -> bytes:
    if head == len(HEADS):
        return CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    return HEADS[head] % len(body) + body


messages = st.lists(
    st.tuples(st.integers(0, len(HEADS)), st.binary(max_size=12) | st.just(CHAT % 3)), min_size=1, max_size=8
)


@given(messages, st.lists(st.integers(0, 1000), max_size=6))
def test_requests_are_the_same_as_on_connections_of_their_own(
    given_: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    """However the bytes are cut into reads, and whatever came before."""
    parts = [message(*one) for one in given_]
    alone = [seen for part in parts for seen in served([part])]
    whole = b"".join(parts)
    edges = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    assert served(parts) == alone
    if all(head != 3 for head, _ in given_):  # the parser is not told its method, which a cut may come behind
        assert served([whole[a:b] for a, b in itertools.pairwise(edges)]) == alone


def known(head: bytes, *headers: tuple[bytes, bytes], **other: Any) -> KnownHead | None:
    request = ClientRequest("POST", "/", headers, RequestBody(lambda _: None), **other)
    return KnownHead.of(head, request)


LENGTH = (b"Content-Length", b"2")
HEAD = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"a",
        HEAD.replace(b"2", b"-2") + b"ab",
        HEAD.replace(b"2", b"") + b"ab",
        HEAD.replace(b"2", b"2 ") + b"ab",
        HEAD.replace(b"2", b"0000000000000002") + b"ab",
        HEAD.replace(b"POST", b"post") + b"ab",
        HEAD[:-2],
        b"",
    ],
)
def test_anything_else_is_the_parsers(data: bytes) -> None:
    """One byte that differs, a length that is odd, or a body that is not there."""
    head = known(HEAD, LENGTH)
    assert head is not None
    assert head.again(HEAD + b"ab", lambda _: None) is not None
    assert head.again(data, lambda _: None) is None


def test_the_length_is_that_of_the_new_request() -> None:
    """Body, header and property tell the same, and the notes are those of the first."""
    head = known(HEAD, LENGTH)
    assert head is not None
    first, _ = head.again(HEAD + b"ab", lambda _: None) or pytest.fail("not known")
    again, end = head.again(HEAD.replace(b"2", b"11") + b"hello worldGET", lambda _: None) or pytest.fail(
        "not known"
    )
    assert end == len(HEAD) + 1 + 11
    assert (again.body.take(), again.headers, again.length) == (
        b"hello world",
        ((b"Content-Length", b"11"),),
        11,
    )
    assert again.body.complete
    assert again.notes is first.notes


@pytest.mark.parametrize(
    ("head", "headers", "other"),
    [
        (HEAD, (LENGTH,), {"http10": True}),
        (HEAD, (LENGTH,), {"keep_alive": False}),
        (HEAD.replace(b"\r\nC", b"\nC"), (LENGTH,), {}),
        (HEAD.replace(b"2\r\n", b"2\r\n X\r\n"), (LENGTH,), {}),
        (HEAD.replace(b"2\r\n", b"2\r\nTransfer-Encoding: x\r\n"), (LENGTH, (b"Transfer-Encoding", b"x")), {}),
        (HEAD.replace(b"2\r\n", b"2\r\nUpgrade: x\r\n"), (LENGTH, (b"Upgrade", b"x")), {}),
        (HEAD.replace(b"2\r\n", b"2\r\nX: " + b"x" * 9000 + b"\r\n"), (LENGTH, (b"X", b"x" * 9000)), {}),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ((b"Host", b"x"),), {}),
        (HEAD[:-2], (LENGTH,), {}),
    ],
)
def test_odd_heads_are_not_remembered(
    head: bytes, headers: tuple[tuple[bytes, bytes], ...], other: dict[str, Any]
) -> None:
    """Only plain ones with a length are worth it."""
    assert known(head, *headers, **other) is None
