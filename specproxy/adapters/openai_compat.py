"""Servers that speak OpenAI's API, wherever they are: lanes as configured, health and acceptance by asking.

What differs between servers is in the subclasses: `lmstudio`, `mlx_lm`, `mlx_vlm`, `vllm` and `sglang`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specproxy.adapters.ask import get_json
from specproxy.adapters.base import Headers, ProbeResult, ServedModel
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.http import HttpBackend
from specproxy.errors import BackendError
from specproxy.records import Control, Dialect, Health, Lane, Strategy

__all__ = ["Deployed", "OpenAiBackend", "Verdict"]

OPENAI = frozenset({Dialect.OPENAI_CHAT, Dialect.OPENAI_COMPLETIONS, Dialect.OPENAI_RESPONSES})
ANSWER_S = 5.0

Override = tuple[str, str | int | float | bool | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Deployed:
    """One server of a deployment, as configured.

    `target` is the name of the model that clients ask for, beside `aliases`; `model` is the server's own name
    for it (empty: the same). `drafts` are draft models that a request may name, `draft_tokens` how many tokens
    they may guess at once. `report_drafts` asks for fields in replies that clients did not ask for. `key` is
    sent as bearer token. `equals` identifies servers that are interchangeable, `weight` is this one's share of
    their load, `load_s` how long a change of draft models takes in seconds where that reloads.
    """

    name: str
    url: str
    target: str
    model: str = ""
    aliases: tuple[str, ...] = ()
    strategy: Strategy = field(default_factory=Strategy)
    drafts: tuple[str, ...] = ()
    draft_tokens: int | None = None
    report_drafts: bool = False
    key: str = field(default="", repr=False)
    verify_tls: bool = True
    weight: float = 1.0
    equals: str = ""
    load_s: float = 5.0

    def endpoint(self) -> Endpoint:
        """Where it is; requests go out with its key in place of the client's.

        Raises:
            ConfigError: the URL is none.
        """
        bearer: Headers = ((b"Authorization", b"Bearer " + self.key.encode()),) if self.key else ()
        return Endpoint.parse(self.url.removesuffix("/v1"), verify_tls=self.verify_tls, headers=bearer)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer says about a server's lanes: their health, and a note that says why or how they do."""

    health: Health
    note: str = ""


class OpenAiBackend(HttpBackend):
    """Any server with OpenAI's API (a `Backend`): no control and no acceptance, time only."""

    kind: ClassVar[str] = "openai"
    dialects: ClassVar[frozenset[Dialect]] = OPENAI
    lists_all: ClassVar[bool] = False  # a model that is not in its list cannot be had

    def __init__(self, spec: Deployed) -> None:
        super().__init__(spec.name, spec.endpoint())
        self.spec = spec
        self.set_lanes(self.make_lanes())
        for status in self.lanes():
            self.mark(status.lane.id, Health.UNHEALTHY, f"{spec.url} was not reached yet")

    def make_lanes(self) -> list[Lane]:
        """The lanes of this server, the plain one first where there is one."""
        return [self.lane(self.spec.strategy, Control.INSTANCE)]

    def suffix(self, draft: str) -> str:
        """What the id of a draft's lane has behind the server's name: its last part, or all of it where two of
        them end alike."""
        last = [each.rpartition("/")[2] for each in self.spec.drafts]
        own = draft.rpartition("/")[2]
        return "+" + (own if last.count(own) == 1 else draft)

    def lane(
        self,
        strategy: Strategy,
        control: Control,
        overrides: tuple[Override, ...] = (),
        *,
        suffix: str = "",
        load_s: float = 0.0,
        draft: str = "",
        bound: bool = True,
    ) -> Lane:
        """One lane. Its statistics are those of all servers that count as equal.

        `draft` is its draft model where no field names it; `bound` is as in `Lane`.
        """
        spec = self.spec
        own = repr(overrides) + draft
        facts = (spec.equals or spec.url, self.kind, spec.model or spec.target, strategy.name, own)
        return Lane(
            id=spec.name + suffix,
            backend=spec.name,
            target=spec.target,
            strategy=strategy,
            control=control,
            fingerprint=hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16],
            upstream_model=spec.model or (spec.target if spec.aliases else None),
            overrides=overrides,
            load_s=load_s,
            models=frozenset({spec.target, spec.model or spec.target, *spec.aliases}),
            dialects=self.dialects,
            weight=spec.weight,
            bound=bound,
        )

    def slots(self, lane: Lane) -> int | None:
        """How many requests a lane decodes at once; None where that is not known."""
        del lane
        return None

    async def probe(self) -> ProbeResult:
        """Ask for its models."""
        return (await self._look())[0]

    async def check(self) -> ProbeResult:
        """Ask for its models, and bring the lanes' health up to what it says."""
        found, verdict = await self._look()
        note = verdict.note
        if verdict.health is Health.READY:
            note = await self.acceptance()
        for status in self.lanes():
            self.mark(status.lane.id, verdict.health, note)
        return found

    async def acceptance(self) -> str:
        """What the server's own counters say about its drafts lately, as a clause; empty where nothing."""
        return ""

    async def _look(self) -> tuple[ProbeResult, Verdict]:
        """Ask for its models, and judge by what it says."""
        try:
            status, body = await get_json(self.transport.open, "/v1/models", timeout_s=ANSWER_S)
        except BackendError as error:
            return ProbeResult(False, self.kind), Verdict(Health.UNHEALTHY, error.message)
        verdict = self._judge(status, body)
        entries = body.get("data") if isinstance(body, dict) else None
        names = _names(entries)
        found = ProbeResult(
            True,
            self.kind,
            models=names,
            detail={"status": status},
            served=tuple(ServedModel(name) for name in names),
            loading=status == 503,
        )
        return found, verdict

    def _judge(self, status: int, body: Any) -> Verdict:
        """What the answer to the question for models says about the lanes."""
        if status in (401, 403):
            asked = "refuses the key" if self.spec.key else "wants a key: set key_env"
            return Verdict(Health.UNHEALTHY, f"it {asked} (status {status})")
        if status == 503:
            return Verdict(Health.UNHEALTHY, "it is loading")
        if status == 404:
            return Verdict(Health.READY)  # it lists nothing, which says nothing
        entries = body.get("data") if isinstance(body, dict) else None
        if status != 200 or not isinstance(entries, list):
            return Verdict(
                Health.UNHEALTHY,
                f"it does not answer like {self.kind}: no list of models at /v1/models (status {status}); "
                "is this the right address?",
            )
        wanted = self.spec.model or self.spec.target
        names = _names(entries)
        if self.lists_all and wanted not in names:
            return Verdict(Health.UNHEALTHY, f"it has no model {wanted}; it has {', '.join(names) or 'none'}")
        return Verdict(Health.READY)


def _names(entries: Any) -> tuple[str, ...]:
    rows: list[Mapping[str, Any]] = entries if isinstance(entries, list) else []
    return tuple(str(entry["id"]) for entry in rows if isinstance(entry, dict) and entry.get("id"))
