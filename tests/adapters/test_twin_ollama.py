"""Whether lanes on a blob of Ollama's would say what Ollama says. Ollama and llama-server are fakes here."""

from __future__ import annotations

from typing import Any

import pytest

from specproxy.adapters.base import ServedModel
from specproxy.adapters.twin import Twin
from specproxy.adapters.twin_ollama import compare_prompts, overrides, refusal
from specproxy.errors import UpstreamConnectError
from tests.support.fakes import Fake, fake_ollama, ollama_model
from tests.support.ports import free_port


def model(*parameters: tuple[str, str], **changes: Any) -> ServedModel:
    return ServedModel("m", parameters=parameters, **changes)


@pytest.mark.parametrize(
    ("given", "version", "says"),
    [
        (model(), "0.33.0", ""),
        (model(), "1.2", ""),
        (model(), "0.32.9", "0.32.9 are not known"),
        (model(), "dev", "not known"),
        (model(adapted=True), "0.33.0", "has an ADAPTER"),
        (model(capabilities=frozenset({"thinking"})), "0.33.0", "thinks"),
        (model(("stop", "a"), ("num_ctx", "4096"), ("temperature", "0.1")), "0.33.0", ""),
        (model(("top_k", "20")), "0.33.0", ""),
        (model(("top_k", "many")), "0.33.0", "PARAMETER top_k many has no counterpart"),
        (model(("num_predict", "5")), "0.33.0", "PARAMETER num_predict 5 has no counterpart"),
    ],
)
def test_what_rules_lanes_out_beforehand(given: ServedModel, version: str, says: str) -> None:
    reason = refusal(given, version)
    assert says in reason
    assert bool(reason) is bool(says)


def test_defaults_are_those_of_ollamas_chat_route() -> None:
    """A model's temperature and top_p don't count there; all of its stops do."""
    given = model(
        ("temperature", "0.1"), ("top_k", "20"), ("stop", "<a>"), ("stop", "<b>"), ("repeat_penalty", "1.1")
    )
    assert dict(overrides(given)) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": 0.0,
        "repeat_penalty": 1.1,
        "stop": ("<a>", "<b>"),
    }
    assert dict(overrides(model())) == {"temperature": 1.0, "top_p": 1.0, "top_k": 40, "min_p": 0.0}


OVERRIDES = overrides(model())


def template(bos: str = "", tools: str = "") -> Fake:
    """A llama-server whose template joins the messages."""

    def render(body: Any) -> Any:
        text = "".join(message["content"] for message in body["messages"])
        return {"prompt": bos + text + (tools if body.get("tools") else "")}

    return Fake({"GET /props": {"bos_token": "<s>"}, "POST /apply-template": render})


async def compared(ollama: Fake, lane: Fake, *capabilities: str) -> Twin:
    async with ollama, lane:
        given = model(capabilities=frozenset(capabilities))
        return await compare_prompts(ollama.url, given, lane.url)


async def test_the_same_prompts_are_the_same_model() -> None:
    """Whether the first token is written out does not matter; nothing is generated for it."""
    ollama = fake_ollama(ollama_model("m"))
    assert await compared(ollama, template(bos="<s>")) == Twin(overrides=OVERRIDES)
    asked = [body for body in ollama.bodies if body]
    assert len(asked) == 3
    assert all(body["_debug_render_only"] and not body["stream"] for body in asked)


async def test_tools_are_compared_where_the_model_takes_them() -> None:
    assert await compared(fake_ollama(ollama_model("m")), template(), "tools") == Twin(
        tools=True, overrides=OVERRIDES
    )
    assert await compared(fake_ollama(ollama_model("m")), template(tools="[]"), "tools") == Twin(
        overrides=OVERRIDES
    )


async def test_another_prompt_is_another_model() -> None:
    """A system message of Ollama's, or its own template, shows in the first chat."""
    twin = await compared(fake_ollama(ollama_model("m")), template(bos="You are helpful."))
    assert "other prompts" in twin.reason


async def test_what_cannot_be_compared_is_not_believed() -> None:
    """An Ollama that answers instead of showing, a lane without templates, and nobody at all."""
    blind = fake_ollama(ollama_model("m"))
    blind.routes["POST /api/chat"] = {"message": {"content": "hello"}, "done": True}
    assert "does not show" in (await compared(blind, template())).reason
    assert "other prompts" in (await compared(fake_ollama(ollama_model("m")), Fake({}))).reason
    async with template() as lane:
        with pytest.raises(UpstreamConnectError):
            await compare_prompts(f"http://127.0.0.1:{free_port()}", model(), lane.url)
