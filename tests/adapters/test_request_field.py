"""The trial of the request field, on fakes; a real llama-server ignores it, in tests/test_cli_sidecar.py."""

from __future__ import annotations

import pytest

from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.request_field import Finding, try_field
from tests.support.fakes import Fake, fake_llama_server
from tests.support.ports import free_port


async def tried(server: Fake) -> Finding:
    async with server:
        transport = HttpTransport(Endpoint.parse(server.url))
        try:
            return await try_field(transport)
        finally:
            await transport.aclose()


@pytest.mark.parametrize(("honours", "finding"), [(True, Finding.HONOURED), (False, Finding.IGNORED)])
async def test_drafts_with_and_without_the_field_are_compared(honours: bool, finding: Finding) -> None:
    """Two short greedy completions of the same prompt, which differ by the field alone."""
    server = fake_llama_server(speculative=True, honours=honours)
    assert await tried(server) is finding
    without, with_field = (body for body in server.bodies if body)
    assert with_field == {**without, "speculative.n_max": 0}
    assert without["n_predict"] <= 24


async def test_without_a_draft_there_is_nothing_to_compare() -> None:
    """And no second completion."""
    server = fake_llama_server(speculative=False)
    assert await tried(server) is Finding.UNCLEAR
    assert server.asked.count("POST /completion") == 1


@pytest.mark.parametrize("slots", [[{"is_processing": True}], [{}], [], "odd", (501, {"error": "off"})])
async def test_a_server_that_is_busy_or_does_not_say_decodes_nothing(slots: object) -> None:
    server = fake_llama_server(speculative=True, honours=True)
    server.routes["GET /slots"] = slots
    assert await tried(server) is Finding.BUSY
    assert "POST /completion" not in server.asked


@pytest.mark.parametrize("reply", [(500, {"error": "no"}), {"timings": 7}, {"timings": {"draft_n": "many"}}])
async def test_a_completion_that_fails_tells_nothing(reply: object) -> None:
    server = fake_llama_server(speculative=True)
    server.routes["POST /completion"] = reply
    assert await tried(server) is Finding.UNCLEAR


async def test_nobody_is_not_tried() -> None:
    transport = HttpTransport(Endpoint.parse(f"http://127.0.0.1:{free_port()}"))
    assert await try_field(transport) is Finding.BUSY
    await transport.aclose()
