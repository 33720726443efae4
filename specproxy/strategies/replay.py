"""Replay: what a drafter would have done on a request that has ended.

A deterministic drafter's guess is accepted exactly if it equals the token that was emitted, at any temperature
and whoever generated the text: under sample-and-match verification the target samples its own token at every
position, and compares. So n-gram lanes are judged on every request without ever being tried.

Steps are counted as llama-server does: the first output token comes out of prefill; then every step verifies a
draft, emits the accepted part and one token of the target's own. The last step is censored: where the text
ended within a draft (a stop), its last token counts as the step's own, and the rest was never judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specproxy.strategies.base import Drafter

__all__ = ["HindsightDrafter", "ReplayResult", "replay"]

Counts = tuple[tuple[int, int], ...]


@runtime_checkable
class HindsightDrafter(Drafter, Protocol):
    """A drafter that can be asked about any earlier moment of a finished text; replay is faster on these."""

    match_length: int

    def survey(self, tokens: Sequence[int]) -> None:
        """Take in a finished text; afterwards only `draft_at` may be called, until `begin`."""
        ...

    def draft_at(self, length: int, n_max: int) -> Sequence[int]:
        """What `draft` would have given when only the first `length` tokens were known."""
        ...


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a drafter would have done on one output.

    Attributes:
        tokens: output tokens that decoding produced: all but the first, which came out of prefill.
        steps: decoding steps.
        drafted, accepted: tokens, as llama-server's ``draft_n`` and ``draft_n_accepted``; steps and accepted
            tokens together are `tokens`.
        widths: ``widths[k]`` steps had a draft of `k` tokens, so they verified ``k + 1``.
        by_position: ``(accepted, tried)`` by position in the draft; a guess is tried if all before it in
            the draft were accepted, so the quotient is the chance *given* that. Censored guesses count as
            not tried.
        by_match: the same by the drafter's match length, index 0 being its shortest; empty for a drafter
            that has none.
        censored: guesses of the last step that were never judged, because the text ended.
    """

    tokens: int
    steps: int
    drafted: int
    accepted: int
    widths: tuple[int, ...]
    by_position: Counts
    by_match: Counts
    censored: int

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a step; 1 where nothing was decoded."""
        return self.tokens / self.steps if self.steps else 1.0

    def time_ratio(self, step_cost: Callable[[int], float], draft_cost: float = 0.0) -> float:
        """Time per token relative to plain decoding.

        Args:
            step_cost: t(w): time of a step that verifies `w` tokens, in units of a plain step.
            draft_cost: time of one drafted token in the same unit.
        """
        if not self.tokens:
            return 1.0
        cost = sum(count * step_cost(k + 1) for k, count in enumerate(self.widths) if count)
        return (cost + draft_cost * self.drafted) / self.tokens


def replay(
    prompt: Sequence[int],
    output: Sequence[int],
    drafter: Drafter,
    n_max: int,
    *,
    max_tokens: int | None = None,
) -> ReplayResult:
    """Run `drafter` over a finished request. Exact for deterministic drafters.

    Args:
        prompt: token ids of the prompt as the target saw them, template included.
        output: token ids that were emitted, with the end token if it was sampled.
        drafter: started afresh; left with the state of this text.
        n_max: longest draft.
        max_tokens: the request's limit: servers don't draft past it. None if it had none.
    """
    tally = _Tally(output)
    limit = max_tokens if max_tokens is not None else len(output) + n_max + 1
    if isinstance(drafter, HindsightDrafter):
        _replay_hindsight(prompt, output, drafter, n_max, limit, tally)
    else:
        _replay_live(prompt, output, drafter, n_max, limit, tally)
    return tally.result(getattr(drafter, "min_n", None))


def _replay_live(
    prompt: Sequence[int], output: Sequence[int], drafter: Drafter, n_max: int, limit: int, tally: _Tally
) -> None:
    """Step by step, as an engine would."""
    drafter.begin(prompt)
    at, end = 1, len(output)
    drafter.extend(output[:1])
    while at < end:
        draft = drafter.draft(min(n_max, limit - at - 1))
        ahead = tally.step(at, draft, getattr(drafter, "match_length", 0))
        drafter.extend(output[at : at + ahead])
        at += ahead


def _replay_hindsight(
    prompt: Sequence[int],
    output: Sequence[int],
    drafter: HindsightDrafter,
    n_max: int,
    limit: int,
    tally: _Tally,
) -> None:
    """The same with the whole text indexed at once."""
    drafter.survey([*prompt, *output])
    known, at, end = len(prompt), 1, len(output)
    draft_at, step = drafter.draft_at, tally.step
    roomy = limit - 1 - n_max  # up to here the limit cuts no draft
    while at < end:
        draft = draft_at(known + at, n_max if at <= roomy else limit - 1 - at)
        if draft:
            at += step(at, draft, drafter.match_length)
        else:
            tally.plain_steps += 1
            at += 1


class _Tally:
    """Counts of one replay; `step` judges one draft."""

    __slots__ = (
        "accepted",
        "by_match",
        "censored",
        "drafted",
        "output",
        "plain_steps",
        "reached",
        "rows",
        "widths",
    )

    def __init__(self, output: Sequence[int]) -> None:
        self.output = output
        self.plain_steps = 0
        self.drafted = self.accepted = self.censored = 0
        self.widths: dict[int, int] = {}
        self.reached: dict[tuple[int, bool], int] = {}  # drafts by (accepted, whether a guess was refused)
        self.by_match: dict[int, list[int]] = {}

    def step(self, at: int, draft: Sequence[int], match: int) -> int:
        """Judge a draft for ``output[at:]``; how many tokens the step emitted."""
        size = len(draft)
        if not size:
            self.plain_steps += 1
            return 1
        output = self.output
        room = len(output) - at
        judged = size if size < room else room - 1  # the last token of a text is always a step's own
        accepted = 0
        while accepted < judged and draft[accepted] == output[at + accepted]:
            accepted += 1
        refused = accepted < judged
        self.drafted += size
        self.accepted += accepted
        self.widths[size] = self.widths.get(size, 0) + 1
        self.reached[accepted, refused] = self.reached.get((accepted, refused), 0) + 1
        if match:
            counts = self.by_match.setdefault(match, [0, 0])
            counts[0] += accepted
            counts[1] += accepted + refused
        if not refused and judged < size:
            self.censored = size - judged
        return accepted + 1

    def result(self, min_n: int | None) -> ReplayResult:
        """The counts as a record; `min_n` is the shortest match length, None for a drafter without one."""
        longest = max(self.widths, default=0)
        widths = [0] * (longest + 1)
        widths[0] = self.plain_steps
        for size, count in self.widths.items():
            widths[size] += count
        hits, tried = [0] * longest, [0] * longest
        for (accepted, refused), count in self.reached.items():
            for position in range(accepted):
                hits[position] += count
                tried[position] += count
            if refused:
                tried[accepted] += count
        return ReplayResult(
            tokens=max(0, len(self.output) - 1),
            steps=sum(widths),
            drafted=self.drafted,
            accepted=self.accepted,
            widths=tuple(widths),
            by_position=tuple((h, t) for h, t in zip(hits, tried, strict=True) if t),
            by_match=_dense(self.by_match, min_n),
            censored=self.censored,
        )


def _dense(counts: dict[int, list[int]], first: int | None) -> Counts:
    """Counts by match length as a tuple that starts at the shortest indexed length."""
    if first is None or not counts:
        return ()
    return tuple((hit, tried) for hit, tried in (counts.get(n, (0, 0)) for n in range(first, max(counts) + 1)))
