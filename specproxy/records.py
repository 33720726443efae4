"""The frozen records that flow: request → facts → workload → decision → observation → learning.

Nothing here does anything. Times are in seconds unless a name says otherwise, sizes in bytes,
instants (`at`) in seconds since the epoch. Prompt text lives only in `Turn.text`, for the duration of
one decision; no other record can hold it, and its repr leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "OPEN_ANSWER",
    "SIDE_CHANNEL_VERSION",
    "Candidate",
    "Control",
    "Decision",
    "Dialect",
    "DrafterReport",
    "EnginePriors",
    "EngineReport",
    "Health",
    "Lane",
    "LaneStatus",
    "Observation",
    "Outcome",
    "OutputForm",
    "RequestFacts",
    "Situation",
    "Strategy",
    "TempBucket",
    "TimingSource",
    "Turn",
    "Workload",
]


# --- the request ---------------------------------------------------------------------------------


class Dialect(StrEnum):
    """The API that a request speaks; errors are answered in the same one."""

    OPENAI_CHAT = "openai_chat"
    OPENAI_COMPLETIONS = "openai_completions"
    OPENAI_RESPONSES = "openai_responses"
    OLLAMA_CHAT = "ollama_chat"
    OLLAMA_GENERATE = "ollama_generate"
    ANTHROPIC = "anthropic"
    LLAMACPP = "llamacpp"
    LLAMACPP_INFILL = "llamacpp_infill"


class OutputForm(StrEnum):
    """What the request demands of the form of the text."""

    FREE = "free"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: `role` is system, user, assistant or tool."""

    role: str
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a request says about itself, whatever its dialect.

    `turns` are in order of appearance. `max_tokens` is None where the client set no limit.
    `steering` names request fields by which the client itself controls speculation
    (for example ``draft_model`` or ``speculative.n_max``): such a request is left alone. `infill` says that
    the text is to stand between a prefix and a suffix, which are the last turns. `thought_limit` says that
    thoughts are to end after a number of tokens.
    """

    dialect: Dialect
    model: str | None = None
    stream: bool = False
    turns: tuple[Turn, ...] = ()
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    output: OutputForm = OutputForm.FREE
    tools: int = 0
    tool_choice: str = "none"  # none, auto, required, named
    logprobs: bool = False
    images: int = 0
    audio: int = 0
    thinking: bool | None = None
    steering: tuple[str, ...] = ()
    infill: bool = False
    thought_limit: bool = False

    @property
    def is_bound(self) -> bool:
        """Whether the text is to have a form, or thoughts are to end after a number of tokens."""
        return self.thought_limit or self.output is not OutputForm.FREE

    @property
    def prompt_chars(self) -> int:
        """Characters of text in all turns."""
        return sum(len(t.text) for t in self.turns)

    @property
    def prompt_tokens_estimate(self) -> int:
        """Prompt length in tokens, estimated at four characters a token."""
        return max(1, self.prompt_chars // 4)


PROFILE = "profile"
"""Flag of requests that specproxy itself makes to measure lanes, and the statistics cell that these have beside
those of the temperature buckets. They are sampled as the server does by default."""


class TempBucket(StrEnum):
    """Sampling temperature, coarsened. Not given counts as the servers' usual default, 0.8: warm."""

    GREEDY = "greedy"  # 0
    COOL = "cool"  # (0, 0.5]
    WARM = "warm"  # (0.5, 1)
    HOT = "hot"  # 1 and above


@dataclass(frozen=True, slots=True)
class Workload:
    """The kind of a request: what statistics are kept by.

    `kind` is one of `strategies.classify.KINDS`. `flags` are hazards and features that rules look at
    (logprobs, images, audio, many, steering, thinking), and `PROFILE`. `signals` says what the class was read
    from; it takes no part in equality.
    """

    kind: str
    temperature: TempBucket
    flags: frozenset[str] = frozenset()
    signals: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> str:
        """Name of the statistics cell, for example ``code_edit/greedy``."""
        return f"{self.kind}/{self.temperature}"


# --- where it can run ----------------------------------------------------------------------------

AUTO = "auto"
"""The strategy of an engine that chooses drafter and length, none among them, at every step."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """How to decode: the drafters in order of precedence (none is plain), and the longest draft.

    `n_max` is None where the backend decides. The name leaves it out: ``plain``, ``ngram``,
    ``ngram+mtp``, ``auto``.
    """

    drafters: tuple[str, ...] = ()
    n_max: int | None = None

    @property
    def name(self) -> str:
        return "+".join(self.drafters) or "plain"

    @property
    def is_plain(self) -> bool:
        return not self.drafters

    @property
    def is_auto(self) -> bool:
        return AUTO in self.drafters

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read ``plain``, ``ngram``, ``ngram+mtp`` or ``mtp:4`` (longest draft 4).

        Raises:
            ValueError: the text is empty or the length is not a positive integer.
        """
        name, _, length = text.strip().lower().partition(":")
        if not name:
            raise ValueError("empty strategy name")
        n_max = int(length) if length else None
        if n_max is not None and n_max < 1:
            raise ValueError(f"draft length must be at least 1, not {n_max}")
        drafters = () if name == "plain" else tuple(part for part in name.split("+") if part)
        return cls(drafters, n_max)


class Control(StrEnum):
    """How the lanes of one backend differ from each other."""

    REQUEST = "request"  # a request field or header; no extra memory
    INSTANCE = "instance"  # a process of its own, the weights again
    RELOAD = "reload"  # one resident at a time; switching costs a load
    OBSERVE = "observe"  # no control: measure and advise


OPEN_ANSWER = 4096
"""Tokens that are kept free for an answer that the client has not limited."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Somewhere a strategy can run. Lanes with the same `target` answer for the same model.

    `overrides` are JSON fields that are spliced into the request body (``/a/b``: field b of object a),
    `headers` are added to the upstream request, `upstream_model` replaces the model name if it is set.
    `fingerprint` identifies target, draft, server build, flags and device: statistics belong to it. `dialects`
    are those that the lane can answer (empty: any), `ctx` is the longest prompt and answer together in tokens
    (0: not a limit here), `tools` and `media` tell whether it may get requests with tools, and with images or
    audio. Lanes with the same strategy and fingerprint are interchangeable; `weight` is a lane's share of what
    goes to them. `seeded` tells whether a seed gives the text that it gives on plain, `bound` whether the
    lane can bind text to a form such as a JSON schema, and thoughts to a number of tokens. Where no lane can,
    such a request still gets one: the server's own refusal is the best answer.
    """

    id: str
    backend: str
    target: str
    strategy: Strategy
    control: Control
    fingerprint: str
    upstream_model: str | None = None
    overrides: tuple[tuple[str, str | int | float | bool | tuple[str, ...]], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    memory_bytes: int = 0
    load_s: float = 0.0
    models: frozenset[str] = frozenset()  # names that clients may use for the target; empty: any
    dialects: frozenset[Dialect] = frozenset()
    ctx: int = 0
    tools: bool = True
    media: bool = True
    weight: float = 1.0
    seeded: bool = True
    bound: bool = True

    def can_answer(self, facts: RequestFacts) -> bool:
        """Whether a request speaks the lane's dialect, has nothing that it may not get, and surely fits.

        Tokens are not counted here, so two characters are taken for one, and an answer without a limit for
        `OPEN_ANSWER` tokens.
        """
        if self.dialects and facts.dialect not in self.dialects:
            return False
        if facts.seed is not None and not self.seeded:
            return False
        if (facts.tools and not self.tools) or ((facts.images or facts.audio) and not self.media):
            return False
        answer = OPEN_ANSWER if facts.max_tokens is None else facts.max_tokens
        return self.ctx == 0 or facts.prompt_chars // 2 + answer <= self.ctx


class Health(StrEnum):
    """State of a lane. Only READY takes requests."""

    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    QUARANTINED = "quarantined"
    DROPPED = "dropped"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """A lane as it is now. `since` is when this health began, `note` says why."""

    lane: Lane
    health: Health
    since: float = 0.0
    in_flight: int = 0
    resident: bool = True
    note: str = ""


# --- the choice ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision may depend on. `lanes` holds ready lanes of the requested target only.

    `in_flight` counts requests on the whole machine, this one among them, since lanes share its cores;
    `elsewhere` counts them for lanes on other hosts, by lane id: those on the lane's host, this one among them.
    `pin` is a strategy name that the client asked for.
    """

    workload: Workload
    lanes: tuple[LaneStatus, ...]
    at: float
    prompt_tokens: int = 1
    max_tokens: int | None = None
    in_flight: int = 0
    pin: str | None = None
    prefix_hits: Mapping[str, int] = field(default_factory=dict)  # lane id → prompt tokens cached there
    repeat: bool = False  # this prompt was seen before
    request_id: str = ""
    elsewhere: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One lane as the decision saw it. Ratios are time per token relative to plain (below 1 is faster).

    `prior` is the ratio that the cost model expected before anything was measured, `replays` the weight of
    replayed requests beside `n` real ones, `profiled` that of runs of our own on this kind of request,
    `fixed_s` the part of `expected_s` before the first token (waiting, a load, the prompt), and `propensity`
    the chance that this lane was drawn.
    """

    lane: str
    strategy: str
    ratio: float
    ratio_lo: float
    ratio_hi: float
    n: float  # weight of evidence, in requests
    expected_s: float | None = None  # whole request, if plain's speed is known
    allowed: bool = True
    note: str = ""
    prior: float | None = None
    replays: float = 0.0
    fixed_s: float = 0.0
    propensity: float = 0.0
    profiled: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Which lane, and why. `reason` is one sentence; `rule` names the branch that decided.

    `repeat` says of a preview that the prompt was seen before.
    """

    lane: Lane
    workload: Workload
    rule: str  # only, pin, hazard, exploit, explore, gate, ...
    reason: str
    candidates: Sequence[Candidate] = ()
    propensity: float = 1.0
    repeat: bool = False


# --- what came of it -----------------------------------------------------------------------------


class Outcome(StrEnum):
    """How a request ended. Only COMPLETE teaches anything about speed."""

    COMPLETE = "complete"
    ERROR = "error"  # the upstream answered with an error status or an error event
    TRUNCATED = "truncated"  # the upstream closed before the end
    CLIENT_GONE = "client_gone"
    UNREACHABLE = "unreachable"  # no lane could be reached; we answered with an error


class TimingSource(StrEnum):
    """Where token counts and times come from, best first."""

    SERVER = "server"  # the reply carried timings
    USAGE = "usage"  # the reply carried token counts; times by wall clock
    ESTIMATE = "estimate"  # tokens estimated from the stream's events; times by wall clock
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Observation:
    """What one request showed; exactly one for each request, whatever became of it.

    `decode_s` covers `output_tokens - 1` tokens where the first token came out of prefill, which is how
    llama-server counts; `time_per_token` takes care of that. `load_s` above zero marks a model load inside
    the request. `weight` (0 to 1) is how far the numbers are to be trusted.
    """

    request_id: str
    at: float
    workload: Workload
    lane: str
    strategy: str
    fingerprint: str
    target: str
    outcome: Outcome
    rule: str = ""
    status: int = 0
    streamed: bool = False
    source: TimingSource = TimingSource.NONE
    ttft_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_s: float | None = None
    decode_s: float | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    load_s: float = 0.0
    concurrency: float = 1.0  # mean requests in flight on the lane's host while this one ran
    repeat: bool = False
    propensity: float = 1.0
    weight: float = 1.0

    @property
    def time_per_token(self) -> float | None:
        """Decode seconds per output token, or None where it cannot be told."""
        if self.decode_s is None or self.decode_s <= 0 or self.output_tokens < 2:
            return None
        return self.decode_s / (self.output_tokens - 1)

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted tokens, or None where nothing was drafted or reported."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a decoding step brought on average, or None where accepted guesses were not counted."""
        decoded = self.output_tokens - 1
        if not self.draft_tokens or not 0 <= self.accepted_tokens < decoded:
            return None
        return decoded / (decoded - self.accepted_tokens)


# --- the side channel between engine and learner -------------------------------------------------

SIDE_CHANNEL_VERSION = 1


@dataclass(frozen=True, slots=True)
class EnginePriors:
    """What the learner tells the engine about a request's workload, keyed by request id.

    `acceptance` maps a drafter's name to pseudo-counts by draft position: ``((accepted, tried), ...)``.
    `match_acceptance` is the same for the n-gram drafter by match length (index 0: shortest indexed length).
    `levels` are the counts of earlier reports' levels. `steps` is how many steps `auto` has done on this
    workload, and `last_used` after how many of them a drafter was used last.
    """

    request_id: str
    workload: str
    acceptance: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    match_acceptance: tuple[tuple[float, float], ...] = ()
    levels: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    steps: float = 0.0
    last_used: Mapping[str, float] = field(default_factory=dict)
    version: int = SIDE_CHANNEL_VERSION


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """What one drafter did within a request; positions and match lengths as in EnginePriors.

    `by_match` counts every copied token whose fate a step has shown, whether it was drafted or not, by the
    length of the match before it, which every right token makes longer. `levels` are the
    guesses by how likely they were to be right, as `auto` saw it (the engine's own scale): text that changes
    its nature has several.
    """

    drafter: str
    steps: int
    drafted: int
    accepted: int
    by_position: tuple[tuple[int, int], ...] = ()
    by_match: tuple[tuple[int, int], ...] = ()
    draft_s: float = 0.0
    levels: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the engine tells the learner when a request has ended.

    `widths` maps verify width (tokens in one step, 1 is plain) to (steps, seconds). Token ids serve replay
    and are forgotten after it. `plans` is how many steps used which drafter and length (``mtp:3``,
    ``forced:4>draft:2``, ``plain``), and `stopped_drafting` why the last steps drafted nothing.
    """

    request_id: str
    strategy: str
    steps: int
    drafters: tuple[DrafterReport, ...] = ()
    widths: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    output_ids: tuple[int, ...] = field(default=(), repr=False)
    stopped_drafting: str = ""
    plans: tuple[tuple[str, int], ...] = ()
    version: int = SIDE_CHANNEL_VERSION
