"""All that is known about one target: speeds, lengths, prefill, traffic and ledgers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specproxy.records import Lane
from specproxy.strategies.approx import REPLAY_SOURCES, Calibration
from specproxy.strategies.bounds import amount, whole
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.curve import Curve
from specproxy.strategies.gate import Ledger
from specproxy.strategies.lengths import Lengths
from specproxy.strategies.prefill import Prefill
from specproxy.strategies.profiling import Profile
from specproxy.strategies.recovery import Recoveries
from specproxy.strategies.settings import LearnerSettings
from specproxy.strategies.speed import SpeedModel
from specproxy.strategies.switching import Traffic

__all__ = ["ANY", "NEVER", "LastRun", "TargetModel"]


class LastRun(NamedTuple):
    """When an arm last ran on a workload, by the ledger's plain time, and how many runs in a row had lost."""

    plain_s: float
    lost: int = 0


NEVER = LastRun(0.0)
ANY = ""  # in place of a workload: when an arm was last loaded, by the time of the account of all workloads


@dataclass(slots=True)
class TargetModel:
    """Learned state of one target.

    `tested` maps (workload, arm) to the arm's last run on it. `pool` is the account
    of all workloads together, which pays for loads. `movable` are the lanes of each backend under reload
    control that the last decision saw, `fixed` the others; `worth` is what `switching.future_costs` found for
    the former. `fits` say by arm and source how far approximate replays are to be believed. `recoveries` are of
    the choices made here, and no part of the state that is kept.
    """

    speed: SpeedModel
    lengths: Lengths = field(default_factory=Lengths)
    prefill: Prefill = field(default_factory=Prefill)
    traffic: Traffic = field(default_factory=Traffic)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    tested: dict[tuple[str, str], LastRun] = field(default_factory=dict)
    pool: Ledger = field(default_factory=Ledger)
    curve: Curve = field(default_factory=Curve)
    movable: dict[str, tuple[Lane, ...]] = field(default_factory=dict)
    fixed: tuple[Lane, ...] = ()
    worth: dict[str, float] = field(default_factory=dict)
    fits: dict[tuple[str, str], Calibration] = field(default_factory=dict)
    recoveries: Recoveries = field(default_factory=Recoveries)
    profile: Profile = field(default_factory=Profile)

    def note_run(self, workload: str, arm: str, plain_s: float, *, lost: bool) -> None:
        """An arm ran on a workload whose ledger stands at `plain_s`, and was slower than plain or not."""
        before = self.tested.get((workload, arm), NEVER).lost
        self.tested[workload, arm] = LastRun(plain_s, before + 1 if lost else 0)

    @classmethod
    def new(cls, settings: LearnerSettings, facts: Mapping[str, LaneFacts]) -> TargetModel:
        """A target about which nothing is known but facts about its lanes, by lane id."""
        return cls(SpeedModel(settings.scales, settings.half_life, facts))

    def ledger(self, workload: str) -> Ledger:
        """The loss account of a workload, by its key; opened on first use."""
        found = self.ledgers.get(workload)
        if found is None:
            found = self.ledgers[workload] = Ledger()
        return found

    def fit(self, arm: str, source: str) -> Calibration | None:
        """How replays from a source compare with the truth on an arm; None for exact ones (`ids`)."""
        if source not in REPLAY_SOURCES:
            return None
        return self.fits.setdefault((arm, source), Calibration(REPLAY_SOURCES[source]))

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {
            "speed": self.speed.dump(),
            "lengths": self.lengths.dump(),
            "prefill": self.prefill.dump(),
            "traffic": self.traffic.dump(),
            "ledgers": {key: ledger.dump() for key, ledger in self.ledgers.items()},
            "tested": [[*key, *last] for key, last in self.tested.items()],
            "pool": self.pool.dump(),
            "curve": self.curve.dump(),
            "worth": dict(self.worth),
            "fits": [[*key, fit.dump()] for key, fit in self.fits.items()],
            "profile": self.profile.dump(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.speed.restore(state["speed"])
        self.lengths.restore(state["lengths"])
        self.prefill.restore(state["prefill"])
        self.traffic.restore(state["traffic"])
        self.ledgers = {key: Ledger.restored(entry) for key, entry in state["ledgers"].items()}
        self.tested = {
            (str(w), str(a)): LastRun(amount(plain_s), *map(whole, lost))
            for w, a, plain_s, *lost in state["tested"]
        }
        self.pool = Ledger.restored(state["pool"])
        self.curve = Curve.restored(state["curve"])
        self.worth = {str(lane): amount(seconds) for lane, seconds in state["worth"].items()}
        self.profile = Profile.restored(state["profile"]) if "profile" in state else Profile()
        self.fits = {}
        for arm, source, entry in state.get("fits", ()):
            if (fit := self.fit(str(arm), str(source))) is not None:
                fit.load(entry)
