"""The whole program on real llama-servers: official clients, and routing that finds what is fastest."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import anthropic
import openai
import pytest
from rich.console import Console

from benchmarks import synthetic
from benchmarks.live import Running, get_json, send, started
from tests.support.calibrated import CalibratedPair, write_pair

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """Large enough that decoding is bound by memory, as in the models that people run."""
    return write_pair(tmp_path_factory.mktemp("pair"), embd=768, layers=10, seed=11)


@pytest.fixture(scope="module")
def proxy(pair: CalibratedPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`specproxy start` with four managed lanes."""
    with four_lanes(pair, tmp_path_factory.mktemp("state")) as running:
        yield running


def four_lanes(pair: CalibratedPair, state: Path, *more: str) -> AbstractContextManager[Running]:
    """`specproxy start` on the pair, one thread a lane."""
    models = ["--model", str(pair.target), "--draft", str(pair.draft), "--ctx", "2048"]
    return started([*models, *more], state=state, console=Console(quiet=True), threads=1)


def test_all_lanes_come_up(proxy: Running) -> None:
    """The model has an MTP layer and a draft, so there is a lane for each strategy."""
    assert set(proxy.lanes) == {"plain", "ngram", "draft", "mtp"}


def test_openai_client(proxy: Running, pair: CalibratedPair) -> None:
    """Chat, streamed and not, gives the text that the model is known to say, whatever the lane."""
    client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none")
    prompt = [{"role": "user", "content": f"Explain this {pair.marker('prose', 3)}"}]
    wanted = pair.text("prose", 24, 3)
    for lane in proxy.lanes:
        options: dict[str, Any] = {"model": "m", "messages": prompt, "temperature": 0, "max_tokens": 24}
        pin = {"X-Specproxy-Strategy": lane}
        whole = client.chat.completions.create(**options, extra_headers=pin)
        assert whole.choices[0].message.content == wanted, lane
        stream = client.chat.completions.create(**options, extra_headers=pin, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == wanted, lane
    assert client.models.list().data


@pytest.mark.parametrize("stream", [True, False])
def test_a_slot_goes_idle_when_its_client_leaves(proxy: Running, pair: CalibratedPair, stream: bool) -> None:
    """Long before the text would be finished, also where the client has not been sent a byte.

    llama-server looks for the client of a whole reply only after a second in which nothing happened at all, a
    question about its slots included. So it is not asked more often than that.
    """

    def busy() -> bool:
        slots: Any = get_json(f"{proxy.lanes['plain']}/slots")
        return any(slot["is_processing"] for slot in slots)

    prompt = [{"role": "user", "content": f"Explain this {pair.marker('prose', 5)}"}]
    body = {"model": "m", "messages": prompt, "max_tokens": 16, "ignore_eos": True}
    headers = {"X-Specproxy-Strategy": "plain"}
    client = http.client.HTTPConnection(proxy.url.removeprefix("http://"))
    client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    speed = json.load(client.getresponse())["timings"]["predicted_per_second"]
    long = body | {"max_tokens": 1900, "stream": stream}
    client.request("POST", "/v1/chat/completions", json.dumps(long), headers)
    while not busy():
        time.sleep(0.05)
    client.close()
    left = time.monotonic()
    while busy():
        time.sleep(1.5)
    assert time.monotonic() - left < 1900 / speed / 2


def test_anthropic_client(proxy: Running, pair: CalibratedPair) -> None:
    """/v1/messages passes, and is learned from by usage and wall clock."""
    client = anthropic.Anthropic(base_url=proxy.url, api_key="none")
    message = client.messages.create(
        model="m",
        max_tokens=16,
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": f"Explain this {pair.marker('prose', 5)}"}],
    )
    assert message.content[0].type == "text"
    assert message.content[0].text == pair.text("prose", 16, 5)


def test_an_unknown_strategy_is_refused_in_the_clients_dialect(proxy: Running) -> None:
    """The error names the strategies that exist."""
    client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="available strategies: draft, mtp, ngram, plain"):
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            extra_headers={"X-Specproxy-Strategy": "warp"},
        )


def test_routing_finds_what_is_fastest(pair: CalibratedPair, tmp_path: Path) -> None:
    """Later choices cost little over the lane that is fastest here, which differs from machine to machine.

    Which that is, other prompts of the same kinds tell, sent straight to every lane in between. More may be
    spent on finding out than by default, and nothing was learned before, so that thirty requests of a kind are
    enough whatever the first tries happen to show.
    """
    config = tmp_path / "config.yaml"
    config.write_text("learner: {allowance_requests: 5}")
    rows, controls = (
        [row for row in synthetic.build(pair, count, random.Random(count)) if row.kind in ("json", "code_edit")]
        for count in (150, 50)
    )
    chosen: dict[str, list[str]] = {"json": [], "code_edit": []}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)  # a token, by kind and lane
    with four_lanes(pair, tmp_path, "--config", str(config)) as proxy:
        for number, row in enumerate(rows):
            chosen[row.kind].append(send(proxy.url, row, stream=True).strategy)
            if number % 3 or not controls:
                continue
            control = controls.pop()
            for lane, url in proxy.lanes.items():
                sample = send(url, control, stream=True, strategy=lane)
                seconds[control.kind, lane].append(sample.decode_s / sample.tokens)
    late = {kind: Counter(names[len(names) // 2 :]) for kind, names in chosen.items()}
    found = {key: median(times) for key, times in seconds.items()}
    routed, drawn = [], []  # what is lost against the fastest lane
    for kind, counts in late.items():
        times = {lane: found[kind, lane] for lane in proxy.lanes}
        best = min(times.values())
        routed.append(sum(times[lane] * count for lane, count in counts.items()) / counts.total() / best - 1)
        drawn.append(sum(times.values()) / len(times) / best - 1)
    assert sum(drawn) > 0.2, f"lanes hardly differ: {found}"
    assert sum(routed) < sum(drawn) / 3, (late, found)
