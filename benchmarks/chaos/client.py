"""The client's side: replies are held against what was sent, and there are clients that fail themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.chaos.faults import FAULTS, Ending, Shape
from tests.support.client import RawClient, RawReply

__all__ = ["CLIENT_FAULTS", "Seen", "ask", "head_of", "judge", "until_gone"]


@dataclass(frozen=True)
class Seen:
    """What a client got: `whole` says that the reply was framed to its end."""

    status: int
    content: bytes
    whole: bool
    head: bytes = b""


def head_of(shape: Shape, length: int, *headers: str) -> bytes:
    """The head of a request."""
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"POST {shape.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}Content-Length: {length}\r\n\r\n".encode()


async def ask(port: int, shape: Shape, tag: str, *headers: str) -> Seen:
    """Send one request on a connection of its own, and read until the reply's end or the connection's."""
    body = shape.body(tag)
    async with await RawClient.connect(port, limit=1 << 20) as client:
        await client.send(head_of(shape, len(body), *headers) + body)
        return await read(client)


async def read(client: RawClient) -> Seen:
    """Read one reply as far as it goes."""
    try:
        reply = await client.head()
    except (ConnectionError, asyncio.IncompleteReadError):
        return Seen(0, b"", False)
    content, whole = await _content(client, reply)
    return Seen(reply.status, content, whole, reply.head)


async def _content(client: RawClient, reply: RawReply) -> tuple[bytes, bool]:
    """The body without its framing, and whether it came to its end."""
    parts: list[bytes] = []
    reader = client.reader
    try:
        if reply.values(b"transfer-encoding") != [b"chunked"]:
            left = int(reply.values(b"content-length")[0])
            while left:
                part = await reader.read(left)
                if not part:
                    return b"".join(parts), False
                parts.append(part)
                left -= len(part)
            return b"".join(parts), True
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
    except asyncio.IncompleteReadError as error:
        return b"".join(parts) + error.partial, False
    except ConnectionError:
        return b"".join(parts), False
    return b"".join(parts), True


def judge(shape: Shape, fault: str, seen: Seen, *, rescued: bool = False) -> tuple[Ending | None, str]:
    """How a request ended, and what is wrong with that ("" if nothing).

    `rescued`: another server has answered well in the place of one that could not.
    """
    answer = FAULTS["well" if rescued else fault](shape)
    expected = b"".join(answer.content) + answer.partial
    ending: Ending | None = None
    if seen.whole and seen.content == expected and answer.framing != "raw":
        ending = Ending.COMPLETE
    elif seen.whole and seen.status in (502, 503) and shape.is_error(seen.content):
        ending = Ending.ERROR
    elif seen.status and not seen.whole and expected.startswith(seen.content):
        ending = Ending.CUT
    if ending in answer.may:
        return ending, ""
    what = f"status {seen.status}, {len(seen.content)} of {len(expected)} bytes, whole: {seen.whole}"
    return ending, f"ended as {ending}, not as {'/'.join(sorted(answer.may))}: {what}: {seen.content[:120]!r}"


# --- clients that fail ---------------------------------------------------------------------------

ClientFault = Callable[[int, Shape, str], Awaitable[str]]
CLIENT_FAULTS: dict[str, tuple[ClientFault, int, int]] = {}
"""By name: what the client does, which says what was wrong, and the fewest and most requests that count."""


def _client(fewest: int, most: int) -> Callable[[ClientFault], ClientFault]:
    def note(function: ClientFault) -> ClientFault:
        CLIENT_FAULTS["client_" + function.__name__.strip("_")] = function, fewest, most
        return function

    return note


def _request(shape: Shape, fault: str, key: str, *headers: str) -> bytes:
    body = shape.body(f"{fault}|all|{key}")
    return head_of(shape, len(body), *headers) + body


async def until_gone(client: RawClient) -> str:
    """Wait until the proxy closes a connection; what came before is returned as text."""
    try:
        return (await client.rest()).decode("latin-1")
    except ConnectionError:
        return ""


@_client(0, 0)
async def _leaves_within_its_head(port: int, shape: Shape, key: str) -> str:
    async with await RawClient.connect(port) as client:
        await client.send(_request(shape, "well", key)[:40])
    return ""


@_client(0, 1)
async def _leaves_within_its_body(port: int, shape: Shape, key: str) -> str:
    async with await RawClient.connect(port) as client:
        await client.send(_request(shape, "well", key)[:-20])
    return ""


@_client(0, 1)
async def _leaves_at_once(port: int, shape: Shape, key: str) -> str:
    async with await RawClient.connect(port) as client:
        await client.send(_request(shape, "never_answers", key))
    return ""


@_client(1, 1)
async def _leaves_before_the_answer(port: int, shape: Shape, key: str) -> str:
    async with await RawClient.connect(port) as client:
        await client.send(_request(shape, "never_answers", key))
        await asyncio.sleep(0.05)
    return ""


async def _begin(client: RawClient, shape: Shape, key: str) -> None:
    await client.send(_request(shape, "never_goes_on", key))
    await client.head()
    await client.until(shape.events[0])


@_client(1, 1)
async def _leaves_in_mid_stream(port: int, shape: Shape, key: str) -> str:
    async with await RawClient.connect(port) as client:
        await _begin(client, shape, key)
        client.close()
    return ""


@_client(1, 1)
async def _resets_in_mid_stream(port: int, shape: Shape, key: str) -> str:
    async with await RawClient.connect(port) as client:
        await _begin(client, shape, key)
        client.reset()
    return ""


@_client(1, 1)
async def _half_closes(port: int, shape: Shape, key: str) -> str:
    """A client that closes its sending half looks like one that left; it must not be left hanging."""
    async with await RawClient.connect(port) as client:
        await _begin(client, shape, key)
        client.writer.write_eof()
        await until_gone(client)
    return ""


@_client(1, 1)
async def _reads_slowly(port: int, shape: Shape, key: str) -> str:
    """Every byte still comes, in order."""
    async with await RawClient.connect(port, limit=1 << 14) as client:
        await client.send(_request(shape, "sends_a_flood", key))
        for _ in range(5):
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a whole transport
            await asyncio.sleep(0.05)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        return judge(shape, "sends_a_flood", await read(client))[1]


@_client(1, 1)
async def _stops_reading_and_leaves(port: int, shape: Shape, key: str) -> str:
    async with await RawClient.connect(port, limit=1 << 12) as client:
        await client.send(_request(shape, "sends_a_flood", key))
        await client.head()
        await asyncio.sleep(0.1)
        client.reset()
    return ""


@_client(3, 3)
async def _pipelines(port: int, shape: Shape, key: str) -> str:
    """Answers come in order, each whole."""
    faults = ("well", "stalls_in_mid_stream", "well_in_one_piece")
    async with await RawClient.connect(port, limit=1 << 20) as client:
        await client.send(b"".join(_request(shape, fault, f"{key}.{i}") for i, fault in enumerate(faults)))
        for fault in faults:
            _, wrong = judge(shape, fault, await read(client))
            if wrong:
                return f"pipelined: {wrong}"
    return ""


@_client(1, 1)
async def _sends_byte_by_byte(port: int, shape: Shape, key: str) -> str:
    async with await RawClient.connect(port, limit=1 << 20) as client:
        data = _request(shape, "well", key)
        for i in range(len(data)):
            client.writer.write(data[i : i + 1])
            if i % 8 == 0:
                await asyncio.sleep(0)
        return judge(shape, "well", await read(client))[1]


async def _refused(port: int, data: bytes, *statuses: int) -> str:
    """Send what is no request; it must be refused, and the connection closed."""
    async with await RawClient.connect(port, limit=1 << 20) as client:
        await client.send(data)
        reply = await read(client)
        if reply.status not in statuses:
            return f"answered with {reply.status}, not {statuses}"
        rest = await until_gone(client)
        return f"answered {rest[:80]!r} behind a refusal" if rest else ""


@_client(0, 0)
async def _sends_garbage(port: int, shape: Shape, key: str) -> str:
    return await _refused(
        port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + key.encode() + b"\r\n\r\n", 400
    )


@_client(0, 1)
async def _sends_a_malformed_chunk(port: int, shape: Shape, key: str) -> str:
    head = f"POST {shape.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    return await _refused(port, head.encode() + b"5\r\nhello\r\nzz\r\n", 400)


@_client(0, 0)
async def _smuggles_by_length_and_chunks(port: int, shape: Shape, key: str) -> str:
    inner = b"GET /specproxy/api/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    head = (
        f"POST {shape.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    )
    return await _refused(port, head.encode() + b"\r\n0\r\n\r\n" + inner, 400)


@_client(0, 0)
async def _sends_a_head_without_end(port: int, shape: Shape, key: str) -> str:
    head = f"POST {shape.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ".encode()
    return await _refused(port, head + b"x" * 300_000, 431)


@_client(0, 0)
async def _stays_silent(port: int, shape: Shape, key: str) -> str:
    async with await RawClient.connect(port):
        await asyncio.sleep(0.1)
    return ""
