"""Worlds: what traffic looks like and how fast each lane really is, as JSON files. See worlds/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specproxy.records import Strategy, TempBucket

__all__ = ["Absence", "Event", "Kind", "LaneTruth", "World", "WorldError", "WorldLane", "load_worlds"]

DENSE = (
    (1, 1.0),
    (2, 1.15),
    (3, 1.25),
    (4, 1.6),
    (5, 1.65),
    (6, 1.8),
    (8, 2.2),
    (9, 2.35),
    (10, 2.55),
    (16, 3.5),
)


class WorldError(Exception):
    """A world file that can't be used; the message names file and field."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Plain(_Part):
    """Plain decoding on this machine: the scale of everything else."""

    tokens_per_s: float = Field(gt=0)
    prefill_tokens_per_s: float = Field(gt=0)
    context_1k: float = 0.02  # ln(time per token) per thousand tokens of context
    load: float = 0.3  # ln(time per token) per further request in flight


class Noise(_Part):
    """Noise of measured times, all lanes alike; what lanes differ by beside it is in `LaneTruth`."""

    request: float = Field(default=0.05, ge=0)  # sd of ln(time per token) between requests
    token: float = Field(
        default=0.5, ge=0
    )  # its sd at one token, falling with the root of the number of tokens
    swing: float = Field(default=0.02, ge=0)  # sd of the machine's slow swings
    swing_requests: float = Field(default=40.0, gt=0)  # how long they last
    stall_share: float = Field(default=0.005, ge=0, le=1)  # share of requests with a stall
    stall: float = Field(default=0.5, ge=0, lt=1)  # mean ln(time per token) that a stall adds


Level = Annotated[int, Field(ge=1)]  # requests in flight
Share = Annotated[float, Field(gt=0)]
Width = Annotated[int, Field(ge=1)]
Cost = Annotated[float, Field(gt=0)]


class Traffic(_Part):
    """How requests come."""

    run: float = Field(default=1.0, ge=1)  # mean number of requests of one kind in a row
    in_flight: tuple[tuple[Level, Share], ...] = Field(
        default=((1, 1.0),), min_length=1
    )  # and share of the time
    usage_only_share: float = Field(
        default=0.0, ge=0, le=1
    )  # share of replies without server timings: wall clock, at a lower weight


class WorldLane(_Part):
    """A lane. Lanes under `reload` with the same `backend` displace each other."""

    id: str
    strategy: str
    control: Literal["request", "instance", "reload"] = "instance"
    backend: str = "machine"
    load_s: float = Field(default=0.0, ge=0)
    verify: tuple[tuple[Width, Cost], ...] = Field(
        default=DENSE, min_length=1
    )  # true cost of verifying w tokens, in plain steps
    load: float = 0.0  # ln(ratio) per further request in flight: at some load drafting stops paying

    @model_validator(mode="after")
    def _readable(self) -> Self:
        try:
            Strategy.parse(self.strategy)
        except ValueError as error:
            raise ValueError(f"strategy {self.strategy!r}: {error}") from error
        widths = [width for width, _ in self.verify]
        if widths != sorted(set(widths)):
            raise ValueError("verify: widths must ascend")
        return self


class LaneTruth(_Part):
    """How a lane does on a kind: a ratio, or measured ratios, or what its drafter does (n-gram lanes)."""

    ratio: float | None = Field(default=None, gt=0)  # mean time per token relative to plain
    sd: float = Field(default=0.1, ge=0)  # of its logarithm, between requests
    ratios: tuple[float, ...] = ()  # measured ones, drawn at random instead
    hits: float | None = Field(default=None, ge=0, le=1)  # share of steps with a draft
    accept: float | None = Field(default=None, ge=0, le=1)  # chance of a guess, those before it accepted
    first: float | None = Field(default=None, ge=0, le=1)  # of a draft's first guess, if it differs
    spread: float = Field(default=0.4, ge=0)  # sd of the logits of hits and accept, between requests

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = (self.ratio is not None) + bool(self.ratios) + (self.hits is not None)
        if ways != 1:
            raise ValueError("give exactly one of ratio, ratios and hits")
        if self.hits is not None and self.accept is None:
            raise ValueError("hits needs accept")
        return self


class Lengths(_Part):
    """Log-normal lengths in tokens."""

    median: float = Field(gt=0)
    sigma: float = Field(default=0.5, ge=0)


class Kind(_Part):
    """A kind of request; lanes that aren't named do as plain does."""

    kind: str = Field(pattern="^[^/]+$")
    temperature: TempBucket = TempBucket.WARM
    share: float = Field(gt=0)
    prompt: Lengths = Lengths(median=200)
    output: Lengths = Lengths(median=150)
    limit: int | None = Field(default=None, ge=4)  # the request's max_tokens
    lanes: dict[str, LaneTruth] = {}

    @property
    def key(self) -> str:
        """Name of the statistics cell."""
        return f"{self.kind}/{self.temperature}"


class Event(_Part):
    """From request `after` on, a lane's ratio and acceptance are multiplied; a new fingerprint may show it."""

    after: int = Field(ge=0)
    lane: str
    kinds: tuple[str, ...] = ()  # empty: all
    ratio: float = Field(default=1.0, gt=0)
    accept: float = Field(default=1.0, gt=0)
    fingerprint: str | None = None


class Absence(_Part):
    """A lane takes no requests from request `after` on until request `until`, and so again `every` so many."""

    lane: str
    after: int = Field(ge=0)
    until: int = Field(gt=0)
    every: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _returns(self) -> Self:
        if self.until <= self.after:
            raise ValueError("until must be above after")
        if self.every is not None and self.every <= self.until - self.after:
            raise ValueError("every must be longer than the absence")
        return self

    def holds(self, request: int) -> bool:
        """Whether the lane is away then."""
        since = request - self.after
        if self.every is not None and since >= 0:
            since %= self.every
        return 0 <= since < self.until - self.after


class World(_Part):
    """A machine, its lanes and its traffic."""

    format: Literal["specproxy-world/1"]
    name: str
    about: str = ""
    plain: Plain
    noise: Noise = Noise()
    traffic: Traffic = Traffic()
    lanes: tuple[WorldLane, ...]
    kinds: tuple[Kind, ...] = Field(min_length=1)
    events: tuple[Event, ...] = ()
    absences: tuple[Absence, ...] = ()

    def away(self, lane: str, request: int) -> bool:
        """Whether a lane takes no requests at that moment."""
        return any(absence.lane == lane and absence.holds(request) for absence in self.absences)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ids = [lane.id for lane in self.lanes]
        if len(set(ids)) != len(ids):
            raise ValueError("two lanes have the same id")
        if not any(Strategy.parse(lane.strategy).is_plain for lane in self.lanes):
            raise ValueError("there is no plain lane")
        named = {name for kind in self.kinds for name in kind.lanes} | {event.lane for event in self.events}
        leaving = {absence.lane for absence in self.absences}
        named |= leaving
        if unknown := sorted(named - set(ids)):
            raise ValueError(f"unknown lane {unknown[0]}")
        if leaving >= set(ids):
            raise ValueError("absences: one lane has to stay")
        keys = [kind.key for kind in self.kinds]
        if len(set(keys)) != len(keys):
            raise ValueError("two kinds have the same name and temperature")
        meant = {name for event in self.events for name in event.kinds} - {kind.kind for kind in self.kinds}
        if meant:
            raise ValueError(f"an event names the unknown kind {min(meant)}")
        if len({lane.backend for lane in self.lanes if lane.control == "reload"}) > 1:
            raise ValueError("only one backend may be under reload control")
        drafts = {lane.id for lane in self.lanes if _is_ngram(lane)}
        for kind in self.kinds:
            for name, truth in kind.lanes.items():
                if truth.hits is not None and name not in drafts:
                    raise ValueError(f"{kind.key}: only n-gram lanes are described by hits, not {name}")
        return self


def _is_ngram(lane: WorldLane) -> bool:
    return any(d.startswith("ngram") for d in Strategy.parse(lane.strategy).drafters)


def load_worlds(folder: Path) -> list[World]:
    """Every ``*.json`` of a folder, by name.

    Raises:
        WorldError: there is none, or one can't be read; the message says which, and why.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise WorldError(f"no world files (*.json) in {folder}")
    worlds: dict[str, World] = {}
    for file in files:
        try:
            world = World.model_validate(json.loads(file.read_text(encoding="utf-8")))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            what = first["msg"].removeprefix("Value error, ")
            raise WorldError(": ".join(filter(None, (file.name, where, what)))) from error
        except (OSError, ValueError) as error:
            raise WorldError(f"{file.name}: {error}") from error
        if world.name in worlds:
            raise WorldError(f"{file.name}: another file has a world of the name {world.name}, too")
        worlds[world.name] = world
    return list(worlds.values())
