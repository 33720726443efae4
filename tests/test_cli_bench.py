"""`specproxy bench`: what is sent where, what is left out, and what the figures say."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specproxy.cli import main
from specproxy.cli.bench_client import Sample, body_of
from specproxy.cli.bench_figures import figures
from specproxy.cli.bench_run import ROUTED, Result, Round, measure
from specproxy.cli.lane_client import Prompt
from specproxy.cli.prompts import read_prompts
from specproxy.errors import BackendError, ConfigError
from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.command import clean_env, run, settled, started

LANES = ("plain", "ngram", "draft")
ARMS = [(lane, lane) for lane in LANES] + [(ROUTED, "")]


def sample(lane: str, total: float, decode: float, tokens: int = 11, **more: Any) -> Sample:
    return Sample(lane, lane, "code/greedy", total, tokens, decode_s=decode, **more)


@dataclass
class Scripted:
    """A proxy that routes everything to `routed`, knows some prompts, and fails on some lanes."""

    routed: str = "ngram"
    known: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()
    sent: list[tuple[str, str | None]] = field(default_factory=list)

    def send(self, path: str, body: dict[str, Any], pin: str | None) -> Sample:
        text = body.get("prompt", "warm up")
        if text != "warm up":
            self.sent.append((text, pin))
        if (pin or self.routed) in self.dead:
            raise BackendError("answered 500")
        return sample(pin or self.routed, 2.0, 1.0)

    def explain(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] == "odd":
            raise BackendError("the proxy answered 400")
        return {"repeat": body["prompt"] in self.known, "workload": f"{body['prompt'][0]}/greedy"}


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt("/v1/completions", {"prompt": text}, line) for line, text in enumerate(texts, 1)]


def measured(sender: Scripted, *texts: str, **how: Any) -> Result:
    return measure(sender, LANES, "m", prompts(*texts), max_tokens=8, **how)


# --- what is sent -----------------------------------------------------------------------------------


def test_every_lane_gets_each_prompt_once() -> None:
    """The routed request counts for the lane that it ran on, which is not asked again."""
    sender = Scripted()
    result = measured(sender, "a1", "a2")
    assert sender.sent[0] == ("a1", None)
    assert sorted(str(pin) for _, pin in sender.sent) == ["None", "None", "draft", "draft", "plain", "plain"]
    for one in result.rounds:
        assert set(one.samples) == {*LANES, ROUTED}
        assert one.samples[ROUTED] is one.samples["ngram"]


def test_lanes_are_interleaved_in_random_order() -> None:
    """Prompt by prompt, and not always the same lane first; a seed gives the same order again."""
    texts = [f"a{n}" for n in range(12)]
    first, second = Scripted(), Scripted()
    measured(first, *texts, seed=3)
    measured(second, *texts, seed=3)
    assert first.sent == second.sent
    assert [text for text, _ in first.sent] == [text for text in texts for _ in range(3)]
    assert {first.sent[i + 1][1] for i in range(0, 36, 3)} == {"plain", "draft"}


def test_repeats_and_known_prompts_are_left_out_by_line() -> None:
    """A lane could copy its earlier answer. With `again` a known prompt is sent, and counts for nothing."""
    sender = Scripted(known=frozenset({"a2"}))
    result = measured(sender, "a1", "a1", "a2")
    assert (result.repeated, result.seen_before) == ([2], [3])
    assert {text for text, _ in sender.sent} == {"a1"}
    again = measured(Scripted(known=frozenset({"a2"})), "a1", "a2", again=True)
    assert [one.seen_before for one in again.rounds] == [False, True]
    assert {row["prompts"] for row in figures(again, ARMS, "plain")["arms"]} == {1}


def test_failures_are_told_by_line_and_lane() -> None:
    """The others go on; a routed request that fails leaves it open which lane has seen the prompt."""
    result = measured(Scripted(dead=frozenset({"draft"})), "a1", "odd")
    assert result.failures == ["line 1, draft: answered 500", "line 2: the proxy answered 400"]
    assert set(result.rounds[0].samples) == {"plain", "ngram", ROUTED}
    lost = Scripted(dead=frozenset({"ngram"}))
    assert measured(lost, "a1").rounds[0].samples == {}
    assert lost.sent == [("a1", None)]


def test_it_stops_when_time_is_up() -> None:
    """Between prompts; how many were not run is told."""
    now = iter(range(100))
    result = measured(Scripted(), "a1", "a2", "a3", seconds=1.5, clock=lambda: float(next(now)))
    assert (len(result.rounds), result.not_run) == (1, 2)


def test_bodies_are_streams_without_a_cache() -> None:
    """What a prompt says of sampling and length stands; other routes' bodies stay as they are."""
    body = body_of(Prompt("/v1/completions", {"prompt": "x", "temperature": 0.7, "stream": False}), "m", 9)
    assert (body["temperature"], body["max_tokens"]) == (0.7, 9)
    assert (body["stream"], body["cache_prompt"]) == (True, False)
    assert "max_tokens" not in body_of(Prompt("/v1/completions", {"n_predict": 3}), "m", 9)
    other = Prompt("/api/chat", {"model": "q", "messages": []})
    assert body_of(other, "m", 9) == {"model": "q", "messages": [], "stream": True}


def test_captured_lines_are_read(tmp_path: Path) -> None:
    """A path and a body, as the proxy writes them."""
    file = tmp_path / "c.jsonl"
    file.write_text('{"path": "/api/chat", "body": {"messages": []}}\n')
    assert [(p.path, p.body, p.line) for p in read_prompts(file)] == [("/api/chat", {"messages": []}, 1)]


# --- what the figures say -----------------------------------------------------------------------------


def rounds(count: int, own: Sample, plain: Sample) -> Result:
    return Result([Round(n, "code", False, {"plain": plain, "ngram": own, ROUTED: own}) for n in range(count)])


def test_decode_and_end_to_end_are_told_apart() -> None:
    """Twice as fast at decoding, which is half of plain's time: a third less end to end. The cap is two."""
    result = rounds(6, sample("ngram", 1.5, 0.5, drafted=8, accepted=6), sample("plain", 2.0, 1.0))
    plain, ngram = figures(result, ARMS[:2], "plain")["arms"]
    assert plain["decode"] is None
    assert 1 / plain["before_decoding"] == pytest.approx(2.0)
    assert ngram["decode"]["speed"] == pytest.approx(2.0)
    assert ngram["end_to_end"]["speed"] == pytest.approx(2.0 / 1.5)
    assert (ngram["end_to_end"]["low"], ngram["end_to_end"]["clusters"]) == (pytest.approx(4 / 3), 6)
    assert (ngram["acceptance"], ngram["tok_s"]) == (0.75, 20.0)


def test_a_longer_answer_is_no_slower_lane() -> None:
    """A text that goes on for longer is compared as if it were as long as plain's."""
    longer = sample("ngram", 3.0, 2.0, tokens=21)
    total = figures(rounds(6, longer, sample("plain", 2.0, 1.0)), ARMS[:2], "plain")["arms"][1]["end_to_end"]
    assert total["speed"] == pytest.approx(1.0)


def test_every_row_says_whether_speculation_was_on() -> None:
    """On, off, or for how many of the routed requests."""
    result = rounds(6, sample("ngram", 1.5, 0.5), sample("plain", 2.0, 1.0))
    data = figures(result, ARMS, "plain")
    said = {row["arm"]: row["speculation"] for row in data["arms"]}
    assert said == {"plain": "off", "ngram": "on", "draft": "on", ROUTED: "on for 6 of 6"}
    assert [row["kind"] for row in data["kinds"]] == ["code"] * 4


# --- the command --------------------------------------------------------------------------------------


def test_broken_lines_are_named_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and every line that is no prompt."""
    file = tmp_path / "p.jsonl"
    file.write_text('"fine"\n{"prompt"\n3\n')
    assert main(["bench", "--prompts", str(file), "--url", "127.0.0.1:1"]) == 2
    err = capsys.readouterr().err
    assert f"{file}, line 2:" in err
    assert f"{file}, line 3: should be a string or an object" in err


def test_nothing_captured_says_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting, by name."""
    monkeypatch.setenv("SPECPROXY_STATE_DIR", str(tmp_path))
    assert main(["bench", "--captured"]) == 2
    assert "capture.requests" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        read_prompts(tmp_path / "captured.jsonl")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("models"), seed=5)


@pytest.fixture(scope="module")
def proxy(
    pair: CalibratedPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, str], str, Path]]:
    """A real proxy with real lanes that keeps what it is sent."""
    folder = tmp_path_factory.mktemp("bench")
    env = clean_env(folder) | {"SPECPROXY_CAPTURE__REQUESTS": "3", "COLUMNS": "160"}
    more = ["--engine", "managed", "--threads", "1", "--ctx", "1024", "--strategies", "ngram"]
    with started(env, "--model", str(pair.target), *more) as (_, url):
        settled(url)
        yield env, url, folder


@pytest.mark.engine
@pytest.mark.timeout(120)
def test_real_lanes_are_measured(proxy: tuple[dict[str, str], str, Path], pair: CalibratedPair) -> None:
    """Table, JSON, Markdown and PNG; the second time nothing is sent. What bench sends is not captured."""
    env, url, folder = proxy
    file = folder / "mine.jsonl"
    texts = [f"words {pair.marker('json', k)}" for k in range(6)]
    file.write_text("".join(json.dumps(text) + "\n" for text in [*texts, texts[0]]))
    out = [str(folder / name) for name in ("b.md", "b.png")]
    args = ["bench", "--url", url, "--prompts", str(file), "--tokens", "12"]
    done = run(env, *args, "--json", "--markdown", out[0], "--png", out[1])
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["used"], data["repeated_lines"], data["failures"]) == (6, [7], [])
    plain, ngram, routed = data["arms"]
    assert [row["prompts"] for row in (plain, ngram, routed)] == [6, 6, 6]
    assert ngram["decode"]["low"] < ngram["decode"]["speed"] < ngram["decode"]["high"]
    assert plain["tokens"] == 6 * 12
    model = data["setup"]["models"][0]
    assert (model["file"], model["quantisation"], model["context"]) == (pair.target.name, "F16", 1024)
    page = Path(out[0]).read_text()
    assert "| all | ngram | on | 6 |" in page
    assert "![speed against plain](b.png)" in page
    assert Path(out[1]).read_bytes().startswith(b"\x89PNG")
    second = run(env, *args)
    assert second.returncode == 1
    assert "sent to this proxy before, left out" in second.stdout
    captured = Path(env["XDG_STATE_HOME"]) / "specproxy" / "captured.jsonl"
    assert not captured.exists()
    body = json.dumps({"prompt": texts[1], "max_tokens": 2}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body), timeout=30).close()
    assert "Lines 1: sent to this proxy before" in run(env, "bench", "--url", url, "--captured").stdout
    assert json.loads(captured.read_text())["body"]["prompt"] == texts[1]
