"""How status and decisions look, at the widths that terminals have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specproxy.cli.banner import banner
from specproxy.cli.tables import print_decision, print_status
from specproxy.cli.text import duration, size
from specproxy.proxy.board import Board
from specproxy.proxy.pairs import pairs_json
from specproxy.proxy.status import Rung, board_json, lane_json
from specproxy.records import Health, Workload
from specproxy.strategies.explain import explained
from tests.proxy.samples import CODE, NGRAM, PLAIN, decision, lane_status, observation


def status(workload: Workload = CODE) -> dict[str, Any]:
    """A status as the service makes it: two lanes, one of them unwell, and some requests."""
    board = Board()
    for n in range(20):
        board.observe(observation(PLAIN, 0.02 + n * 1e-5, workload=workload))
        drafts = {"draft_tokens": 100, "accepted_tokens": 74}
        board.observe(observation(NGRAM, 0.01 + n * 1e-5, workload=workload, **drafts))
    lanes = [
        lane_status(PLAIN),
        lane_status(NGRAM, health=Health.UNHEALTHY, note="was killed by SIGKILL", in_flight=2),
    ]
    upstream = {
        "url": "http://127.0.0.1:11434",
        "reachable": True,
        "kind": "ollama",
        "version": "0.33",
        "models": list("abcde"),
    }
    return {
        "version": "0.1.0",
        "listen": "http://127.0.0.1:8484",
        "uptime_s": 4000.0,
        "policy": {"name": "learner"},
        "rung": Rung(
            2, "lanes of our own", "plain and ngram fit together", ("No lane mtp: no MTP layers.",)
        ).json(),
        "upstreams": [upstream],
        "lanes": [lane_json(lane, {}) for lane in lanes],
        **board_json(board, None),
        "pairs": pairs_json(board, lanes),
    }


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, data: Any
) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_status(data)
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_status_fits_and_says_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """No line is longer than the terminal; every figure is there; intervals only where there is room."""
    text = printed(capsys, monkeypatch, columns, status())
    assert max(map(len, text.splitlines())) <= columns
    flat = " ".join(text.split())
    for part in (
        "ollama 0.33, a, b, c and 2 more",
        "Rung 2 (lanes of our own)",
        "No lane mtp",
        "was killed by SIGKILL",
    ):
        assert part in flat
    rows = ("code plain 20 50% – 49.8", "ngram 20 50% 74% 99.1 1.99x", "1.0 GiB", "unhealthy")
    for part in rows if columns >= 56 else ("code plain 20 49.8", "ngram 20 99.1 1.99x", "ngram unhealthy 2"):
        assert part in flat
    assert ("1.99x (" in flat) is (columns >= 76)
    assert "Decoding saved about 20 s against plain so far." in flat


COMMAND = "specproxy start --upstream http://127.0.0.1:11434 --manage --llama-args '--some-flag with words'"
LONE = Rung(4, "observe", "nothing to choose from", (f"To have more lanes:\n{COMMAND}",)).json()


@pytest.mark.parametrize("columns", [60, 100])
def test_commands_can_be_copied(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """They stand on a line of their own, whole, under the server that they are about, and once."""
    data = status() | {"rung": LONE}
    data["upstreams"][0]["rung"] = LONE
    for lines in (printed(capsys, monkeypatch, columns, data).splitlines(), list(banner(data, columns))):
        assert [line.strip() for line in lines].count(COMMAND) == 1
        assert sum("Rung 4" in line for line in lines) == 1


def test_what_was_looked_at_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every usual place, loaded models, and what is passed through and why."""
    data = status() | {"survey": {"http://127.0.0.1:11434": "ollama", "http://127.0.0.1:8080": ""}}
    data["upstreams"][0] |= {"loaded": ["b"], "passed_through": {"e": "it generates no text"}}
    shown = printed(capsys, monkeypatch, 80, data), "\n".join(banner(data, 80))
    for text in (" ".join(text.split()) for text in shown):
        assert "Looked at http://127.0.0.1:11434 (ollama), http://127.0.0.1:8080 (nobody)" in text
        assert "a, b (loaded), c and 2 more" in text
        assert "Passed through unrouted: e, as it generates no text" in text


def test_a_server_that_loads_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of its models."""
    data = status()
    data["upstreams"][0]["loading"] = True
    assert "ollama, loading its model" in printed(capsys, monkeypatch, 80, data)


def test_status_before_the_first_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle proxy says so instead of showing an empty table."""
    data = status() | {"kinds": [], "workloads": [], "rung": None, "upstreams": [], "lanes": []}
    assert "No request has been measured yet." in printed(capsys, monkeypatch, 80, data)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("waiting", "Lanes will be measured while nothing else goes on: 3 runs so far, 12 s of 2 min"),
        ("running", "Lanes are measured now: 3 runs so far, 12 s of 2 min"),
        ("done", ""),
        ("off", ""),
    ],
)
def test_a_profile_that_is_not_done_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, state: str, said: str
) -> None:
    """What it found when it was done is an event."""
    row = {"target": "m", "lanes": 2, "seconds": 12.0, "runs": 3}
    data = status() | {"profile": {"state": state, "budget_s": 120.0, "targets": [row]}}
    shown = printed(capsys, monkeypatch, 100, data)
    assert said in shown
    assert ("measured now" in shown or "will be measured" in shown) is bool(said)
    nothing = status() | {"profile": {"state": state, "budget_s": 120.0, "targets": []}}
    assert "Lanes " not in printed(capsys, monkeypatch, 100, nothing)


def test_an_upstream_that_is_away_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is there, and that nobody answers."""
    data = status()
    data["upstreams"][0]["reachable"] = False
    assert "Upstream http://127.0.0.1:11434: not reachable" in printed(capsys, monkeypatch, 80, data)


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_decision_names_rule_reason_and_candidates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """What was chosen comes first, then why, then what else there was."""
    monkeypatch.setenv("COLUMNS", str(columns))
    print_decision(explained(decision()))
    text = capsys.readouterr().out
    assert text.splitlines()[:2] == ["code/greedy → ngram", "exploit: ngram is expected to be fastest"]
    assert "0.70 (0.60–0.80)" in text
    assert max(map(len, text.splitlines())) <= columns
    assert ("1.2 (1–1.4) s" in text) is ("0%" in text) is ("Chance" in text) is (columns >= 76)


def test_a_decision_says_what_was_read_and_why_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals in words; replays beside requests; a note beside its lane, or below where there is no room."""
    candidate = replace(decision().candidates[0], replays=7.0, propensity=0.25, allowed=False, note="it loses")
    read = replace(CODE, signals=("text:a few words", "schema"))
    made = replace(decision(), candidates=(candidate,), workload=read)
    for columns, note in ((80, "ngram: it loses"), (120, "25%  it loses")):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_decision(explained(made))
        out = capsys.readouterr().out
        assert "read from text: a few words, schema" in out
        assert "5.0 + 7" in out
        assert note in out


def test_one_is_no_plural(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests in the head and of the evidence of a pair."""
    board = Board()
    board.observe(observation(NGRAM, 0.01, draft_tokens=4, accepted_tokens=3))
    data = status() | board_json(board, None) | {"pairs": pairs_json(board, [lane_status(NGRAM)])}
    out = printed(capsys, monkeypatch, 200, data)
    assert "policy learner, 1 request\n" in out
    assert "on 1 request, 3 of 4 guesses right" in out


def test_no_color_is_respected(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Colour where it is forced, none where NO_COLOR is set too."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in printed(capsys, monkeypatch, 80, status())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in printed(capsys, monkeypatch, 80, status())


@pytest.mark.parametrize("columns", [60, 100])
def test_the_banner_names_address_rung_lanes_and_the_next_step(columns: int) -> None:
    """Wrapped to the terminal."""
    lines = list(banner(status(), columns))
    assert max(map(len, lines)) <= columns
    flat = " ".join(" ".join(lines).split())
    for part in (
        "specproxy 0.1.0 listens at http://127.0.0.1:8484",
        "Rung 2, lanes of our own: plain and ngram fit together",
        "Lane ngram (ngram): unhealthy, 1.0 GiB, was killed by SIGKILL",
        "Point your client at http://127.0.0.1:8484",
    ):
        assert part in flat


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (9.99, "10 s"), (75, "75 s"), (600, "10 min"), (7300, "2.0 h"), (200_000, "2 days")],
)
def test_durations(seconds: float, text: str) -> None:
    """One unit, two figures."""
    assert duration(seconds) == text


def test_sizes() -> None:
    """MiB below a GiB; nothing for nothing."""
    assert [size(0), size(5 * 2**20), size(3 * 2**29)] == ["–", "5 MiB", "1.5 GiB"]


def test_what_pictures_could_gain_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each model and kind of media; none where there were no such requests."""
    told = {"target": "m", "media": "images", "requests": 3, "prefill_share": 0.8, "most_gain": 1.25}
    print_status(status() | {"media": [told]})
    line = "m, 3 requests with images: 80% of their time is the prompt; decoding faster gains 1.25× at most"
    assert line in " ".join(capsys.readouterr().out.split())
    print_status(status())
    assert "requests with" not in capsys.readouterr().out


def test_pairs_stand_on_evidence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter and its target, since when, over how many requests, and what came of it."""
    out = printed(capsys, monkeypatch, 200, status())
    assert "ngram for m.gguf: since 1970-01-01 " in out
    assert "on 20 requests, 1480 of 2000 guesses right (74%), 1.99x plain's speed (" in out


def test_the_gate_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be lost, and the workload on which most of that is."""
    rows = [
        {"target": "m", "workload": key, "lost_s": lost, "allowed_s": allowed, "plain_s": 90.0}
        for key, lost, allowed in (("code/cool", 1.0, 10.0), ("prose/warm", 0.9, 3.0), ("json/cool", -5.0, 1.0))
    ]
    policy = {"name": "learner", "allowance_requests": 1.5, "allowance_share": 0.025}
    out = printed(capsys, monkeypatch, 200, status() | {"policy": policy, "gate": rows})
    said = "Gate: each workload may lose 1.5 of its plain requests' time and 2.5% of plain's; "
    assert f"{said}most of it is lost on prose/warm, 0.9 s of 3 s" in out
    out = printed(capsys, monkeypatch, 200, status() | {"policy": policy, "gate": rows[2:]})
    assert f"{said}none has lost anything" in out
    assert "Gate" not in printed(capsys, monkeypatch, 200, status() | {"policy": policy, "gate": []})


def test_status_tells_what_happened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest events that have a sentence, oldest first; drift and its end by their sentence alone."""
    fell = "acceptance of draft on code fell from 0.74 to 0.31 within 6 requests, after 200 steady ones"
    calm = "the choice of lanes settled 4 requests of code (50 s) after it was noticed that so"
    events = [
        {"at": 90.0 + n, "kind": kind, "subject": subject, "message": message}
        for n, (kind, subject, message) in enumerate(
            [("lane_dropped", "old", "long ago")]
            + [("lane_ready", "mtp", "")] * 7
            + [("lane_unhealthy", "mtp", f"failure {i}") for i in range(4)]
            + [("drift", "fp/draft", fell), ("settled", "fp/draft", calm)]
        )
    ]
    lines = printed(capsys, monkeypatch, 200, status() | {"events": events}).splitlines()
    assert lines[-1].endswith(f": {calm}")
    assert lines[-2].endswith(f": {fell}")
    assert lines[-3].endswith(" lane_unhealthy mtp: failure 3")
    assert not any("long ago" in line or "lane_ready" in line for line in lines)
