"""The figures of bench-routing on made-up samples, and the learning curve's picture."""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_routing import Part, compare, figures, interleave, null_ratio, pools_of, split
from benchmarks.live import Row, Sample
from benchmarks.plot import Line, Panel, write_png

COST = {("code", "plain"): 0.02, ("code", "mtp"): 0.01, ("prose", "plain"): 0.02, ("prose", "mtp"): 0.03}


def sample(kind: str, strategy: str, per_token: float, tokens: int = 50) -> Sample:
    """A request that took that long for each token, end to end."""
    return Sample(kind, strategy, f"{kind}/greedy", per_token * tokens, tokens, per_token * (tokens - 1), 0, 0)


def controls(each: int = 4) -> list[Sample]:
    return [sample(kind, strategy, cost) for (kind, strategy), cost in COST.items() for _ in range(each)]


def test_perfect_routing_gains_what_the_oracle_would() -> None:
    """MTP on code, plain on prose: 0.03 s a pair of tokens, where either alone takes 0.04."""
    routed = [sample("code", "mtp", 0.01), sample("prose", "plain", 0.02)]
    found = compare(routed, pools_of(controls()))
    assert found == {
        "gain_over_plain": pytest.approx(0.04 / 0.03 - 1.0),
        "gain_over_best_static": pytest.approx(0.04 / 0.03 - 1.0),
        "gap_to_oracle": pytest.approx(0.0),
        "worst_kind_vs_plain": pytest.approx(1.0),
    }


def test_bad_routing_shows() -> None:
    """The wrong way round: one and a half times plain's time on prose."""
    routed = [sample("code", "plain", 0.02), sample("prose", "mtp", 0.03)]
    found = compare(routed, pools_of(controls()))
    assert found["gain_over_plain"] == pytest.approx(0.04 / 0.05 - 1.0)
    assert found["gap_to_oracle"] == pytest.approx(0.05 / 0.03 - 1.0)
    assert found["worst_kind_vs_plain"] == pytest.approx(2.0 / 3.0)


def test_every_figure_has_an_interval_around_it() -> None:
    """With noise in requests and controls the value lies within its bounds; empty answers are left out."""
    rng = np.random.default_rng(1)

    def noisy(s: Sample) -> Sample:
        return sample(s.kind, s.strategy, s.total_per_token * float(np.exp(0.1 * rng.standard_normal())))

    routed = [noisy(sample("code", "mtp", 0.01)) for _ in range(30)]
    routed += [noisy(sample("prose", "plain", 0.02)) for _ in range(30)]
    routed.append(sample("prose", "plain", 9.0, tokens=1))
    part = Part("made up", routed, [noisy(s) for s in controls(8)], [0.0, 0.02])
    found = figures(part, "x_")
    for name in ("gain_over_plain", "gain_over_best_static", "gap_to_oracle", "worst_kind_vs_plain"):
        assert found[f"x_{name}_lo"] < found[f"x_{name}"] < found[f"x_{name}_hi"]
    assert found["x_replay_error"] == 0.01
    assert found["x_gain_over_plain"] == pytest.approx(1.0 / 3.0, abs=0.15)


def test_null_is_plain_against_itself() -> None:
    """One where all controls agree."""
    assert null_ratio(pools_of(controls())) == pytest.approx(1.0)
    assert null_ratio({}) == 1.0


def test_controls_are_spread_over_the_run() -> None:
    """So many of each kind on each strategy; routed requests keep their order; nothing is sent twice."""
    rows = [Row(kind, {"n": i}) for i in range(60) for kind in ("code", "prose")]
    spare, rest = split(rows, 6)
    runs = interleave(rest, spare, ["plain", "mtp"], 3, random.Random(1))
    assert [row for row, strategy in runs if strategy is None] == rest
    counted = Counter((row.kind, strategy) for row, strategy in runs if strategy)
    assert counted == {(kind, s): 3 for kind in ("code", "prose") for s in ("plain", "mtp")}
    assert len({id(row) for row, _ in runs}) == len(runs)


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
