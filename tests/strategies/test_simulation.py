"""The learner's simulation: worlds are read strictly, costs are what they say, and the oracle is the best."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_learner import Outcome, gap, recovery
from benchmarks.sim import informed_path, oracle_path, play
from benchmarks.stream import draw_stream, mean_ratio
from benchmarks.world import World, WorldError, load_worlds
from specproxy.strategies.baselines import AlwaysPlain, FixedLane, ThompsonOnly
from specproxy.strategies.learner import Learner

WORLDS = Path(__file__).parents[2] / "benchmarks" / "worlds"


def world(**changes: Any) -> dict[str, Any]:
    """A small valid world as JSON data."""
    return {
        "format": "specproxy-world/1",
        "name": "small",
        "plain": {"tokens_per_s": 50, "prefill_tokens_per_s": 500},
        "noise": {"request": 0.05, "swing": 0.0, "stall_share": 0.0},
        "lanes": [{"id": "plain", "strategy": "plain"}, {"id": "mtp", "strategy": "mtp:3"}],
        "kinds": [
            {"kind": "code", "share": 0.5, "lanes": {"mtp": {"ratio": 0.5, "accept": 0.8}}},
            {"kind": "prose", "share": 0.5, "lanes": {"mtp": {"ratio": 1.5, "accept": 0.3}}},
        ],
        **changes,
    }


def reload_world(load_s: float) -> World:
    lanes = [
        {"id": name, "strategy": name, "control": "reload", "backend": "b", "load_s": load_s}
        for name in ("plain", "mtp")
    ]
    return World.model_validate(world(lanes=lanes))


def test_every_world_that_ships_is_valid() -> None:
    """The files of the benchmark can be read, and their names are those of the files."""
    worlds = load_worlds(WORLDS)
    assert [w.name for w in worlds] == sorted(path.stem for path in WORLDS.glob("*.json"))
    assert len(worlds) >= 5


def test_the_example_of_the_readme_is_valid() -> None:
    """The documented format is the format."""
    text = (WORLDS / "README.md").read_text(encoding="utf-8")
    World.model_validate(json.loads(text.split("```json")[1].split("```")[0]))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"colour": "red"}, "colour"),
        ({"format": "specproxy-world/2"}, "format"),
        ({"lanes": [{"id": "mtp", "strategy": "mtp"}]}, "no plain lane"),
        ({"lanes": [{"id": "plain", "strategy": "plain"}] * 2}, "same id"),
        ({"events": [{"after": 3, "lane": "draft"}]}, "unknown lane draft"),
        ({"kinds": [{"kind": "code", "share": 1, "lanes": {"mtp": {"sd": 0.1}}}]}, "exactly one of"),
        ({"kinds": [{"kind": "code", "share": 1, "lanes": {"mtp": {"hits": 0.1, "accept": 0.5}}}]}, "n-gram"),
        ({"absences": [{"lane": "draft", "after": 3, "until": 5}]}, "unknown lane draft"),
        ({"absences": [{"lane": "mtp", "after": 3, "until": 3}]}, "until must be above after"),
        ({"absences": [{"lane": "mtp", "after": 3, "until": 9, "every": 6}]}, "every must be longer"),
        ({"absences": [{"lane": x, "after": 3, "until": 9} for x in ("plain", "mtp")]}, "one lane has to stay"),
        ({"traffic": {"in_flight": []}}, "traffic.in_flight"),
        ({"traffic": {"in_flight": [[0, 1.0]]}}, "traffic.in_flight.0.0"),
        ({"traffic": {"in_flight": [[1, 0.0]]}}, "traffic.in_flight.0.1"),
        ({"noise": {"swing_requests": 0}}, "noise.swing_requests"),
        ({"noise": {"request": -0.1}}, "noise.request"),
        ({"plain": {"tokens_per_s": float("inf"), "prefill_tokens_per_s": 500}}, "plain.tokens_per_s"),
        ({"lanes": [{"id": "plain", "strategy": "plain"}, {"id": "mtp", "strategy": "mtp:x"}]}, "mtp:x"),
        ({"lanes": [{"id": "plain", "strategy": "plain"}, {"id": "mtp", "strategy": ""}]}, "empty strategy"),
        ({"lanes": [{"id": "plain", "strategy": "plain", "verify": [[4, 2], [1, 1]]}]}, "widths must ascend"),
        ({"lanes": [{"id": "plain", "strategy": "plain", "verify": []}]}, "lanes.0.verify"),
        ({"kinds": [{"kind": "code", "share": 1}] * 2}, "two kinds have the same name"),
        ({"kinds": [{"kind": "a/b", "share": 1}]}, "kinds.0.kind"),
        ({"kinds": [{"kind": "code", "share": 1, "limit": 0}]}, "kinds.0.limit"),
        ({"events": [{"after": 1, "lane": "mtp", "kinds": ["poem"]}]}, "unknown kind poem"),
        (
            {
                "lanes": [
                    {"id": "plain", "strategy": "plain", "control": "reload", "backend": "a"},
                    {"id": "mtp", "strategy": "mtp", "control": "reload", "backend": "b"},
                ]
            },
            "only one backend may be under reload control",
        ),
    ],
)
def test_bad_worlds_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    """The message names the file and what is wrong with it."""
    (tmp_path / "bad.json").write_text(json.dumps(world(**changes)), encoding="utf-8")
    with pytest.raises(WorldError, match=rf"bad\.json.*{told}"):
        load_worlds(tmp_path)


def test_no_worlds_and_no_json(tmp_path: Path) -> None:
    """An empty folder and a file that is not JSON are told apart."""
    with pytest.raises(WorldError, match="no world files"):
        load_worlds(tmp_path)
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    with pytest.raises(WorldError, match=r"a\.json"):
        load_worlds(tmp_path)


def test_two_worlds_of_one_name(tmp_path: Path) -> None:
    """Their figures would be mixed up."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(world()))
    with pytest.raises(WorldError, match=r"b\.json: another file has a world of the name small"):
        load_worlds(tmp_path)


def test_a_seed_fixes_everything() -> None:
    """The same seed gives the same requests, another seed others; a longer stream begins like a shorter
    one's."""
    small = World.model_validate(world())
    one, two, other = draw_stream(small, 50, 1), draw_stream(small, 50, 1), draw_stream(small, 50, 2)
    assert np.array_equal(one.cost_s, two.cost_s)
    assert not np.array_equal(one.cost_s, other.cost_s)
    assert np.array_equal(one.head(20).cost_s, one.cost_s[:20])
    assert len(one.head(20)) == 20


def test_observed_ratios_average_to_the_truth() -> None:
    """What a lane takes on single requests varies around the mean that a policy is charged."""
    small = World.model_validate(world())
    stream = draw_stream(small, 4000, 3)
    for kind, mean in ((0, 0.5), (1, 1.5)):
        assert float(stream.ratio[stream.kinds == kind, 1].mean()) == pytest.approx(mean, rel=0.02)
    assert float(stream.noise.mean()) == pytest.approx(1.0, abs=0.01)


def test_ngram_lanes_follow_from_their_drafts() -> None:
    """Mean ratios agree with the drawn requests, and replays say what those requests took."""
    kinds = [{"kind": "code", "share": 1, "lanes": {"ngram": {"hits": 0.4, "accept": 0.8, "first": 0.9}}}]
    lanes = [{"id": "plain", "strategy": "plain"}, {"id": "ngram", "strategy": "ngram:8"}]
    spoken = World.model_validate(world(lanes=lanes, kinds=kinds))
    stream = draw_stream(spoken, 1500, 4)
    assert float(stream.ratio[:, 1].mean()) == pytest.approx(mean_ratio(spoken, 1, 0), rel=0.03)
    assert all(1 in drafts and len(drafts[1]) == 9 for drafts in stream.drafts)
    share = 0.9 * sum(0.8**j for j in range(8)) / 8
    assert float(stream.accepted[:, 1].mean()) == pytest.approx(share, rel=0.05)


def test_charges() -> None:
    """A policy is charged the lane's mean on the request; always plain costs plain's column."""
    small = World.model_validate(world())
    stream = draw_stream(small, 40, 5)
    assert np.allclose(play(stream, AlwaysPlain(), 1).cost_s, stream.cost_s[:, 0])
    assert np.allclose(play(stream, FixedLane("mtp"), 1).cost_s, stream.cost_s[:, 1])
    assert np.allclose(oracle_path(stream), stream.cost_s.min(axis=1))


def test_loads_are_charged_where_lanes_change() -> None:
    """The first lane is resident at the start; every change costs a load."""
    stream = draw_stream(reload_world(6.0), 10, 6)
    run = play(stream, FixedLane("mtp"), 1)
    assert run.cost_s[0] == pytest.approx(stream.cost_s[0, 1] + 6.0)
    assert np.allclose(run.cost_s[1:], stream.cost_s[1:, 1])


@pytest.mark.parametrize("load_s", [0.5, 3.0, 50.0])
def test_oracle_path_is_the_cheapest(load_s: float) -> None:
    """Against all sequences of lanes on a short stream."""
    stream = draw_stream(reload_world(load_s), 9, 7)

    def cost(path: tuple[int, ...]) -> float:
        loads = sum(a != b for a, b in itertools.pairwise((0, *path)))
        return float(sum(stream.cost_s[i, lane] for i, lane in enumerate(path)) + load_s * loads)

    best = min(cost(path) for path in itertools.product((0, 1), repeat=9))
    assert float(oracle_path(stream).sum()) == pytest.approx(best)


def test_all_that_can_be_known_lies_between_the_oracle_and_any_lane() -> None:
    """With free loads there is nothing to foresee; with dear ones nothing to switch; between, runs matter."""
    for load_s, exact in ((0.0, True), (3.0, False), (1e4, True)):
        stream = draw_stream(reload_world(load_s), 400, 7)
        known, oracle = float(informed_path(stream).sum()), float(oracle_path(stream).sum())
        fixed = [float(play(stream, FixedLane(name), 1).cost_s.sum()) for name in ("plain", "mtp")]
        assert oracle <= known + 1e-6
        assert known <= min(fixed) * 1.01
        assert (known == pytest.approx(oracle)) == exact


def test_events_change_lanes() -> None:
    """From its request on an event multiplies the lane's cost, on its kinds only."""
    events = [{"after": 100, "lane": "mtp", "kinds": ["code"], "ratio": 2.0}]
    calm, changed = (draw_stream(World.model_validate(world(events=e)), 200, 8) for e in ([], events))
    factor = changed.ratio[:, 1] / calm.ratio[:, 1]
    hit = (np.arange(200) >= 100) & (calm.kinds == 0)
    assert np.allclose(factor[hit], 2.0)
    assert np.allclose(factor[~hit], 1.0)


def test_lanes_that_are_away_are_not_chosen() -> None:
    """Neither by the oracle nor by any policy; they are chosen again when they are back."""
    away = [
        {"lane": "mtp", "after": 20, "until": 30, "every": 50},
        {"lane": "plain", "after": 60, "until": 65},
    ]
    names = {"plain": "plain", "mtp": "mtp:3", "draft": "draft"}
    lanes = [{"id": name, "strategy": strategy} for name, strategy in names.items()]
    small = World.model_validate(world(lanes=lanes, absences=away))
    gone = [i for i in range(150) if small.away("mtp", i)]
    assert gone == [*range(20, 30), *range(70, 80), *range(120, 130)]
    assert [i for i in range(150) if small.away("plain", i)] == list(range(60, 65))
    stream = draw_stream(small, 150, 3)
    assert np.isinf(stream.cost_s[gone, 1]).all()
    assert np.isfinite(oracle_path(stream)).all()
    for policy in (FixedLane("mtp"), AlwaysPlain(), Learner()):
        run = play(stream, policy, 1)
        assert np.isfinite(run.cost_s).all()
        assert (run.lanes[gone] != 1).all()
        assert (run.lanes[60:65] != 0).all()
        if not isinstance(policy, AlwaysPlain):
            assert (run.lanes[80:120] == 1).any()


def test_loads_go_around_lanes_that_are_away() -> None:
    """Under reload control another lane is in memory meanwhile, and the path of least cost pays for it."""
    lanes = [
        {"id": name, "strategy": name, "control": "reload", "backend": "b", "load_s": 2.0}
        for name in ("plain", "mtp")
    ]
    absent = [{"lane": "plain", "after": 10, "until": 20}]
    stream = draw_stream(World.model_validate(world(lanes=lanes, absences=absent)), 40, 3)
    run = play(stream, Learner(), 1)
    assert (run.lanes[10:20] == 1).all()
    assert oracle_path(stream).sum() <= run.cost_s.sum() < np.inf


def test_observations_wait_for_the_request_to_end() -> None:
    """With four requests in flight a policy chooses three times more before it learns of the first."""
    traffic = {"in_flight": [[4, 1.0]]}
    stream = draw_stream(World.model_validate(world(traffic=traffic)), 30, 9)
    learned: list[int] = []

    class Watching(ThompsonOnly):
        def learn_one(self, observation: Any) -> None:
            learned.append(int(observation.request_id))
            super().learn_one(observation)

        def choose(self, situation: Any, rng: Any) -> Any:
            assert len(learned) == max(0, int(situation.request_id) - 3)
            return super().choose(situation, rng)

    play(stream, Watching(), 1)


def test_learner_is_played_with_replay_and_timed() -> None:
    """The learner runs through a world with every option, and beats always-plain where a lane wins."""
    small = World.model_validate(world())
    stream = draw_stream(small, 300, 10)
    run = play(stream, Learner(), 1, timed=True)
    assert len(run.decide_s) == 300
    assert run.cost_s.sum() < stream.cost_s[:, 0].sum()


def test_figures() -> None:
    """Gap and recovery on made-up runs: 10% above the oracle, and 50 bad requests after an event."""
    oracle = np.ones(1000)
    ours = np.full(1000, 1.1)
    ours[500:550] = 3.0
    outcomes = [Outcome({"oracle": oracle, "learner": ours}, {})]
    assert float(gap(outcomes, "learner", 0, 500)[0]) == pytest.approx(0.1)
    assert recovery(outcomes, "learner", 500) == 50.0
    ours[500:] = 3.0
    assert recovery(outcomes, "learner", 500) == float("inf")
