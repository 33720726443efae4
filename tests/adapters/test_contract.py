"""The contract checks, over every adapter; how many there are is printed at the end of a run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from specproxy.adapters.base import Backend, UpstreamRequest
from specproxy.adapters.fake import FakeBackend, FakeExchange, respond
from specproxy.adapters.http import Endpoint, HttpBackend
from specproxy.adapters.mlx_vlm import MlxVlmBackend
from specproxy.adapters.openai_compat import Deployed, OpenAiBackend
from specproxy.adapters.running_server import RunningServer
from specproxy.proxy.deployments import ADAPTERS
from specproxy.records import LaneStatus
from tests.adapters.contract import BackendContract
from tests.support.proxy import lane
from tests.support.upstream import Conn, Upstream, chunk, chunked, tls_context

HEAD = b"HTTP/1.1 200 OK\r\n"


async def answer(conn: Conn, *, told: Mapping[bytes, bytes] | None = None) -> None:
    """The upstream of the contract, over HTTP."""
    while True:
        seen = await conn.request()
        match seen.request_line.split(b" ")[1]:
            case path if told and path in told:
                await conn.send(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(told[path]), told[path]))
            case b"/parts":
                await conn.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b"one", b"two"))
            case b"/echo":
                await conn.send(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(seen.body), seen.body))
            case b"/error":
                await conn.send(b"HTTP/1.1 500 No\r\nContent-Length: 5\r\n\r\nwrong")
            case b"/break":
                await conn.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"some"))
                return conn.close()
            case b"/close":
                return conn.close()
            case b"/wait":
                await conn.gone()
            case b"/flood":
                await conn.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
                await conn.flood(chunk(b"x" * 4096))
            case _:
                await conn.send(HEAD + b"X-Kind: whole\r\nContent-Length: 5\r\n\r\nwhole")


async def script(exchange: FakeExchange) -> None:
    """The same, for the fake."""
    match exchange.request.target:
        case "/parts":
            await respond(parts=[b"one", b"two"])(exchange)
        case "/echo":
            await respond(await exchange.body())(exchange)
        case "/error":
            await respond(b"wrong", status=500)(exchange)
        case "/break":
            await exchange.head()
            await exchange.data(b"some")
        case "/close":
            return
        case "/wait":
            await exchange.gone()
        case "/flood":
            await exchange.head()
            while True:
                await exchange.data(b"x" * 4096)
        case _:
            await respond(b"whole", headers=((b"X-Kind", b"whole"),))(exchange)


class TestFake(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        backend = FakeBackend("fake", [lane("fake")], script)
        await backend.start()
        yield backend
        await backend.aclose()


class TestHttp(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        async with Upstream(answer) as upstream:
            backend = HttpBackend("http", Endpoint.parse(upstream.url), [lane("http")])
            await backend.start()
            yield backend
            await backend.aclose()


class TestRunningServer(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        async with Upstream(answer) as upstream:
            backend = RunningServer("running", Endpoint.parse(upstream.url), [lane("running")])
            await backend.start()
            yield backend
            await backend.aclose()


async def listing(conn: Conn) -> None:
    """The same, of a server with OpenAI's list of models, and with mlx_vlm.server's settings."""
    settings = json.dumps({"current": {"draft_model": None}, "applied": {"draft_model": None}}).encode()
    models = json.dumps({"data": [{"id": "m"}]}).encode()
    told = {b"/v1/models": models, b"/v1/settings": settings, b"/v1/messages/count_tokens": b"{}"}
    await answer(conn, told=told)


class DeployedContract(BackendContract):
    """A configured server."""

    kind = ""

    def make(self, spec: Deployed) -> OpenAiBackend:
        return ADAPTERS[self.kind](spec)

    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        async with Upstream(listing) as upstream:
            spec = Deployed("d", upstream.url, "m", drafts=("small",), report_drafts=True)
            backend = self.make(spec)
            await backend.start()
            await backend.check()
            yield backend
            await backend.aclose()


class TestOpenAi(DeployedContract):
    kind = "openai"


class TestLlamaServer(DeployedContract):
    kind = "llama-server"


class TestLmStudio(DeployedContract):
    kind = "lmstudio"


class TestMlx(DeployedContract):
    kind = "mlx"


class TestMlxVlm(DeployedContract):
    kind = "mlx-vlm"


class TestMlxVlmDrafting(DeployedContract):
    """On the lane that is not in memory, so that its first exchange begins behind a load."""

    kind = "mlx-vlm"

    def make(self, spec: Deployed) -> OpenAiBackend:
        return Drafting(spec)


class Drafting(MlxVlmBackend):
    """With the drafting lane first, and a change of lanes for every request."""

    def lanes(self) -> tuple[LaneStatus, ...]:
        return super().lanes()[::-1]

    def decodes(self, _request: UpstreamRequest) -> bool:
        return True


class TestVllm(DeployedContract):
    kind = "vllm"


class TestSglang(DeployedContract):
    kind = "sglang"


def test_no_adapter_is_left_out() -> None:
    """Each configured kind runs the contract."""
    assert {case.kind for case in DeployedContract.__subclasses__()} == set(ADAPTERS)


class TestUnixSocket(BackendContract):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        async with Upstream(answer, path=str(tmp_path / "s")) as upstream:
            backend = HttpBackend("unix", Endpoint.parse(upstream.url), [lane("unix")])
            await backend.start()
            yield backend
            await backend.aclose()


class TestTls(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        async with Upstream(answer, tls=tls_context()) as upstream:
            endpoint = Endpoint.parse(upstream.url, verify_tls=False)
            backend = HttpBackend("tls", endpoint, [lane("tls")])
            await backend.start()
            yield backend
            await backend.aclose()
