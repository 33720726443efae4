"""The objective: each term of a request's expected time, and what it depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specproxy.records import Control, LaneStatus, Situation, TempBucket, Workload
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.learner import Learner
from specproxy.strategies.pricing import Pricing, View, price
from tests.strategies.world import lane, observe, ready

CODE = Workload("code", TempBucket.COOL)
PLAIN, MTP = lane("plain"), lane("mtp")
TPT, RATIO, TOKENS, PREFILL = 0.02, 0.6, 150, 0.002
LOADED = 1.8  # of a token on plain with four requests in flight, and of the ratio of MTP beside it
LOADED_RATIO = 2.0


def taught(*, loads: bool = False) -> Learner:
    """A learner that knows both lanes: times of tokens, of prompts, and lengths."""
    learner, rng = Learner(), np.random.default_rng(4)
    for t in range(240):
        which = MTP if t % 2 else PLAIN
        busy = loads and t % 4 > 1
        tpt = TPT * (RATIO if which is MTP else 1.0)
        if busy:
            tpt *= LOADED * (LOADED_RATIO if which is MTP else 1.0)
        noise = float(np.exp(0.03 * rng.standard_normal()))
        seen = observe(which, CODE, tpt=tpt * noise, tokens=TOKENS, at=5.0 * t, prompt_tokens=500)
        learner.learn_one(replace(seen, prefill_s=500 * PREFILL, concurrency=4.0 if busy else 1.0))
    return learner


KNOWN = taught()


def priced(
    learner: Learner = KNOWN,
    lanes: tuple[LaneStatus, ...] | None = None,
    facts: dict[str, LaneFacts] | None = None,
    **more: Any,
) -> Pricing:
    """Prices of both lanes at a moment after all that was learned."""
    asked = Situation(CODE, lanes or ready("plain", "mtp"), at=1200.0, **({"in_flight": 1} | more))
    return price(learner.model("t"), asked, asked.lanes, facts or {}, 1.25)


def both(pricing: Pricing) -> tuple[View, View]:
    plain, mtp = pricing.views
    return plain, mtp


def test_decoding_is_expected_output_times_time_per_token() -> None:
    plain, mtp = both(priced(prompt_tokens=1))
    assert plain.decode_s == pytest.approx(TOKENS * TPT, rel=0.1)
    assert mtp.ratio == pytest.approx(RATIO, rel=0.07)
    assert mtp.decode_s == pytest.approx(plain.decode_s * mtp.ratio)
    assert plain.ratio == 1.0
    assert plain.sd == 0.0


def test_the_limit_bounds_the_output() -> None:
    pricing = priced(max_tokens=30)
    assert pricing.output == pytest.approx(30, rel=0.03)
    assert pricing.views[0].decode_s == pytest.approx(30 * TPT, rel=0.1)
    assert priced(max_tokens=10_000).output == pytest.approx(priced().output, rel=0.01)


def test_what_is_cached_on_a_lane_need_not_be_processed_there() -> None:
    """So that leaving a lane in mid-conversation has its price."""
    plain, mtp = both(priced(prompt_tokens=4000))
    assert plain.prefill_s == mtp.prefill_s == pytest.approx(4000 * PREFILL, rel=0.05)
    assert mtp.expected_s < plain.expected_s
    plain, mtp = both(priced(prompt_tokens=4000, prefix_hits={"plain": 3840}))
    assert plain.prefill_s == pytest.approx(160 * PREFILL, rel=0.05)
    assert mtp.prefill_s == pytest.approx(4000 * PREFILL, rel=0.05)
    assert plain.expected_s < mtp.expected_s
    assert mtp.loss_s > 0.0, "the gate counts it too"


def test_a_lane_under_reload_control_costs_its_load_where_it_is_not_in_memory() -> None:
    moved = replace(MTP, control=Control.RELOAD, load_s=7.0)
    for resident in (True, False):
        lanes = (*ready("plain"), replace(ready("mtp")[0], lane=moved, resident=resident))
        pricing = priced(lanes=lanes)
        assert pricing.reloads
        assert pricing.views[1].load_s == (0.0 if resident else 7.0)
        view = pricing.views[1]
        assert view.expected_s == pytest.approx(view.load_s + view.prefill_s + view.decode_s)
    instance = (*ready("plain"), replace(ready("mtp")[0], lane=replace(moved, control=Control.INSTANCE)))
    assert priced(lanes=instance).views[1].load_s == 0.0


def test_a_queue_is_waited_for_where_slots_are_known() -> None:
    """Nobody waits while a slot is free; then each further one ahead counts half an answer."""
    facts = {"mtp": LaneFacts(slots=2)}

    def wait(in_flight: int, known: dict[str, LaneFacts]) -> float:
        lanes = (*ready("plain"), replace(ready("mtp")[0], in_flight=in_flight))
        return priced(lanes=lanes, facts=known).views[1].wait_s

    assert [wait(n, facts) > 0.0 for n in (0, 1, 2, 5)] == [False, False, True, True]
    assert wait(5, facts) == pytest.approx(4 * wait(2, facts))
    assert wait(5, {}) == 0.0


def test_at_some_load_drafting_stops_paying() -> None:
    """Requests anywhere on the machine slow plain down, and drafting more than plain."""
    busy = taught(loads=True)
    _, alone = both(priced(busy))
    plain, mtp = both(priced(busy, in_flight=4))
    assert plain.decode_s == pytest.approx(LOADED * TOKENS * TPT, rel=0.15)
    assert alone.ratio < 0.75
    assert mtp.ratio > 1.0
    assert mtp.expected_s > plain.expected_s
    lanes = ready("plain", "mtp")
    for in_flight, best in ((1, "mtp"), (4, "plain")):
        chosen = [
            busy.choose(
                Situation(CODE, lanes, at=1200.0, in_flight=in_flight), np.random.default_rng(s)
            ).lane.id
            for s in range(10)
        ]
        assert set(chosen) == {best}


def test_each_lane_has_the_load_of_its_own_host() -> None:
    """Neighbours on plain's machine don't slow a drafter on another one down, nor the other way round."""
    busy = taught(loads=True)
    alone, crowded = priced(busy), priced(busy, in_flight=4)
    plain, mtp = both(priced(busy, in_flight=4, elsewhere={"mtp": 1}))
    assert plain.decode_s == pytest.approx(both(crowded)[0].decode_s)
    assert mtp.decode_s == pytest.approx(both(alone)[1].decode_s, rel=0.02)
    assert mtp.ratio == pytest.approx(RATIO / LOADED, rel=0.1)
    plain, mtp = both(priced(busy, in_flight=1, elsewhere={"mtp": 4}))
    assert plain.decode_s == pytest.approx(both(alone)[0].decode_s)
    assert mtp.decode_s == pytest.approx(both(crowded)[1].decode_s, rel=0.02)
    far = priced(busy, in_flight=9, elsewhere={"plain": 4, "mtp": 4})
    for found, known in zip(far.views, crowded.views, strict=True):
        assert found.expected_s == pytest.approx(known.expected_s)
        assert found.spread == pytest.approx(known.spread)


def test_what_load_costs_is_unsure_where_it_was_never_seen() -> None:
    """A lane on a busier host than plain's is looked at with as much more doubt."""
    _, known = both(priced())
    _, unsure = both(priced(elsewhere={"mtp": 4}))
    assert unsure.sd > 2.0 * known.sd


def test_the_ledger_asks_what_plain_would_have_taken_on_its_own_host() -> None:
    """A lane on a crowded host loses to a plain that is alone on its own."""
    learner, seen = taught(loads=True), observe(MTP, CODE, tpt=TPT, tokens=TOKENS, at=1200.0, request_id="r")
    seen = replace(seen, prefill_s=0.0, concurrency=4.0)
    losses = []
    for elsewhere in ({"mtp": 4}, {"mtp": 4, "plain": 4}):
        one = Learner()
        one.load(learner.dump())
        before = one.accounts()[0].plain_s
        lanes, rng = ready("plain", "mtp"), np.random.default_rng(1)
        asked = Situation(CODE, lanes, at=1200.0, in_flight=1, pin="mtp", request_id="r", elsewhere=elsewhere)
        one.choose(asked, rng)
        one.learn_one(seen)
        losses.append(one.accounts()[0].plain_s - before)
    assert losses[1] / losses[0] == pytest.approx(LOADED, rel=0.1)


def test_the_more_is_known_the_less_is_feared() -> None:
    """What a lane may lose is looked at cautiously."""
    fresh = Learner()
    for t in range(4):
        fresh.learn_one(observe(PLAIN, CODE, tpt=TPT, at=5.0 * t))
    _, unknown = both(priced(fresh))
    _, known = both(priced())
    assert unknown.sd > 3.0 * known.sd
    assert known.loss_s < 0.0
    assert unknown.loss_s > unknown.expected_s - unknown.fixed_s - fresh.model("t").speed.plain_decode_s(
        observe(PLAIN, CODE, tokens=int(priced(fresh).output))
    )
