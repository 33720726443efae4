"""Whether lanes on a llama-server's weights would say what it says; both are fakes here, real ones are in
tests/test_cli_sidecar.py."""

from __future__ import annotations

from typing import Any

import pytest

from specproxy.adapters.twin import Twin
from specproxy.adapters.twin_llama import compare_servers
from specproxy.errors import UpstreamConnectError
from tests.support.fakes import Fake
from tests.support.ports import free_port

PARAMS = {"temperature": 0.8, "top_k": 40, "n_predict": -1, "samplers": ["top_k", "temperature"], "seed": 7}


def server(template: str = "t", adapters: object = (), mark: str = "", **params: Any) -> Fake:
    """A llama-server with these defaults, whose prompts are the messages behind a mark."""

    def render(body: Any) -> Any:
        return {"prompt": mark + "".join(m["content"] for m in body["messages"]) + str(body.get("tools", ""))}

    settings = {"params": PARAMS | params}
    return Fake(
        {
            "GET /props": {
                "bos_token": "<s>",
                "chat_template": template,
                "default_generation_settings": settings,
            },
            "GET /lora-adapters": list(adapters) if isinstance(adapters, tuple) else adapters,
            "POST /apply-template": render,
        }
    )


async def compared(theirs: Fake) -> Twin:
    async with theirs, server() as lane:
        return await compare_servers(theirs.url, lane.url)


async def test_a_server_as_it_comes_is_the_same() -> None:
    """A seed is no default of interest."""
    assert await compared(server(seed=8)) == Twin(tools=True)


async def test_other_defaults_go_along_with_each_request() -> None:
    """By their names in requests; lists too."""
    twin = await compared(server(temperature=0.2, samplers=["temperature"]))
    assert dict(twin.overrides) == {"temperature": 0.2, "samplers": ("temperature",)}


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (server(adapters=({"id": 0},)), "LoRA"),
        (server(template="other"), "another chat template"),
        (server(n_predict=64), "limit on the length"),
        (server(mark="You are helpful."), "other prompts"),
    ],
)
async def test_what_cannot_go_along_rules_lanes_out(theirs: Fake, says: str) -> None:
    assert says in (await compared(theirs)).reason


async def test_a_server_without_such_routes_cannot_be_compared() -> None:
    """It could have been started with anything."""
    old = server()
    del old.routes["POST /apply-template"]
    assert "does not show" in (await compared(old)).reason


async def test_nobody_to_compare_with() -> None:
    async with server() as lane:
        with pytest.raises(UpstreamConnectError):
            await compare_servers(f"http://127.0.0.1:{free_port()}", lane.url)
