"""Lanes that are named in the configuration: what is sent, who gets it, and what becomes of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from specproxy import config
from specproxy.adapters.http import HttpBackend
from specproxy.adapters.openai_compat import Deployed, OpenAiBackend
from specproxy.adapters.spec_metrics import Counters, read_metrics
from specproxy.config import Deployment, Settings
from specproxy.errors import ConfigError, UpstreamConnectError
from specproxy.proxy.deployments import ADAPTERS, Deployments, deployed
from specproxy.proxy.fleet import Fleet
from specproxy.records import Control, Health
from tests.support.deployments import ask, deployment, proxied
from tests.support.fakes import fake_llama_server
from tests.support.proxy import running_proxy
from tests.support.upstream import Conn, Received, Upstream

EXAMPLES = Path(__file__).parents[2] / "examples"


class Speaker(Upstream):
    """A server with OpenAI's API and a model ``m-real``; it may hold its answers back."""

    def __init__(self, reply: dict[str, Any] | None = None, metrics: str = "") -> None:
        super().__init__(self._serve)
        self.reply, self.metrics = reply or {}, metrics
        self.seen: list[Received] = []
        self.open = asyncio.Event()
        self.open.set()

    @property
    def chats(self) -> list[dict[str, Any]]:
        return [json.loads(seen.body) for seen in self.seen if seen.body]

    async def _serve(self, conn: Conn) -> None:
        while True:
            seen = await conn.request()
            self.seen.append(seen)
            path = seen.request_line.split(b" ")[1]
            body = json.dumps({"data": [{"id": "m-real"}, {"id": "m"}]}).encode()
            if path == b"/metrics":
                body = self.metrics.encode()
            elif path != b"/v1/models":
                await self.open.wait()
                done = [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]
                usage = {"prompt_tokens": 1, "completion_tokens": 8} | self.reply.get("usage", {})
                body = json.dumps({"model": "m-real", "choices": done} | self.reply | {"usage": usage}).encode()
            await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


# --- what is sent --------------------------------------------------------------------------------


async def test_key_and_names_are_the_servers() -> None:
    """The key replaces the client's, the model's name is spliced, and comes back as it was asked for."""
    async with Speaker() as server:
        one = deployment(server, model="m-real", aliases=["gpt-4o"], key_env="KEY")
        async with proxied(one, KEY="secret") as proxy:
            reply = await ask(proxy, b"Authorization: Bearer client", model="gpt-4o")
        assert json.loads(reply.content)["model"] == "gpt-4o"
        assert server.chats[0]["model"] == "m-real"
        assert {value for seen in server.seen for value in seen.values(b"authorization")} == {b"Bearer secret"}
        assert "secret" not in repr(deployed([one], {"KEY": "secret"})[0].spec)
        assert "secret" not in repr(deployed([one], {"KEY": "secret"})[0].transport.endpoint)


async def test_an_alias_without_a_name_of_the_servers_own_is_the_targets() -> None:
    """Or the server would be asked for a model that it has never heard of."""
    async with Speaker() as server:
        async with proxied(deployment(server, aliases=["gpt-4o"])) as proxy:
            await ask(proxy, model="gpt-4o")
        assert [chat["model"] for chat in server.chats] == ["m"]


async def test_a_v1_at_the_end_of_a_url_is_not_doubled() -> None:
    """Both ways of writing a base URL work."""
    async with Speaker() as server:
        async with proxied(Deployment(urls=(f"{server.url}/v1",), target="m")) as proxy:
            assert (await ask(proxy)).status == 200
        assert {seen.request_line.split(b" ")[1] for seen in server.seen} == {
            b"/v1/models",
            b"/v1/chat/completions",
        }


@pytest.mark.parametrize("place", ["stats", "usage"])
async def test_lm_studio_drafts_by_request(place: str) -> None:
    """A lane for each draft; what was accepted is read from either place."""
    counts = {"total_draft_tokens_count": 6, "accepted_draft_tokens_count": 5}
    async with Speaker({place: counts}) as server:
        drafts = ["qwen/qwen2.5-0.5b", "other"]
        async with proxied(deployment(server, kind="lmstudio", drafts=drafts)) as proxy:
            lanes = [s.lane for s in proxy.router.lanes()]
            assert [lane.strategy.name for lane in lanes] == ["plain", "draft", "draft"]
            assert {lane.control for lane in lanes} == {Control.REQUEST}
            await ask(proxy)
            await ask(proxy, b"X-Specproxy-Strategy: draft")
        assert [chat.get("draft_model") for chat in server.chats] == [None, "qwen/qwen2.5-0.5b"]
        assert (proxy.seen[1].draft_tokens, proxy.seen[1].accepted_tokens) == (6, 5)


@pytest.mark.parametrize("kind", ["lmstudio", "mlx", "mlx-vlm"])
def test_drafts_that_end_alike_are_lanes_apart(kind: str) -> None:
    """One of them would be lost if both had the same id; others have a short one."""
    drafts = ["a/small", "b/small", "b/other"]
    one = Deployment(kind=kind, urls=["http://127.0.0.1:9"], target="m", drafts=drafts)
    [backend] = deployed([one], {})
    ids = [status.lane.id.rpartition("+")[2] for status in backend.lanes()]
    assert ids[1:] == ["a/small", "b/small", "other"]


async def test_a_client_that_names_a_draft_itself_is_left_alone() -> None:
    """Its own field stands, it goes to plain, and shows nothing about how fast plain is."""
    async with Speaker() as server:
        async with proxied(deployment(server, kind="lmstudio", drafts=["a"])) as proxy:
            await ask(proxy, draft_model="mine")
            await ask(proxy)
        assert server.chats[0]["draft_model"] == "mine"
        assert "steering" in proxy.seen[0].workload.flags
        assert [seen.weight > 0 for seen in proxy.seen] == [False, True]


async def test_a_model_that_no_lane_names_is_asked_for_as_it_is() -> None:
    """Or the lane's model would answer under another's name; its fields are the lane's own affair too."""
    async with Speaker() as server:
        one = deployment(server, model="m-real", kind="mlx", draft_tokens=2)
        async with proxied(one) as proxy:
            await ask(proxy, model="other")
        assert [seen.rule for seen in proxy.seen] == ["unknown_model"]
        assert [chat["model"] for chat in server.chats] == ["other"]


@pytest.mark.parametrize("wanted", [False, True])
async def test_sglang_is_asked_for_counts_only_if_wanted(wanted: bool) -> None:
    """The field changes what clients get to see."""
    details = {"spec_tokens_details": {"spec_num_proposed_drafts": 9, "spec_num_correct_drafts": 4}}
    async with Speaker({"sglext": details} if wanted else None) as server:
        async with proxied(deployment(server, kind="sglang", report_drafts=wanted)) as proxy:
            await ask(proxy)
        assert server.chats[0].get("return_spec_tokens_details", False) is wanted
        assert proxy.seen[0].draft_tokens == (9 if wanted else 0)


# --- who gets it ---------------------------------------------------------------------------------


async def test_equal_servers_take_turns_by_weight() -> None:
    """Of requests that are in flight together the heavier one has twice as many; alone they alternate."""
    async with Speaker() as big, Speaker() as small, proxied(deployment(big, small, weights=[2, 1])) as proxy:
        assert len({s.lane.fingerprint for s in proxy.router.lanes()}) == 1
        for server in (big, small):
            server.open.clear()
        asked = []
        for number in range(6):
            asked.append(asyncio.create_task(ask(proxy)))
            while len(big.chats) + len(small.chats) <= number:  # noqa: ASYNC110 - told by no event
                await asyncio.sleep(0)
        assert (len(big.chats), len(small.chats)) == (4, 2)
        big.open.set()
        small.open.set()
        await asyncio.gather(*asked)


async def test_idle_equals_alternate() -> None:
    """Whose turn was longest ago is next, so that none of them rests."""
    async with Speaker() as one, Speaker() as two:
        async with proxied(deployment(one, two)) as proxy:
            for _ in range(4):
                await ask(proxy)
        assert (len(one.chats), len(two.chats)) == (2, 2)


async def test_an_equal_takes_over_before_the_first_byte() -> None:
    """The client notices nothing; the one that failed gets no more until it was looked at."""
    async with Speaker() as one, Speaker() as two:
        named = Deployments([deployment(one, two)])
        await named.start()
        async with running_proxy(*named.backends) as proxy:
            proxy.router.on_lane_error(named.lane_failed)
            await one.__aexit__()
            for _ in range(4):
                assert (await ask(proxy)).status == 200
            health = Counter(s.health for s in proxy.router.lanes())
            assert health == {Health.READY: 1, Health.UNHEALTHY: 1}
            assert len([seen for seen in proxy.seen if seen.rule == "fallback"]) <= 1
        await named.aclose()
    assert len(two.chats) == 4


async def test_other_ways_to_decode_are_other_lanes() -> None:
    """Deployments with one target are a choice, with statistics of their own; other targets stay apart."""
    async with Speaker() as one, Speaker() as two:
        several = (deployment(one), deployment(two, strategy="eagle3:3"), deployment(two, target="other"))
        async with proxied(*several) as proxy:
            lanes = [s.lane for s in proxy.router.lanes()]
            assert [lane.target for lane in lanes] == ["m", "m", "other"]
            assert len({lane.id for lane in lanes}) == len({lane.fingerprint for lane in lanes}) == 3
            await ask(proxy)
            assert {s.lane.target for s in proxy.policy.situations[0].lanes} == {"m"}
            await ask(proxy, model="other")
            assert [seen.target for seen in proxy.seen] == ["m", "other"]


# --- what becomes of them --------------------------------------------------------------------------


async def test_a_failed_server_is_left_and_looked_at_again() -> None:
    """The next look is made at once, and it is back."""
    async with Speaker() as server:
        named = Deployments([deployment(server)])
        await named.start()
        [backend] = named.backends
        assert isinstance(backend, HttpBackend)
        lane = backend.lanes()[0].lane
        looks = len(server.seen)
        named.lane_failed(lane, UpstreamConnectError("refused"))
        assert backend.lanes()[0].health is Health.UNHEALTHY
        while backend.lanes()[0].health is not Health.READY:  # noqa: ASYNC110 - told by no event
            await asyncio.sleep(0)
        assert len(server.seen) > looks
        assert (named.address(lane), [u.url for u in named.upstreams]) == (server.url, [server.url])
        await named.aclose()


@pytest.mark.parametrize(
    ("strategy", "drafts", "note"),
    [
        ("plain", False, ""),
        ("ngram", True, ""),
        ("plain", True, "it drafts, and is configured as plain"),
        ("ngram", False, "it does not draft: is one missing?"),
        ("ngram", None, ""),
    ],
)
async def test_a_llama_server_is_what_its_slots_say(strategy: str, drafts: bool | None, note: str) -> None:
    """What contradicts the configuration is out of use; what is not told is believed."""
    fake = fake_llama_server(speculative=bool(drafts))
    if drafts is None:
        fake.routes["GET /slots"] = (501, {"error": "no slots"})
    async with fake as server:
        one = Deployment(kind="llama-server", urls=(server.url,), target="m", strategy=strategy)
        [backend] = deployed([one], {})
        await backend.check()
        [status] = backend.lanes()
        assert (status.note, status.health is Health.READY) == (note, not note)
        await backend.aclose()


VLLM = 'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {}\n' \
    'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {}\n' \
    'vllm:spec_decode_num_draft_tokens_total{{model_name="lora"}} 999\n'  # fmt: skip


async def test_vllm_counts_between_two_looks() -> None:
    """The share of what was drafted meanwhile, of this model; a restart tells nothing."""
    async with Speaker(metrics=VLLM.format(100, 60)) as server:
        [backend] = deployed([deployment(server, kind="vllm")])
        notes = []
        for counts in ((100, 60), (200, 130), (200, 130), (5, 1)):
            server.metrics = VLLM.format(*counts)
            await backend.check()
            notes.append(backend.lanes()[0].note)
        told = "70% of 100 drafted tokens accepted lately, by its own counters"
        assert notes == ["", told, told, told]
        await backend.aclose()


async def test_sglang_has_a_gauge() -> None:
    """Its mean over ranks."""
    gauges = 'sglang:spec_accept_rate{model_name="m",tp_rank="0"} 0.5\n'
    gauges += 'sglang:spec_accept_rate{model_name="m",tp_rank="1"} 0.7\n'
    async with Speaker(metrics=gauges) as server:
        [backend] = deployed([deployment(server, kind="sglang")])
        await backend.check()
        assert backend.lanes()[0].note == "60% of drafted tokens accepted, by its own gauge"
        await backend.aclose()


@pytest.mark.parametrize("text", ["<html>", "{}", "vllm:spec_decode_num_draft_tokens_total abc"])
async def test_metrics_that_are_none(text: str) -> None:
    """Something else at that route is no reason to fail."""
    async with Speaker(metrics=text) as server:
        backend = OpenAiBackend(Deployed("d", server.url, "m"))
        found = await read_metrics(backend.transport, "m")
        assert found is None or found == Counters()
        await backend.aclose()


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_can_be_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its deployments become lanes of one target."""
    for name in ("VLLM_API_KEY", "INFERENCE_API_KEY", "LLAMA_KEY"):
        monkeypatch.setenv(name, "k")
    settings = config.load(path, environ={})
    backends = deployed(settings.deployments)
    lanes = [status.lane for backend in backends for status in backend.lanes()]
    assert len({lane.target for lane in lanes}) == (1 if settings.deployments else 0)
    assert len({lane.strategy.name for lane in lanes}) == (2 if settings.deployments else 0)


def test_there_is_an_example_of_each_kind() -> None:
    """A kind that nobody can copy from a file is not there for anybody."""
    for kind in ADAPTERS:
        written = yaml.safe_load((EXAMPLES / f"{kind}.yaml").read_text())
        assert {one.get("kind", "openai") for one in written["deployments"]} == {kind}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"urls": [], "target": "m"}, "urls"),
        ({"urls": "http://a", "target": ""}, "target"),
        ({"urls": "http://a", "target": "m", "weights": [1, 2]}, "2 weights for 1 urls"),
        ({"urls": "http://a", "target": "m", "weights": [0]}, "above 0"),
        ({"urls": "http://a", "target": "m", "drafts": ["d"]}, "no request field for a draft model"),
        ({"urls": "http://a", "target": "m", "strategy": "egle3"}, "did you mean eagle3"),
        ({"urls": "http://a", "target": "m", "key_env": "NOT_SET"}, "NOT_SET is not set"),
        ({"urls": "http://a", "target": "m", "kind": "vlm"}, "did you mean vllm"),
        ({"urls": "ftp://a", "target": "m"}, "should be a URL"),
    ],
)
def test_what_is_wrong_with_a_deployment_is_said(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    """One line, with the key."""
    (tmp_path / "c.yaml").write_text(json.dumps({"deployments": [given]}))
    with pytest.raises(ConfigError, match=message) as raised:
        config.load(tmp_path / "c.yaml", environ={})
    assert "deployments" in str(raised.value)


@pytest.mark.parametrize("key", ["hush\n", "hush\r\nX-Evil: 1", " hush", "hush\0"])
def test_a_key_that_no_header_can_carry_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As files give it whose line end is kept; it would begin another header, and is not told."""
    monkeypatch.setattr(os, "environ", os.environ | {"UPSTREAM_KEY": key})
    given = {"urls": "http://a", "target": "m", "key_env": "UPSTREAM_KEY"}
    (tmp_path / "c.yaml").write_text(json.dumps({"deployments": [given]}))
    with pytest.raises(ConfigError, match="UPSTREAM_KEY has blanks around its key") as raised:
        config.load(tmp_path / "c.yaml", environ={})
    assert "hush" not in str(raised.value)


def test_servers_are_grouped_by_host(tmp_path: Path) -> None:
    """What runs elsewhere is none of this machine's load; two ports of one host share it."""
    urls = (
        "http://127.0.0.1:9001",
        "http://gpu.example:9001",
        "http://GPU.example:9002",
        "https://other.example",
    )
    found = tuple(Deployment(target="m", urls=(url,)) for url in urls)
    fleet = Fleet(Settings(upstream=("http://ollama.example:11434",), deployments=found, state_dir=tmp_path))
    assert set(fleet.hosts().values()) == {"ollama.example", "gpu.example", "other.example"}
    assert [fleet.hosts().get(name) for name in ("gpu.example:9001", "GPU.example:9002", "127.0.0.1:9001")] == [
        "gpu.example",
        "gpu.example",
        None,
    ]


async def test_deployments_alone_probe_no_usual_ports(tmp_path: Path) -> None:
    """What was named is what there is."""
    async with Speaker() as server:
        fleet = Fleet(Settings(deployments=(deployment(server),), state_dir=tmp_path))
        await fleet.start()
        assert [backend.name for backend in fleet.backends] == [server.url.removeprefix("http://")]
        assert fleet.survey == {}
        assert [upstream.found.kind for upstream in fleet.upstreams] == ["openai"]
        await fleet.aclose()
