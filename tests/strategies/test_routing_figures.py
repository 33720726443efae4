"""The figures of bench-routing on made-up samples, and the learning curve's picture."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_routing import Part, Trial, compare, figures
from benchmarks.live import Sample
from specproxy.plot import Line, Panel, write_png

COST = {"code": {"plain": 0.02, "mtp": 0.01}, "prose": {"plain": 0.02, "mtp": 0.03}}


def sample(kind: str, strategy: str, per_token: float, tokens: int = 50) -> Sample:
    """A request that took that long for each token, end to end."""
    return Sample(kind, strategy, f"{kind}/greedy", per_token * tokens, tokens, per_token * (tokens - 1), 0, 0)


def trial(kind: str, strategy: str, spread: float = 0.0, rng: np.random.Generator | None = None) -> Trial:
    """A prompt routed to a strategy, and on both lanes, with noise."""

    def noisy(name: str) -> Sample:
        noise = 1.0 if rng is None else float(np.exp(spread * rng.standard_normal()))
        return sample(kind, name, COST[kind][name] * noise)

    return Trial(noisy(strategy), {name: noisy(name) for name in COST[kind]})


def judged(trials: list[Trial]) -> dict[str, float]:
    """The figures where every request was a trial too."""
    return compare([t.routed for t in trials], trials)


def test_perfect_routing_gains_what_the_oracle_would() -> None:
    """MTP on code, plain on prose: 0.03 s a pair of tokens, where either alone takes 0.04."""
    assert judged([trial("code", "mtp"), trial("prose", "plain")]) == {
        "gain_over_plain": pytest.approx(0.04 / 0.03 - 1.0),
        "gain_over_best_static": pytest.approx(0.04 / 0.03 - 1.0),
        "gap_to_oracle": pytest.approx(0.0),
        "worst_kind_vs_plain": pytest.approx(1.0),
        "null": pytest.approx(1.0),
        "gain_over_plain_as_timed": pytest.approx(0.04 / 0.03 - 1.0),
        "worst_kind_vs_plain_as_timed": pytest.approx(1.0),
    }


def test_bad_routing_shows() -> None:
    """The wrong way round: one and a half times plain's time on prose."""
    found = judged([trial("code", "plain"), trial("prose", "mtp")])
    assert found["gain_over_plain"] == pytest.approx(0.04 / 0.05 - 1.0)
    assert found["gap_to_oracle"] == pytest.approx(0.05 / 0.03 - 1.0)
    assert found["worst_kind_vs_plain"] == pytest.approx(2.0 / 3.0)


def test_requests_without_a_trial_count_by_what_was_chosen() -> None:
    """Ten wrong choices show, although no trial was made of them, and a slow proxy counts for all."""
    trials = [trial("code", "mtp"), trial("prose", "plain")]
    routed = [t.routed for t in trials] + [sample("prose", "mtp", 0.0)] * 10
    assert compare(routed, trials)["worst_kind_vs_plain"] == pytest.approx(11 * 0.02 / (0.02 + 10 * 0.03))
    slow = [Trial(sample(t.kind, t.routed.strategy, 1.1 * t.routed.total_per_token), t.alone) for t in trials]
    found = judged(slow)
    assert found["null"] == pytest.approx(1.1)
    assert found["worst_kind_vs_plain"] == pytest.approx(1.0 / 1.1)


def test_a_stall_on_plain_does_not_pass_for_a_loss() -> None:
    """Where plain was chosen, plain's own time stands on both sides; as timed, the stall shows."""
    trials = [trial("code", "mtp") for _ in range(9)] + [trial("prose", "plain") for _ in range(9)]
    stalled = Trial(sample("prose", "plain", 0.06), trial("prose", "plain").alone)
    found = judged([*trials, stalled])
    assert (found["null"], found["worst_kind_vs_plain"]) == (pytest.approx(1.0), pytest.approx(1.0))
    assert found["worst_kind_vs_plain_as_timed"] == pytest.approx(10 * 0.02 / (9 * 0.02 + 0.06))


def test_every_figure_has_an_interval_around_it() -> None:
    """With noise in every request the value lies within its bounds, and near the truth."""
    rng = np.random.default_rng(1)
    trials = [trial("code", "mtp", 0.1, rng) for _ in range(30)]
    trials += [trial("prose", "plain", 0.1, rng) for _ in range(30)]
    found = figures(
        Part("made up", [t.routed for t in trials], trials, [0.0, 0.02], {"compared": 3, "error": 0.004}), "x_"
    )
    for name in ("gain_over_plain", "gain_over_best_static", "gap_to_oracle", "worst_kind_vs_plain", "null"):
        assert found[f"x_{name}_lo"] < found[f"x_{name}"] < found[f"x_{name}_hi"]
    assert found["x_replay_error"] == 0.01
    assert (found["x_replay_error_by_text"], found["x_replay_compared"]) == (0.004, 3)
    assert found["x_trials"] == 60
    assert found["x_gain_over_plain"] == pytest.approx(1.0 / 3.0, abs=0.1)
    assert found["x_null"] == pytest.approx(1.0, abs=0.05)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    """Whole, of the right size, with the bold curve in it."""
    path = tmp_path / "curve.png"
    lines = [Line("a", [0, 10], [0, 40]), Line("ours", [0, 10], [20, 10], bold=True)]
    write_png(path, [Panel("one", lines, 10.0, 40.0, "requests", "%")] * 4, columns=2)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    at = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[at - 4 : at])
    pixels = zlib.decompress(data[at + 4 : at + 4 + length])
    assert len(pixels) == height * (3 * width + 1)
    assert width == 840
    assert pixels.count(bytes((31, 119, 180))) > 100
    with pytest.raises(ValueError, match="nothing"):
        write_png(path, [])
