"""`specproxy report`: what was served, beside plain requests that are like it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest

from specproxy.cli import main
from specproxy.cli.report_figures import match, report_rows
from specproxy.records import Observation, Outcome, TempBucket, Workload
from specproxy.store.redis import RedisStore
from specproxy.store.sqlite import SqliteStore
from tests.proxy.samples import observation
from tests.support.ports import free_port
from tests.support.redis import running_redis

CODE, PROSE = Workload("code", TempBucket.GREEDY), Workload("prose", TempBucket.GREEDY)


def served(number: int, strategy: str, per_token: float, **changes: object) -> Observation:
    """A complete request of 101 tokens, with 1 s before the first."""
    base = observation(
        request_id=f"{strategy}{number}",
        workload=CODE,
        strategy=strategy,
        target="m",
        outcome=Outcome.COMPLETE,
        rule="exploit",
        output_tokens=101,
        prompt_tokens=100,
        decode_s=100 * per_token,
        total_s=1.0 + 100 * per_token,
        load_s=0.0,
        repeat=False,
        weight=1.0,
        at=time.time(),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]  # tests name fields


def week(plain: int, ngram: int, **changes: object) -> list[Observation]:
    """So many requests on plain, and so many at half its time per token."""
    fast = [served(n, "ngram", 0.01, **changes) for n in range(ngram)]
    return [served(n, "plain", 0.02) for n in range(plain)] + fast


def test_each_request_gets_the_plain_one_that_is_like_it() -> None:
    """Of the same model and workload, nearest in context; none is better than a stranger."""
    near, far = served(1, "plain", 0.02, prompt_tokens=110), served(2, "plain", 0.09, prompt_tokens=9000)
    other = served(3, "plain", 0.01, workload=PROSE)
    foreign = served(4, "plain", 0.01, target="other", prompt_tokens=100)
    mine, lonely = served(5, "ngram", 0.01), served(6, "ngram", 0.01, workload=Workload("math", TempBucket.HOT))
    matched, _ = match([near, far, other, foreign, mine, lonely])
    partners = {one.seen.request_id: one.plain and one.plain.request_id for one in matched}
    assert partners["ngram5"] == "plain1"
    assert partners["ngram6"] is None
    assert partners["plain2"] == "plain2"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"outcome": Outcome.CLIENT_GONE}, "did not end well"),
        ({"repeat": True}, "repeated an earlier prompt"),
        ({"decode_s": None}, "had no timings"),
        ({"load_s": 2.0}, "loaded a model"),
    ],
)
def test_what_cannot_be_compared_is_left_out_and_counted(changes: dict[str, object], why: str) -> None:
    """By reason."""
    matched, left_out = match([served(1, "ngram", 0.01, **changes)])
    assert (matched, left_out) == ([], {why: 1})


def test_figures_of_a_known_gain() -> None:
    """Half of plain's time per token: 2 at decoding, 3 s for 2 s end to end; plain counts as it is."""
    plain, ngram, all_of_it = report_rows(match(week(10, 10))[0])["arms"]
    assert (plain["speculation"], ngram["speculation"]) == ("off", "on")
    assert all_of_it["speculation"] == "on for 10 of 20"
    assert plain["end_to_end"] is None
    assert ngram["decode"]["speed"] == pytest.approx(2.0)
    assert ngram["end_to_end"]["speed"] == pytest.approx(1.5)
    assert all_of_it["end_to_end"]["speed"] == pytest.approx(60 / 50)
    assert all_of_it["end_to_end"]["saved_s"] == pytest.approx(10.0)


def test_sharing_one_partner_is_no_evidence() -> None:
    """A hundred requests beside a single plain one: a speed, and no interval."""
    seen = [served(0, "plain", 0.02)] + [served(n, "ngram", 0.01) for n in range(100)]
    ngram = report_rows(match(seen)[0])["arms"][1]
    assert ngram["decode"]["speed"] == pytest.approx(2.0)
    assert (ngram["decode"]["clusters"], ngram["decode"]["low"]) == (1, None)


def test_the_interval_holds_a_known_truth() -> None:
    """Noise on both sides, over repeated weeks: the truth is inside about as often as promised."""
    held = 0
    for seed in range(60):
        r = np.random.default_rng(seed)
        seen = [
            served(n, name, mean * r.lognormal(0, 0.15), prompt_tokens=int(r.integers(50, 500)))
            for name, mean in (("plain", 0.02), ("ngram", 0.016))
            for n in range(60)
        ]
        found = report_rows(match(seen)[0])["arms"][1]["decode"]
        held += found["low"] <= 1.25 <= found["high"]
    assert held >= 51


def test_pinned_requests_are_not_what_the_proxy_chose() -> None:
    """They count for their strategy alone."""
    _, ngram, all_of_it = report_rows(match(week(6, 6, rule="pin"))[0])["arms"]
    assert (ngram["prompts"], all_of_it["prompts"]) == (6, 6)


# --- the command --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SPECPROXY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SPECPROXY_PORT", str(free_port()))
    monkeypatch.setenv("COLUMNS", "150")
    return tmp_path / "state"


def test_without_statistics_it_says_how_to_start(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    """Exit code 1, and no file is made."""
    assert main(["report"]) == 1
    assert "`specproxy start`" in capsys.readouterr().err
    assert not state.exists()


def test_a_week_is_reported(capsys: pytest.CaptureFixture[str], state: Path, tmp_path: Path) -> None:
    """From the file, without a proxy; what is older is not in it. Markdown, PNG and JSON hold the same."""
    store = SqliteStore(state / "state.db")
    old = served(99, "ngram", 5.0, at=time.time() - 8 * 86_400)
    store.append([old, *week(8, 8)])
    store.close()
    page, picture = tmp_path / "r.md", tmp_path / "r.png"
    assert main(["report", "--markdown", str(page), "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Last 7 days: 16 requests. Against always plain, specproxy saved about 8 s")
    assert "100% sure" in out
    assert "no proxy is running" in out
    assert "| all | ngram | on | 8 |" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["report", "--json", "--days", "30"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["requests"] == 17
    assert data["arms"][1]["decode"]["speed"] < 1


@pytest.mark.redis
def test_a_shared_store_is_reported_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What all proxies on a Redis have served."""
    with running_redis(str(tmp_path)) as server:
        for _ in range(2):
            RedisStore(server.url).append(week(4, 4))
        monkeypatch.setenv("SPECPROXY_STORE", server.url)
        assert main(["report"]) == 0
    assert capsys.readouterr().out.startswith("Last 7 days: 16 requests.")


def test_nothing_to_compare_is_said(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    """Instead of a figure."""
    SqliteStore(state / "state.db").close()
    assert main(["report"]) == 0
    assert "none of which can be compared with plain" in capsys.readouterr().out
