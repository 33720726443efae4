"""Cost model: what a lane's time per token should be relative to plain, before anything was measured.

The speedup of drafting k tokens a step is (tokens a step) / (cost of a step)::

    tokens  = Σ_{j=0..k} Π_{i≤j} a_i                 a_i acceptance of the i-th guess
    step    = t(k+1) + k·d                           t(w) verifying w tokens, d one guess, both in plain steps
    ratio   = step / tokens

Leviathan et al. (2023, arXiv 2211.17192, Theorem 3.8) is the special case of constant a and t = 1. The numbers
below are weak priors: the learner's measurements overrule them after a few requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specproxy.records import PROFILE, Strategy, TempBucket
from specproxy.strategies.replay import ReplayResult

__all__ = [
    "LaneFacts",
    "prior_ratio",
    "ratio_of",
    "replayed_ratio",
    "tokens_per_step",
    "verify_cost",
]

DENSE_VERIFY: tuple[tuple[int, float], ...] = (
    (1, 1.0), (2, 1.15), (3, 1.25), (4, 1.55), (5, 1.62), (6, 1.78), (8, 2.2), (10, 2.55), (16, 3.5),
)  # fmt: skip
"""Cost of verifying w tokens in units of one, dense F16 model on two CPU cores: measured by this project on its
calibrated test model. A staircase, since kernels work in blocks of rows; nearly flat on most GPUs."""

ACCEPTANCE: Mapping[str, Mapping[str, float]] = {
    "draft": {
        "json_schema": 0.80, "tool_call": 0.75, "code": 0.72, "code_edit": 0.75, "math": 0.70,
        "translation": 0.62, "grounded": 0.62, "prose": 0.52, "creative": 0.42,
    },
    "mtp": {
        "json_schema": 0.85, "tool_call": 0.80, "code": 0.78, "code_edit": 0.80, "math": 0.75,
        "translation": 0.68, "grounded": 0.68, "prose": 0.58, "creative": 0.48,
    },
    "ngram": {"code_edit": 0.70, "translation": 0.55, "json_schema": 0.55, "grounded": 0.50, "code": 0.45},
}  # fmt: skip
"""First guess's chance of being right by drafter and kind of text, at low temperature. Orders of magnitude from
Spec-Bench (Xia et al. 2024, arXiv 2401.07851), which finds code and structured text easiest and open writing
hardest for every drafter; a draft of the same family is assumed."""

NGRAM_HITS: Mapping[str, float] = {"code_edit": 0.6, "translation": 0.3, "json_schema": 0.3, "grounded": 0.3}
"""Share of steps at which a prompt-lookup drafter finds a match; prompt lookup pays where text is copied
(Saxena 2023, prompt-lookup-decoding)."""

HEAT: Mapping[str, float] = {
    TempBucket.GREEDY: 1.0,
    TempBucket.COOL: 0.97,
    TempBucket.WARM: 0.88,
    TempBucket.HOT: 0.75,
    PROFILE: 0.88,
}
"""Acceptance by temperature relative to greedy. At temperature 1 and above drafts rarely pay: exact-match
verification, llama.cpp's default, accepts a guess only if sampling happens to draw it, and rejection sampling
(Leviathan et al. 2023, section 2.3) accepts less where distributions are flat and differ. Ouyang et al. 2024
(arXiv 2410.10141) find for draft models that higher temperatures take from the gain; the numbers are ours."""

STRANGER = 0.7
"""Share of its acceptance that a draft of another family keeps: our guess, to be overruled by measurement."""

LAUNCH_S = 0.0005
"""Seconds that a guess of a model or head takes beside reading its weights: a pass of its own has to be
launched, and its row fetched and sampled. A cautious share of what was seen: on an A100 a draft of 160M
parameters, a fortieth of its target, took 1.5 ms a guess (llama.cpp issue 3649), where its size would explain
0.3 ms. Beside a token of 33 ms that is nothing; beside one of 5 ms, three guesses cost a third of a token. It
is the part of "don't on a fast mixture of experts (100 tokens/s and more)" that experts don't explain. Counts
once plain's speed is known, and as long as neither steps nor guesses were measured."""

PRESSED = 1.3
"""What a lane takes whose memory is short, in its usual time: our guess, to be overruled by measurement."""


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """What is known about a lane's pair of target and draft. Everything is optional.

    Args:
        experts, experts_used: of a mixture-of-experts target; 0 for a dense one.
        expert_share: share of the weights read per token that are expert weights.
        size_ratio: bytes of the draft / bytes of the target. The rule of thumb is a tenth or less, since the
            gain falls with the cost of a guess (Leviathan et al. 2023, Corollary 3.9: none once cost exceeds
            acceptance).
        same_family: whether draft and target come from one family and tokenizer; None if unknown. Others guess
            less, as the guide of mistral.rs to speculative decoding says, and llama.cpp refuses vocabularies
            that differ; `STRANGER` is how much less is thought.
        mtp_layers, layers: prediction layers and all layers of the target.
        verify: measured cost of verifying w tokens in plain steps, ((w, cost), ...) in ascending w.
        draft_cost: measured cost of one guess, in plain steps.
        n_max: longest draft, where the strategy doesn't say.
        slots: requests that the lane decodes at once; None if unknown.
        memory_pressure: whether the lane's memory is short, so that what it takes is read in again and again:
            weights that do not fit are bound by the disk (Alizadeh et al. 2023, "LLM in a flash", arXiv
            2312.11514), which costs more than any draft saves; see `PRESSED`.
    """

    experts: int = 0
    experts_used: int = 0
    expert_share: float = 0.9
    size_ratio: float | None = None
    same_family: bool | None = None
    mtp_layers: int = 0
    layers: int = 0
    verify: tuple[tuple[int, float], ...] = ()
    draft_cost: float | None = None
    n_max: int | None = None
    slots: int | None = None
    memory_pressure: bool = False


def verify_cost(curve: Sequence[tuple[int, float]], width: int) -> float:
    """Cost of a step over `width` tokens by linear interpolation of a measured curve; extrapolated by its last
    slope beyond its end."""
    if width <= curve[0][0]:
        return curve[0][1]
    for (w0, c0), (w1, c1) in pairwise(curve):
        if width <= w1:
            return c0 + (c1 - c0) * (width - w0) / (w1 - w0)
    if len(curve) == 1:
        return curve[0][1]
    (w0, c0), (w1, c1) = curve[-2], curve[-1]
    return c1 + (c1 - c0) / (w1 - w0) * (width - w1)


def expert_spread(facts: LaneFacts, width: int) -> float:
    """How many times the expert weights of one token are read by a step over `width` tokens.

    Tokens pick their experts nearly independently, so w of them touch E·(1 − (1 − u/E)^w) of E experts. This is
    why a fast MoE (100 tokens/s and more on plain) tends to lose by drafting even when guesses are good: nearly
    every guessed token brings its own experts (MoESD, arXiv 2505.19645).
    """
    if not facts.experts or not facts.experts_used:
        return 1.0
    used = facts.experts_used / facts.experts
    return float((1.0 - (1.0 - used) ** width) / used)


def step_cost(facts: LaneFacts, width: int) -> float:
    """t(w): measured where a curve is given, otherwise the dense CPU curve with experts spread."""
    if facts.verify:
        return verify_cost(facts.verify, width)
    dense = verify_cost(DENSE_VERIFY, width)
    spread = expert_spread(facts, width)
    return max(dense, 1.0 - facts.expert_share + facts.expert_share * spread)


def draft_cost(facts: LaneFacts, drafter: str, plain_s: float = math.inf) -> float:
    """d: what one guessed token costs, in plain steps of so many seconds."""
    if facts.draft_cost is not None:
        return facts.draft_cost
    if drafter == "ngram":
        return 0.002
    launch = LAUNCH_S / plain_s
    if drafter == "mtp":
        return launch + (1.2 * facts.mtp_layers / facts.layers if facts.mtp_layers and facts.layers else 0.06)
    return launch + (1.1 * facts.size_ratio if facts.size_ratio is not None else 0.1)


def tokens_per_step(acceptance: Sequence[float]) -> float:
    """Expected tokens of a step; `acceptance[i]` is the chance of guess i if all before it were right."""
    total, product = 1.0, 1.0
    for a in acceptance:
        product *= a
        total += product
    return total


def ratio_of(acceptance: Sequence[float], step: float, guess: float, hits: float = 1.0) -> float:
    """Time per token relative to plain; only a share `hits` of the steps drafts at all."""
    cost = hits * (step + guess * len(acceptance)) + (1.0 - hits)
    return cost / (hits * tokens_per_step(acceptance) + (1.0 - hits))


def replayed_ratio(facts: LaneFacts | None, result: ReplayResult) -> tuple[float, float]:
    """Log ratio of a replay on the lane's nominal cost curve, and the share of verifying in its time."""
    facts = facts or LaneFacts()
    plain, verify = result.drafted * draft_cost(facts, "ngram"), 0.0
    for drafted, count in enumerate(result.widths):
        plain += count
        if drafted and count:
            verify += count * (step_cost(facts, drafted + 1) - 1.0)
    return math.log((plain + verify) / max(result.tokens, 1)), verify / (plain + verify)


def prior_ratio(
    strategy: Strategy, facts: LaneFacts | None, kind: str, temperature: str, plain_s: float = math.inf
) -> float:
    """Expected time per token relative to plain, from facts and rules of thumb; 1 for plain.

    `plain_s` is what a token takes on plain; infinite, so that nothing follows from it, while that is unknown.

    Acceptance falls with the position in the draft, by a tenth each (one published MTP head: .92/.68/.38;
    drafts fall less). By the rule of thumb drafting loses below 60% of guesses accepted (a user of ik_llama.cpp
    says so in its issue 1695) and wins above 70%. By the formula above a draft of three by a model of a tenth
    breaks even at 49% on the dense CPU curve, and at 74% where checking it takes 2.4 steps, as with kernels
    made for any CPU. A combination counts as its best part, as drafters with a match take precedence. So does
    `auto`, of plain and what its engine has.
    """
    facts = facts or LaneFacts()
    if strategy.is_plain:
        return 1.0
    families, ratios = [_family(drafter) for drafter in strategy.drafters], []
    if strategy.is_auto:
        has = {"ngram": True, "draft": facts.size_ratio is not None, "mtp": facts.mtp_layers > 0}
        families, ratios = [family for family in has if has[family]], [1.0]
    for family in families:
        length = strategy.n_max or facts.n_max
        ratios.append(_drafter_ratio(family, length, facts, kind, temperature, plain_s))
    return min(ratios) * (PRESSED if facts.memory_pressure else 1.0)


def log_prior(
    strategy: Strategy, facts: LaneFacts | None, kind: str, temperature: str, plain_s: float = math.inf
) -> float:
    """ln of `prior_ratio`, drawn halfway to 0 (no effect), since it is a rule of thumb."""
    return 0.5 * math.log(prior_ratio(strategy, facts, kind, temperature, plain_s))


def drafted_tokens(strategy: Strategy, facts: LaneFacts | None, kind: str, temperature: str) -> float | None:
    """Tokens that a step is expected to bring, where every step drafts; None for plain and n-gram lanes, and
    for `auto`, which drafts where it pays.

    What a step takes is measured on any kind of text. Divided by this it is the ratio to plain on a kind on
    which the lane never ran.
    """
    if len(strategy.drafters) != 1 or strategy.is_auto:
        return None
    if (family := _family(strategy.drafters[0])) == "ngram":
        return None
    facts = facts or LaneFacts()
    return tokens_per_step(_acceptance(family, strategy.n_max or facts.n_max, facts, kind, temperature))


def _family(drafter: str) -> str:
    drafter = drafter.removesuffix("-sampled")
    if drafter.startswith("ngram"):
        return "ngram"
    return "mtp" if drafter in ("mtp", "eagle3", "dflash", "dspark") else "draft"


def _drafter_ratio(
    family: str, n_max: int | None, facts: LaneFacts, kind: str, temperature: str, plain_s: float
) -> float:
    acceptance = _acceptance(family, n_max, facts, kind, temperature)
    hits = NGRAM_HITS.get(kind, 0.1) if family == "ngram" else 1.0
    guess = draft_cost(facts, family, plain_s)
    return ratio_of(acceptance, step_cost(facts, len(acceptance) + 1), guess, hits)


def _acceptance(family: str, n_max: int | None, facts: LaneFacts, kind: str, temperature: str) -> list[float]:
    """Chance of each guess of a draft, those before it being right."""
    length = n_max or (8 if family == "ngram" else 3)
    first = ACCEPTANCE[family].get(kind, 0.40 if family == "ngram" else 0.60) * HEAT[temperature]
    if family == "draft" and facts.same_family is False:
        first *= STRANGER
    fall = 1.0 if family == "ngram" else 0.9
    return [first * fall**i for i in range(length)]
