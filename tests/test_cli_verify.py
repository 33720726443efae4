"""`specproxy verify` against lanes that say what a test tells them, and against real ones."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specproxy.cli import main
from specproxy.cli.lane_client import LaneClient, Prompt, Said, positions_of
from specproxy.cli.prompts import BUILT_IN, read_prompts
from specproxy.cli.verify_run import LaneUnderTest, run
from specproxy.errors import BackendError, ConfigError
from specproxy.strategies.verify import LaneReport, Position, Verdict

PLAIN = LaneUnderTest("plain", "plain", "m@1", "m")
NGRAM = LaneUnderTest("ngram", "ngram", "m@1", "m")
PROMPTS = tuple(Prompt("/v1/completions", {"prompt": f"p{n}"}) for n in range(4))
WORDS = [f" w{n}" for n in range(20)]


def tokens(words: Sequence[str], gap: float) -> list[Position]:
    """Each word with a rival `gap` nats behind: the word with a bang."""
    return [
        Position(w.encode(), -0.1, ((w.encode(), -0.1), (f"{w[:1]}!{w[1:]}".encode(), -0.1 - gap)))
        for w in words
    ]


@dataclass
class Scripted:
    """Lanes that say `WORDS`, but for the words that `wrong` names by lane, prompt, run and word."""

    wrong: dict[tuple[str, str, int, int], str] = field(default_factory=dict)
    gap: float = 6.0
    dead: frozenset[str] = frozenset()
    without_logprobs: bool = False
    asked: list[tuple[str, str, bool]] = field(default_factory=list)

    def say(self, lane: str, model: str, prompt: Prompt, *, logprobs: bool = False) -> Said:
        if lane in self.dead:
            raise BackendError("answered 500: broken")
        assert model == "m"
        text = prompt.body["prompt"]
        number = self.asked.count((lane, text, False))
        self.asked.append((lane, text, logprobs))
        if logprobs:
            if self.without_logprobs:
                raise BackendError("answered 400: no logprobs here")
            return Said("".join(WORDS).encode(), len(WORDS), tuple(tokens(WORDS, self.gap)))
        words = [self.wrong.get((lane, text, number, k), word) for k, word in enumerate(WORDS)]
        return Said("".join(words).encode(), len(words))


def verified(speaker: Scripted, lanes: Sequence[LaneUnderTest] = (PLAIN, NGRAM)) -> dict[str, LaneReport]:
    return {report.lane: report for report in run(speaker, lanes, PROMPTS).reports}


def test_lanes_that_agree_are_the_same() -> None:
    """Every prompt goes twice to every lane, one at a time; plain tells how sure it was."""
    speaker = Scripted()
    reports = verified(speaker)
    assert {report.verdict for report in reports.values()} == {Verdict.SAME}
    assert speaker.asked[:4] == [
        ("plain", "p0", False),
        ("plain", "p0", False),
        ("ngram", "p0", False),
        ("ngram", "p0", False),
    ]
    assert speaker.asked[4] == ("plain", "p0", True)
    assert len(speaker.asked) == 20
    assert reports["ngram"].tokens == 80


def both(lane: str, prompt: str, word: int, text: str) -> dict[tuple[str, str, int, int], str]:
    return {(lane, prompt, number, word): text for number in (0, 1)}


@pytest.mark.parametrize(("gap", "verdict"), [(0.01, Verdict.TIES), (6.0, Verdict.FAULT)])
def test_a_bad_accept_is_a_fault_and_a_tie_is_none(gap: float, verdict: Verdict) -> None:
    """The same wrong word, where plain was undecided and where it was sure."""
    report = verified(Scripted(both("ngram", "p2", 5, " !w5"), gap))["ngram"]
    assert (report.verdict, report.unsteady) == (verdict, 0)
    assert [(fork.prompt, fork.token) for fork in report.forks] == [(2, 5)]
    assert report.tokens == 60 + 5


def test_a_fault_that_shows_only_the_second_time_is_found() -> None:
    """Both answers are judged."""
    report = verified(Scripted({("ngram", "p1", 1, 3): " !w3"}))["ngram"]
    assert (report.verdict, report.unsteady) == (Verdict.FAULT, 1)


def test_plains_own_noise_is_calibrated() -> None:
    """Plain is compared with itself: unsteady at ties is told, unsteady elsewhere is a fault of its own."""
    wobble = {("plain", "p0", 1, 2): " !w2"}
    tie, fault = verified(Scripted(wobble, 0.01))["plain"], verified(Scripted(wobble))["plain"]
    assert (tie.verdict, tie.unsteady) == (Verdict.TIES, 1)
    assert fault.verdict is Verdict.FAULT


def test_noise_of_plain_widens_what_counts_as_a_tie() -> None:
    """It is within what plain does itself; another lane's noise is told, and excuses nothing."""
    wobble = {("plain", "p0", 1, 2): " !w2"} | both("ngram", "p1", 4, " !w4")
    found = run(Scripted(wobble, 0.6), [PLAIN, NGRAM], PROMPTS)
    assert found.tie_gap == pytest.approx(0.9)
    assert [(r.verdict, r.noise) for r in found.reports] == [
        (Verdict.TIES, pytest.approx(0.6)),
        (Verdict.TIES, None),
    ]
    unsteady = run(Scripted({("ngram", "p0", 1, 2): " !w2"}, 0.6), [PLAIN, NGRAM], PROMPTS)
    assert unsteady.tie_gap == 0.5
    assert (unsteady.reports[1].verdict, unsteady.reports[1].noise) == (Verdict.FAULT, pytest.approx(0.6))


def test_without_log_probabilities_a_difference_is_unknown() -> None:
    """Not a tie; and why is said."""
    assert verified(Scripted(without_logprobs=True))["plain"].verdict is Verdict.SAME
    reports = verified(Scripted(both("ngram", "p0", 0, " !w0"), without_logprobs=True))
    assert reports["ngram"].verdict is Verdict.UNKNOWN
    assert "no logprobs here" in reports["plain"].failures[0]


@pytest.mark.parametrize("lane", ["plain", "ngram"])
def test_a_lane_that_fails_is_not_called_good(lane: str) -> None:
    """Its failures are told; without plain nothing can be said of the others."""
    reports = verified(Scripted(dead=frozenset({lane})))
    assert reports[lane].verdict is Verdict.NOT_RUN
    assert reports[lane].failures[0] == "prompt 1: answered 500: broken"
    assert reports["ngram"].verdict is Verdict.NOT_RUN
    assert reports["plain"].verdict is (Verdict.SAME if lane == "ngram" else Verdict.NOT_RUN)


# --- prompts ----------------------------------------------------------------------------------------


def test_prompts_of_three_shapes(tmp_path: Path) -> None:
    """Text, an object with a prompt, and a chat; empty lines are left out."""
    file = tmp_path / "p.jsonl"
    lines = [
        '"one"',
        "",
        '{"prompt": "two", "stop": ["x"]}',
        '{"messages": [{"role": "user", "content": "3"}]}',
    ]
    file.write_text("\n".join(lines) + "\n")
    one, two, three = read_prompts(file)
    assert (one.path, one.body) == ("/v1/completions", {"prompt": "one"})
    assert (two.path, two.body["stop"]) == ("/v1/completions", ["x"])
    assert three.path == "/v1/chat/completions"


def test_broken_lines_are_named(tmp_path: Path) -> None:
    """By number, all at once, but not without end."""
    file = tmp_path / "p.jsonl"
    file.write_text('"fine"\n{"prompt"\n3\n{"text": "x"}\n{"messages": []}\n[]\n{}\nnull\n')
    with pytest.raises(ConfigError) as caught:
        read_prompts(file)
    lines = caught.value.message.splitlines()
    assert [line.split(":")[0].rsplit(" ", 1)[-1] for line in lines[:5]] == ["2", "3", "4", "5", "6"]
    assert "should be a string or an object" in lines[1]
    assert lines[5].endswith("2 more lines are broken")


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), (b"\n", "holds no"), (b"\xff", "UTF-8")]
)
def test_files_without_prompts(tmp_path: Path, content: bytes | None, says: str) -> None:
    """Missing, empty or no text."""
    file = tmp_path / "p.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_prompts(file)


def test_built_in_prompts_are_chats() -> None:
    """Every server that takes chats can be verified with them."""
    assert len({prompt.body["messages"][0]["content"] for prompt in BUILT_IN}) == len(BUILT_IN) >= 10


# --- over HTTP ----------------------------------------------------------------------------------------

CONTENT = [{"token": "?", "bytes": [32, 97], "logprob": -0.1, "top_logprobs": []}]
LEGACY = {"tokens": [" a"], "token_logprobs": [None], "top_logprobs": [{" a": -0.1, " b": -2}]}


def test_log_probabilities_of_both_shapes() -> None:
    """Bytes where they are told, since a token may be half a character; odd shapes give nothing."""
    assert positions_of({"content": CONTENT}) == (Position(b" a", -0.1, ()),)
    told = positions_of(LEGACY)
    assert (told[0].text, told[0].top) == (b" a", ((b" a", -0.1), (b" b", -2.0)))
    for odd in (
        None,
        [],
        {},
        {"content": [{}]},
        {"content": 3},
        {"tokens": ["a"]},
        LEGACY | {"tokens": ["a", "b"]},
    ):
        assert positions_of(odd) == ()


class FakeProxy(BaseHTTPRequestHandler):
    """Two lanes; `server.corrupt` changes what the ngram lane says, `server.elsewhere` is where it runs."""

    server: Any

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        rows = [
            {
                "id": name,
                "strategy": name,
                "health": "ready",
                "target": "m@1",
                "models": [],
                "fingerprint": "fp",
            }
            for name in ("plain", "ngram", "mtp")
        ]
        rows[1]["health"] = "quarantined" if self.server.held else "ready"
        rows[2]["health"] = "starting"
        held = (
            [{"lane": "ngram", "fingerprint": "fp", "at": 1e9, "reason": "4.9 nats"}]
            if self.server.held
            else []
        )
        self.reply({"lanes": rows, "requests": {"in_flight": self.server.busy}, "quarantine": held}, "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/specproxy/api/"):
            if self.server.refuses:
                self.reply({"error": self.server.refuses}, "", 404)
                return
            self.server.told.append((self.path.rpartition("/")[2], body))
            self.reply({}, "")
            return
        assert self.headers["X-Specproxy-Verify"] == "1"
        lane = self.headers["X-Specproxy-Strategy"]
        self.server.asked.append((lane, body, self.headers["X-Specproxy-Token"]))
        text = "yes, of course" if lane == "plain" or not self.server.corrupt else self.server.corrupt
        choice: dict[str, Any] = {"message": {"content": text}}
        if body.get("logprobs"):
            top = [{"token": t, "logprob": v} for t, v in (("yes", -0.1), ("no", -5.0))]
            rest = {"token": ", of course", "logprob": -0.1, "top_logprobs": []}
            choice["logprobs"] = {"content": [{"token": "yes", "logprob": -0.1, "top_logprobs": top}, rest]}
        lane = self.server.elsewhere or lane
        self.reply({"choices": [choice], "usage": {"completion_tokens": self.server.tokens}}, lane)

    def reply(self, data: object, lane: str, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("X-Specproxy-Lane", lane)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def fake_proxy(
    corrupt: str = "", elsewhere: str = "", busy: int = 0, *, held: bool = False, tokens: int = 2
) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeProxy) as server:
        server.corrupt, server.elsewhere, server.busy, server.asked = corrupt, elsewhere, busy, []  # type: ignore[attr-defined]  # for the handler
        server.held, server.tokens, server.told, server.refuses = held, tokens, [], {}  # type: ignore[attr-defined]  # for the handler
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def verify(capsys: pytest.CaptureFixture[str], server: Any, *args: str) -> tuple[int, str, str]:
    code = main(["verify", "--url", f"http://127.0.0.1:{server.server_port}", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_says_that_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0; greedy, pinned, unstreamed requests without a prompt cache; no lane that isn't ready."""
    with fake_proxy(busy=2) as server:
        code, out, err = verify(capsys, server, "--tokens", "7")
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()[2:4]] == [["plain", "same"], ["ngram", "same"]]
    assert "2 other requests were in flight" in out
    lane, body, _ = server.asked[-2]
    assert lane == "ngram"
    assert (body["temperature"], body["max_tokens"], body["stream"], body["cache_prompt"]) == (
        0,
        7,
        False,
        False,
    )
    assert len(server.asked) == 5 * len(BUILT_IN)
    assert server.told == []


def test_the_command_finds_corrupted_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, the place, the gap, and what to do; as JSON too. The token of the configuration is sent."""
    monkeypatch.setenv("SPECPROXY_TOKEN", "s3cret")
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with fake_proxy("no, never") as server:
        code, out, _ = verify(capsys, server, "--prompts", str(file))
        as_json = verify(capsys, server, "--prompts", str(file), "--json", "--lane", "ngram")
    assert code == 1
    assert "ngram: prompt 1, token 1: plain's own token was 4.90 nats likelier" in out
    assert "ngram is in quarantine now" in out
    name, sentence = server.told[0]
    assert (name, sentence["lane"], sentence["fingerprint"]) == ("quarantine", "ngram", "fp")
    assert "verify: 1 of 1 texts differ" in sentence["reason"]
    assert "token 1) its own token was 4.90 nats likelier" in sentence["reason"]
    data = json.loads(as_json[1])
    assert (as_json[0], data["ok"], data["lanes"][1]["verdict"]) == (1, False, "fault")
    assert data["lanes"][1]["forks"][0]["gap"] == pytest.approx(4.9)
    assert {token for _, _, token in server.asked} == {"s3cret"}


@pytest.mark.parametrize("columns", [40, 60, 140])
def test_the_outcome_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Verdict and faults are readable at any width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with fake_proxy("no, never") as server:
        _, out, _ = verify(capsys, server)
    assert max(map(len, out.splitlines())) <= columns
    assert re.search(r"^ngram +fault +(\d+ +)?0 +12 +0 *$", out, re.M)


def test_looking_only_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """And says what can be done."""
    with fake_proxy("no, never") as server:
        code, out, _ = verify(capsys, server, "--no-quarantine")
    assert (code, server.told) == (1, [])
    assert "specproxy quarantine add ngram" in " ".join(out.split())


@pytest.mark.parametrize(("tokens", "told"), [(30, ["lift"]), (2, [])])
def test_a_clean_run_lifts_quarantine_if_it_is_long_enough(
    capsys: pytest.CaptureFixture[str], tokens: int, told: list[str]
) -> None:
    """Too few tokens prove nothing."""
    with fake_proxy(held=True, tokens=tokens) as server:
        code, out, _ = verify(capsys, server)
    assert code == 0
    assert [name for name, _ in server.told] == told
    assert ("ngram is out of quarantine." if told else "ngram stays in quarantine") in out


def test_a_lane_in_quarantine_that_errs_again_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """With what was found now."""
    with fake_proxy("no, never", held=True) as server:
        assert verify(capsys, server)[0] == 1
    assert [name for name, _ in server.told] == ["quarantine"]


def test_quarantine_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Listed, added and lifted."""
    with fake_proxy(held=True) as server:
        at = ["--url", f"http://127.0.0.1:{server.server_port}"]
        assert main(["quarantine", "list", *at]) == 0
        assert "ngram, since 2001-09-0" in capsys.readouterr().out
        assert main(["quarantine", "list", "--json", *at]) == 0
        assert json.loads(capsys.readouterr().out)[0]["reason"] == "4.9 nats"
        assert main(["quarantine", "lift", "ngram", *at]) == 0
        assert main(["quarantine", "add", "ngram", "--reason", "odd text", *at]) == 0
        assert server.told == [
            ("lift", {"lane": "ngram"}),
            ("quarantine", {"lane": "ngram", "reason": "odd text"}),
        ]
        server.refuses = {"message": "there is no lane x", "type": "no_such_lane"}
        assert main(["quarantine", "lift", "x", *at]) == 1
        assert capsys.readouterr().err == "specproxy: there is no lane x\n"
    with fake_proxy() as server:
        assert main(["quarantine", "list", "--url", f"http://127.0.0.1:{server.server_port}"]) == 0
    assert "No lane is in quarantine." in capsys.readouterr().out


def test_text_from_another_lane_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A hazard or a fallback may send a request elsewhere: that is a failure, not agreement."""
    with fake_proxy(elsewhere="plain") as server:
        code, out, _ = verify(capsys, server)
    assert code == 1
    assert "ngram: prompt 1: it ran on plain instead" in out
    assert "and 7 more" in out


def test_an_unknown_lane_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With those that are ready."""
    with fake_proxy() as server:
        code, _, err = verify(capsys, server, "--lane", "mtp")
    assert code == 2
    assert "no ready lane is called mtp" in err
    assert "ngram, plain" in err


def test_what_is_no_answer_is_told() -> None:
    """An upstream's error, and an address where nobody listens."""
    with fake_proxy() as server:
        client = LaneClient(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(BackendError, match="cannot be read"):
            client.say("plain", "m", Prompt("/v1/completions", {"prompt": "x"}))
    with pytest.raises(BackendError, match="gave no answer"):
        client.say("plain", "m", PROMPTS[0])
