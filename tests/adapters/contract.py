"""What every Backend has to do. Adapters run these checks by subclassing `BackendContract`.

A subclass provides `backend`, an async fixture that yields a started backend whose upstream behaves as
`Behaviour` says for the request target; `SCRIPTED` maps the targets.
"""

from __future__ import annotations

import asyncio

import pytest

from specproxy.adapters.base import Backend, ResponseHead, UpstreamRequest
from specproxy.errors import BackendError, UpstreamClosed
from specproxy.records import Health, LaneStatus
from tests.support.sink import RecordingSink

__all__ = ["BackendContract"]


def request(target: str, **fields: object) -> UpstreamRequest:
    """A GET, or a POST where a body is given."""
    given: dict[str, object] = {"method": "GET", "target": target, "headers": ()}
    if "body" in fields:
        given["method"] = "POST"
    return UpstreamRequest(**(given | fields))  # type: ignore[arg-type]  # fields of UpstreamRequest


class BackendContract:
    """Targets that the upstream of `backend` must answer:

    - ``/whole``: 200, header ``X-Kind: whole``, body ``whole``
    - ``/parts``: 200, a body in pieces ``one`` and ``two``
    - ``/echo``: 200, the request's body
    - ``/error``: 500, body ``wrong``
    - ``/break``: 200, a body that starts with ``some`` and breaks off
    - ``/close``: the connection ends without an answer
    - ``/wait``: never answers
    - ``/flood``: 200, a body that goes on as long as it is read
    """

    async def ask(self, backend: Backend, asked: UpstreamRequest) -> RecordingSink:
        """One whole exchange."""
        sink = RecordingSink()
        sink.exchange = backend.open(asked, backend.lanes()[0].lane, sink)
        await sink.over()
        return sink

    async def test_it_is_a_backend(self, backend: Backend) -> None:
        """It has every method of the protocol."""
        assert isinstance(backend, Backend)
        assert backend.name

    async def test_lanes_belong_to_it(self, backend: Backend) -> None:
        """Lanes are listed at once, name this backend, and are ready."""
        lanes = backend.lanes()
        assert lanes
        for status in lanes:
            assert isinstance(status, LaneStatus)
            assert status.lane.backend == backend.name
            assert status.health is Health.READY

    async def test_probe_is_a_result(self, backend: Backend) -> None:
        """A reachable backend says so."""
        assert (await backend.probe()).reachable

    async def test_open_returns_before_the_sink_hears(self, backend: Backend) -> None:
        """`open` never calls the sink itself."""
        sink = RecordingSink()
        exchange = backend.open(request("/whole"), backend.lanes()[0].lane, sink)
        assert sink.calls == []
        await sink.over()
        exchange.abort()

    async def test_head_data_end_in_order(self, backend: Backend) -> None:
        """A response is a head, then data, then one end."""
        sink = await self.ask(backend, request("/whole"))
        head = sink.value("head")
        assert isinstance(head, ResponseHead)
        assert head.status == 200
        assert (b"x-kind", b"whole") in [(name.lower(), value) for name, value in head.headers]
        assert sink.names[0] == "head"
        assert sink.names[-1] == "end"
        assert set(sink.names[1:-1]) == {"data"}
        assert sink.body == b"whole"

    async def test_pieces_are_not_joined(self, backend: Backend) -> None:
        """Each piece of the upstream's framing is a part."""
        sink = await self.ask(backend, request("/parts"))
        assert sink.parts == [b"one", b"two"]

    async def test_a_whole_body_is_sent(self, backend: Backend) -> None:
        """A body that is whole arrives unchanged."""
        body = bytes(range(256)) * 1000
        sink = await self.ask(backend, request("/echo", body=body, length=len(body)))
        assert sink.body == body

    @pytest.mark.parametrize("length", [6, None])
    async def test_a_streamed_body_is_sent(self, backend: Backend, length: int | None) -> None:
        """A body written in pieces arrives whole, with and without a length."""
        sink = RecordingSink()
        exchange = backend.open(request("/echo", body=None, length=length), backend.lanes()[0].lane, sink)
        await exchange.write(b"abc")
        await exchange.write(b"def")
        await exchange.write_end()
        assert await sink.over() == "end"
        assert sink.body == b"abcdef"

    async def test_an_error_status_is_a_response(self, backend: Backend) -> None:
        """Error statuses are passed on like any other."""
        sink = await self.ask(backend, request("/error"))
        assert sink.names[-1] == "end"
        head = sink.value("head")
        assert isinstance(head, ResponseHead)
        assert head.status == 500
        assert sink.body == b"wrong"

    async def test_a_broken_response_fails_after_its_data(self, backend: Backend) -> None:
        """What came before the break is passed on, then it fails."""
        sink = await self.ask(backend, request("/break"))
        assert sink.body.startswith(b"some")
        assert sink.names[-1] == "fail"
        assert isinstance(sink.value("fail"), UpstreamClosed)

    async def test_no_answer_fails(self, backend: Backend) -> None:
        """A connection that ends without an answer is a failure, not an empty response."""
        sink = await self.ask(backend, request("/close"))
        assert sink.names == ["fail"]
        assert isinstance(sink.value("fail"), UpstreamClosed)

    async def test_abort_silences(self, backend: Backend) -> None:
        """After `abort` the sink hears nothing, and aborting twice is allowed."""
        sink = RecordingSink()
        exchange = backend.open(request("/flood"), backend.lanes()[0].lane, sink)
        await sink.heard("data")
        exchange.abort()
        exchange.abort()
        heard = len(sink.calls)
        await self.ask(backend, request("/whole"))
        assert len(sink.calls) == heard

    @pytest.mark.parametrize("at", ["head", "data", "end"])
    async def test_abort_within_a_call(self, backend: Backend, at: str) -> None:
        """A sink may give up from within any call."""
        sink = RecordingSink()
        sink.abort_at = at
        sink.exchange = backend.open(request("/parts"), backend.lanes()[0].lane, sink)
        await sink.heard(at)
        await self.ask(backend, request("/whole"))
        assert sink.names[-1] == at
        assert sink.names.count(at) == 1

    async def test_pause_stops_the_data(self, backend: Backend) -> None:
        """A paused exchange delivers nothing until it is resumed; both are idempotent."""
        sink = RecordingSink()
        exchange = backend.open(request("/flood"), backend.lanes()[0].lane, sink)
        await sink.heard("data")
        exchange.pause()
        exchange.pause()
        heard = len(sink.calls)
        for _ in range(3):
            await self.ask(backend, request("/whole"))
        assert len(sink.calls) == heard
        exchange.resume()
        exchange.resume()
        async with asyncio.timeout(10):
            await sink.more(heard)
        exchange.abort()

    async def test_writing_to_an_answered_request_fails(self, backend: Backend) -> None:
        """A body that nobody reads any more raises instead of blocking."""
        sink = RecordingSink()
        exchange = backend.open(request("/whole", body=None, length=None), backend.lanes()[0].lane, sink)
        await exchange.write(b"x")
        await exchange.write_end()
        await sink.over()
        with pytest.raises(UpstreamClosed):
            await exchange.write(b"y")

    async def test_exchanges_are_independent(self, backend: Backend) -> None:
        """Several exchanges at once do not mix."""
        lane = backend.lanes()[0].lane
        waiting = RecordingSink()
        exchange = backend.open(request("/wait"), lane, waiting)
        bodies = [b"%d" % i * 100 for i in range(8)]
        sinks = await asyncio.gather(
            *(self.ask(backend, request("/echo", body=body, length=len(body))) for body in bodies)
        )
        assert [sink.body for sink in sinks] == bodies
        assert waiting.calls == []
        exchange.abort()

    async def test_closing_ends_what_is_open(self, backend: Backend) -> None:
        """`aclose` fails open exchanges, and may be called twice."""
        sink = RecordingSink()
        backend.open(request("/flood"), backend.lanes()[0].lane, sink)
        await sink.heard("data")
        await backend.aclose()
        await backend.aclose()
        assert await sink.over() == "fail"
        assert isinstance(sink.value("fail"), BackendError)
