"""Replay of what managed lanes have said, by the text of their replies, against what llama-server counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from specproxy.config import Settings
from specproxy.proxy.service import Service
from specproxy.records import Health
from tests.support.calibrated import CalibratedPair
from tests.support.relay import settled

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]


def request(pair: CalibratedPair, region: str, i: int) -> dict[str, Any]:
    """A chat whose prompt quotes a text, and whose answer is that of a region."""
    quoted = pair.text("edit" if region == "creative" else region, 12, i)
    return {
        "messages": [{"role": "user", "content": f"say {i} {quoted} {pair.marker(region, i)}"}],
        "temperature": 1.0 if region == "creative" else 0.0,
        "max_tokens": 60,
        "stream": i % 2 == 0,
    }


async def test_replays_of_managed_lanes_are_right(pair: CalibratedPair, tmp_path: Path) -> None:
    """On the n-gram lane the replayed tokens a step are those that were counted, streamed or not; what ran on
    plain is replayed too."""
    settings = Settings(
        model=str(pair.target), engine="managed", strategies=("ngram",), threads=1, ctx=1024, port=0,
        state_dir=tmp_path,
    )  # fmt: skip
    service = Service(settings)
    try:
        await service.start()
        await settled(lambda: all(status.health is Health.READY for status in service.lanes()))
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
            runs = [
                (region, pin) for region in ("edit", "json", "creative") for pin in ("ngram", "ngram", "plain")
            ]
            for i, (region, pin) in enumerate(runs):
                headers = {"X-Specproxy-Strategy": pin}
                reply = await client.post(
                    "/v1/chat/completions", json=request(pair, region, i), headers=headers
                )
                assert reply.status_code == 200, reply.text
        await settled(lambda: service.status()["replay"]["replayed"] == len(runs))
        account = service.status()["replay"]
        assert (account["left_out"], account["compared"]) == (0, 6)
        assert account["error"] < 0.03
    finally:
        await service.aclose()
