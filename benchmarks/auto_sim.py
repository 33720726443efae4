"""`auto` and fixed strategies without an engine: known text, known guesses, known costs; the same every time.

    python -m benchmarks.auto_sim [--requests N] [--noise SHARE] [--seed N] [--kind KIND]...

Texts, and who guesses which token, are those of the calibrated models of `benchmarks.bench_auto`; a step takes
what was measured on two cores, and the controller may be shown it with noise. So a change of the controller can
be judged on hundreds of requests within seconds, against the best fixed strategy and length in hindsight.
Unlike the models' texts, those of a run have no stretch in common: a handful of wrong guesses that came again
in every request would fit some length by luck, and hindsight would pick it. `creative`, whose real text is an
accident of rounding, is one of its own that runs in circles as well.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.bench_auto import CHAINS, KINDS, LENGTHS, MIXED, STRETCH
from specproxy.adapters.embedded.auto import AutoController
from specproxy.adapters.embedded.controller import (
    PLAIN,
    Controller,
    FixedController,
    StepOutcome,
    StepView,
)
from specproxy.adapters.embedded.costs import StepCosts
from specproxy.adapters.embedded.tally import Tally
from specproxy.adapters.embedded.types import GenerateRequest
from specproxy.records import EngineReport, Strategy
from specproxy.strategies.drafters.ngram import NgramDrafter
from specproxy.strategies.engine_book import EngineBook
from tests.support.calibrated import REGIONS, CalibratedPair, plan_pair

__all__ = ["DENSE", "MOE", "STAIRS", "Machine", "Text", "Texts", "play"]

LIMITS = {"ngram": 16, "draft": 8, "mtp": 6}  # as the engine's for a model without a recurrent state
LONGEST = 16
PERIOD = 9_010  # words of a kind that does not repeat: no two of 32 texts have one in common
PROMPT = 16  # tokens of a prompt before its marker
CATCH_UP = 0.05  # guesses that catching up with a token takes
LATE = 64  # tokens that a profile has a drafter catch up with
AUTO = "auto"
LONG = ("json", "code", "prose", "mixed")


@dataclass(frozen=True)
class Machine:
    """Milliseconds that things take: a decode by its width, a guess, and what a step has beside them.

    `noise` is the standard deviation of the logarithm of what a controller sees of them; if there is any, it
    sees a fiftieth of them doubled besides.
    """

    verify: Mapping[int, float]
    guess: Mapping[str, float]
    beside: tuple[float, float] = (0.5, 0.9)  # without a draft, and with one
    noise: float = 0.0

    def decode_s(self, width: int) -> float:
        """Expected seconds of a decode of `width` tokens."""
        points = sorted(self.verify.items())
        for (w0, c0), (w1, c1) in pairwise(points):
            if width <= w1:
                return (c0 + (c1 - c0) * (width - w0) / (w1 - w0)) / 1e3
        return points[-1][1] * width / points[-1][0] / 1e3

    def profiled(self) -> StepCosts:
        """What a profile finds out about it."""
        costs = StepCosts()
        for width in (1, 2, 3, 4, 5, 6, 8, 12, 17):
            for _ in range(5):
                costs.decoded(width, self.decode_s(width))
        for name, guess in self.guess.items():
            for _ in range(4):
                costs.guessed(name, 1, guess / 1e3)
            costs.guessed(name, 1, guess * (1 + CATCH_UP * (LATE - 1)) / 1e3, LATE)
        return costs


DENSE = Machine(
    {1: 17.5, 2: 19.5, 3: 21.5, 4: 26.5, 5: 27.5, 6: 30.0, 8: 38.0, 10: 44.0, 17: 64.0},
    {"draft": 1.6, "mtp": 1.9},
)
STAIRS = Machine(  # two cores whose second token costs as much as the first one
    {1: 11.5, 2: 23.1, 3: 25.1, 4: 26.9, 5: 28.1, 6: 29.5, 8: 40.2, 12: 51.1, 17: 67.4},
    {"draft": 1.5, "mtp": 2.1},
)
MOE = Machine(
    {1: 5.4, 2: 11.0, 3: 13.1, 4: 14.8, 5: 17.5, 6: 20.0, 8: 25.0, 12: 35.0, 17: 46.0},
    {"draft": 0.8, "mtp": 1.2},
)


@dataclass(frozen=True)
class Text:
    """What a request says, from the first token on, and its prompt's tokens."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class Texts:
    """Texts of the calibrated models by kind and number, and what drafters guess behind a token."""

    def __init__(self, seed: int = 1) -> None:
        regions = [replace(r, period=PERIOD) if r.name in LONG else r for r in (*REGIONS, MIXED)]
        self._pair: CalibratedPair = plan_pair(Path(), regions=tuple(regions), seed=seed)
        self.guesses = {name: self._pair.guesses(name).tolist() for name in ("mtp", "draft")}
        self._rng = np.random.default_rng(seed)

    def text(self, kind: str, number: int, tokens: int) -> Text:
        """One of a kind; a mixed one quotes a part of itself in the prompt."""
        vocab = self._pair.vocabulary
        r = [region.name for region in self._pair.regions].index(kind)
        marker = int(vocab.markers[r][number % len(vocab.markers[r])])
        prompt = [300 + (7 * number + 13 * i) % 90 for i in range(PROMPT)]
        if kind == "creative":
            branched = self._branched(vocab.words[r])
            token = int(self._pair.successor[marker])
            output: list[int] = []
            while len(output) < tokens:
                output.append(token)
                token = branched[token]
        else:
            output = self._pair.text_ids(kind, tokens, number)
        if kind == "mixed":
            start = int(self._rng.integers(3)) * STRETCH + STRETCH // 2
            prompt += self._pair.text_ids("mixed", start + STRETCH, number)[start:]
        return Text((*prompt, marker), tuple(output))

    def _branched(self, words: npt.NDArray[np.int64]) -> dict[int, int]:
        """What follows on each word of a text: three of four lead anywhere, so that it ends in a circle."""
        after = self._rng.permutation(words)
        anywhere = self._rng.permutation(len(words))[: len(words) * 3 // 4]
        after[anywhere] = self._rng.choice(words, len(anywhere))
        return dict(zip(words.tolist(), after.tolist(), strict=True))


@dataclass
class Played:
    """How a text was decoded."""

    seconds: float = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)


def play(
    text: Text,
    guesses: Mapping[str, Sequence[int]],
    controller: Controller,
    machine: Machine,
    rng: np.random.Generator,
    *,
    drafters: Sequence[str],
    limits: Mapping[str, int] = LIMITS,
) -> Played:
    """Decode a text step by step, as the engine does with one stream."""
    played = Played()
    tokens = [*text.prompt, text.output[0]]
    whole = [*text.prompt, *text.output]
    ngram = NgramDrafter()
    ngram.begin(tokens)
    held = dict.fromkeys(guesses, 0)
    costs = controller.costs if isinstance(controller, AutoController) else StepCosts()

    def takes(seconds: float) -> float:
        if not machine.noise:
            return seconds
        return seconds * float(np.exp(rng.normal(0, machine.noise))) * (2.0 if rng.random() < 0.02 else 1.0)

    while len(tokens) < len(whole):
        room = min(len(whole) - len(tokens) - 1, LONGEST)
        plan, copied, match, draft, late = PLAIN, [], 0, [], 0
        if room > 0 and "ngram" in drafters:
            copied = list(ngram.draft(min(limits["ngram"], room)))
            match = ngram.match_length
        if room > 0 and drafters and (copied or not controller.rests(1)):
            missing = {name: len(tokens) - held[name] for name in guesses if name in drafters}
            plan = controller.plan(
                StepView(
                    tuple(drafters),
                    match,
                    dict(limits),
                    room,
                    len(tokens) - len(text.prompt),
                    context=len(tokens) - 1,
                    late=missing,
                )
            )
        drafting = 0.0
        if plan.drafter == "ngram":
            draft = copied[: plan.length]
        elif plan.length:
            draft = copied[: plan.lead_length]
            late = len(tokens) - held[plan.drafter]
            while len(draft) < plan.total:
                draft.append(guesses[plan.drafter][draft[-1] if draft else tokens[-1]])
            held[plan.drafter] = len(tokens)
            one = machine.guess[plan.drafter] / 1e3
            drafting = one * (plan.total + (late - 1) * CATCH_UP)
        hits = 0
        while hits < len(draft) and whole[len(tokens) + hits] == draft[hits]:
            hits += 1
        if plan.drafter == "draft":
            held["draft"] += min(hits, len(draft) - 1)
        new = whole[len(tokens) : len(tokens) + hits + 1]
        decode, beside = machine.decode_s(1 + len(draft)), machine.beside[bool(draft)] / 1e3
        took = decode + drafting + beside  # what is seen of it has noise, what is counted has none
        if isinstance(controller, AutoController):
            costs.decoded(1 + len(draft), takes(decode), len(tokens) - 1)
            if drafting:
                costs.guessed(plan.drafter, plan.total, takes(drafting), late)
            costs.worked(takes(beside), drafting=bool(draft))
        agreed = 0
        while agreed < min(len(copied), len(new)) and copied[agreed] == new[agreed]:
            agreed += 1
        outcome = StepOutcome(
            plan if draft else PLAIN,
            match,
            len(draft),
            hits,
            took,
            drafting,
            copied=min(len(copied), len(new)),
            agreed=agreed,
            late=late,
            proposed=len(draft),
        )
        if drafters:
            controller.learn(outcome)
            played.tally.add(outcome)
        played.seconds += took
        played.steps[plan.label] += 1
        tokens += new
        ngram.extend(new)
    return played


def report(played: Played, controller: Controller, text: Text, strategy: str) -> EngineReport:
    """What the engine would tell the learner."""
    request = GenerateRequest("s", text.prompt, strategy=Strategy.parse(strategy))
    return played.tally.report(request, controller, text.output, NgramDrafter().min_n)


class Fixed:
    """A fixed strategy by its name, as the engine takes it."""

    def __init__(self, name: str) -> None:
        parsed = Strategy.parse(name)
        self.drafters = tuple(each for each in parsed.drafters if each != "plain")
        most = parsed.n_max
        self.limits = {each: min(limit, most or limit) for each, limit in LIMITS.items()}


GRID = ("plain", *(f"{name}:{n}" for name, lengths in LENGTHS.items() for n in lengths))


def contest(
    texts: Texts, kind: str, machine: Machine, requests: int, tokens: int, *, taught: int, costs: StepCosts
) -> tuple[dict[str, float], Counter[str]]:
    """Seconds of all contenders over the same requests of a kind, and what auto did.

    The first `taught` requests teach and do not count.
    """
    book, steps = EngineBook(), Counter[str]()
    seconds: defaultdict[str, float] = defaultdict(float)
    rng = np.random.default_rng(5)
    names = GRID + (CHAINS if kind == "mixed" else ())
    for number in range(requests + taught):
        text = texts.text(kind, number, tokens)
        auto = AutoController(costs, NgramDrafter().min_n, book.priors("sim", kind, "s"))
        played = play(text, texts.guesses, auto, machine, rng, drafters=("ngram", "draft", "mtp"))
        book.learn("sim", kind, report(played, auto, text, AUTO))
        if number < taught:
            continue
        seconds[AUTO] += played.seconds
        steps += played.steps
        for name in names:
            fixed = Fixed(name)
            quiet = Machine(machine.verify, machine.guess, machine.beside)
            seconds[name] += play(
                text, texts.guesses, FixedController(), quiet, rng, drafters=fixed.drafters, limits=fixed.limits
            ).seconds
    return dict(seconds), steps


def main() -> None:
    """Print for every kind how auto does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--taught", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append")
    args = parser.parse_args()
    texts = Texts(args.seed)
    for label, machine in (("dense", DENSE), ("stairs", STAIRS), ("moe", MOE)):
        machine = Machine(machine.verify, machine.guess, machine.beside, args.noise)
        costs = machine.profiled()
        for kind in args.kind or (*KINDS, "mixed"):
            tokens = 4 * STRETCH if kind == "mixed" else args.tokens * (1 + (label == "moe"))
            seconds, steps = contest(
                texts, kind, machine, args.requests, tokens, taught=args.taught, costs=costs
            )
            auto = seconds.pop(AUTO)
            best = min(seconds, key=lambda name: seconds[name])
            total = sum(steps.values())
            plans = ", ".join(f"{plan} {n / total:.0%}" for plan, n in steps.most_common(7))
            ratios = f"{seconds[best] / auto:.3f} of {best:14} {seconds['plain'] / auto:.3f} of plain"
            print(f"{label:6} {kind:9} {ratios}   {plans}")


if __name__ == "__main__":
    main()
