"""How many requests are in flight on each host, and how many were on average while one ran there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specproxy.records import Lane, LaneStatus

__all__ = ["THIS_MACHINE", "Busy", "Load", "Stay"]

THIS_MACHINE = ""


class Busy(NamedTuple):
    """Requests in flight on this machine, and by lane id on the hosts of lanes that run on others."""

    here: int
    elsewhere: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stay:
    """A request's time in flight on a host: when it began, and the area under the host's curve until then."""

    since: float
    area: float
    host: str = THIS_MACHINE


@dataclass(slots=True)
class _Curve:
    """Requests in flight on one host, and their integral over time."""

    in_flight: int = 0
    area: float = 0.0
    at: float = 0.0

    def advance(self, now: float) -> None:
        self.area += self.in_flight * max(0.0, now - self.at)
        self.at = now


@dataclass(slots=True)
class Load:
    """Integrates the number of requests in flight on each host over time: O(1) a request.

    Lanes on one host share its cores, those on others don't. `in_flight` counts the requests of all hosts,
    `hosts` names the hosts of lanes that run on other machines, by backend. Instants are monotonic seconds.
    """

    in_flight: int = 0
    hosts: Mapping[str, str] = field(default_factory=dict)
    _at: float = 0.0
    _curves: dict[str, _Curve] = field(default_factory=dict)

    def around(self, lanes: Sequence[LaneStatus], coming: int = 0) -> Busy:
        """What is in flight where these lanes run; `coming` requests more are about to be."""
        hosts = self.hosts
        far = {s.lane.id: hosts[s.lane.backend] for s in lanes if s.lane.backend in hosts} if hosts else {}
        elsewhere = {lane: self._curve(host).in_flight + coming for lane, host in far.items()}
        return Busy(self._curve(THIS_MACHINE).in_flight + coming, elsewhere)

    def enter(self, now: float, lane: Lane | None = None) -> Stay:
        """A request begins on a lane; without one, on this machine."""
        host = THIS_MACHINE if lane is None else self.hosts.get(lane.backend, THIS_MACHINE)
        curve = self._curve(host)
        curve.advance(now)
        curve.in_flight += 1
        self.in_flight += 1
        self._at = now
        return Stay(now, curve.area, host)

    def move(self, stay: Stay, now: float, lane: Lane) -> Stay:
        """A request goes on with another lane; on another host its stay begins anew."""
        if self.hosts.get(lane.backend, THIS_MACHINE) == stay.host:
            return stay
        self.leave(stay, now)
        return self.enter(now, lane)

    def leave(self, stay: Stay, now: float) -> float:
        """A request ends; returns the mean number in flight on its host, itself included (at least 1)."""
        curve = self._curve(stay.host)
        curve.advance(now)
        curve.in_flight -= 1
        self.in_flight -= 1
        self._at = now
        duration = now - stay.since
        return max(1.0, (curve.area - stay.area) / duration) if duration > 0 else float(curve.in_flight + 1)

    def idle_s(self, now: float) -> float:
        """For how long nothing has been in flight anywhere; 0 while something is."""
        return 0.0 if self.in_flight else max(0.0, now - self._at)

    def _curve(self, host: str) -> _Curve:
        found = self._curves.get(host)
        if found is None:
            found = self._curves[host] = _Curve()
        return found
