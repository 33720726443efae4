"""Sampling from one row: the same as llama.cpp's chain over the whole vocabulary, and fair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.calibrated import CalibratedPair
from tests.support.embedded import Sampling, Vocabulary

# isort: split
from specproxy.adapters.embedded.sampler import Sampler, uniform
from specproxy.errors import BackendError

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def vocabulary(pair: CalibratedPair) -> Iterator[Vocabulary]:
    """The calibrated vocabulary."""
    vocabulary = Vocabulary(pair.target)
    yield vocabulary
    vocabulary.close()


def rows(vocabulary: Vocabulary, count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 3, (count, vocabulary.size)).astype(np.float32)


def draw(
    sampling: Sampling, vocabulary: Vocabulary, logits: Any, *, seed: int = 1, whole: bool = False
) -> list[int]:
    sampler = Sampler(sampling, vocabulary, seed, 100, [])
    sampler._whole |= whole
    tokens = []
    for row in logits:
        tokens.append(sampler.sample(row))
        if not sampler.greedy:
            sampler.accept(tokens[-1])
    sampler.close()
    return tokens


def test_uniform_numbers_are_uniform_and_independent() -> None:
    numbers = np.array([[uniform(seed, i) for i in range(400)] for seed in range(50)])
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(numbers.var() - 1 / 12) < 0.003
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03
    assert uniform(3, 4) != uniform(3, 4, 1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=2.0, top_k=5),
        Sampling(temperature=1.3, top_k=200, top_p=0.9, min_p=0.0),
        Sampling(temperature=0.7, typical_p=0.6),
        Sampling(temperature=0),
        Sampling(temperature=0, typical_p=0.1, top_k=0),  # what is typical may leave the highest out
        Sampling(logit_bias={7: 4.0, 9: -3.0}, ignore_eos=True),
        Sampling(repeat_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.2),
        Sampling(repeat_penalty=0.5, repeat_last_n=5, top_k=3),
        Sampling(repeat_penalty=1.2, presence_penalty=-3.0, repeat_last_n=-1, logit_bias={3: 2.0}),
        Sampling(temperature=0, frequency_penalty=1.0, logit_bias={4: 5.0}),
    ],
)
def test_showing_the_chain_fewer_candidates_changes_nothing(sampling: Sampling, vocabulary: Vocabulary) -> None:
    logits = rows(vocabulary, 60)
    assert draw(sampling, vocabulary, logits) == draw(sampling, vocabulary, logits, whole=True)


def test_tokens_come_as_often_as_they_should(vocabulary: Vocabulary) -> None:
    row = np.full(vocabulary.size, -30, np.float32)
    row[[5, 50, 500]] = np.log([0.5, 0.3, 0.2])
    sampling = Sampling(temperature=1.0, top_k=40, top_p=1.0, min_p=0.0)
    counts = Counter(draw(sampling, vocabulary, [row] * 4000))
    assert set(counts) == {5, 50, 500}
    assert [counts[i] / 4000 for i in (5, 50, 500)] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_a_grammar_leaves_the_shares_of_legal_tokens_as_they_are(vocabulary: Vocabulary) -> None:
    a, b, c = (vocabulary.tokenize(letter, add_special=False)[0] for letter in "abc")
    row = np.full(vocabulary.size, -30, np.float32)
    row[[a, b, c]] = np.log([0.2, 0.6, 0.2])
    sampling = Sampling(temperature=1.0, top_p=1.0, min_p=0.0, grammar="root ::= [ac]+")
    counts = Counter(draw(sampling, vocabulary, [row] * 1500))
    assert set(counts) == {a, c}
    assert counts[a] / 1500 == pytest.approx(0.5, abs=0.05)


def test_penalties_look_back_over_prompt_and_output(vocabulary: Vocabulary) -> None:
    row = np.zeros(vocabulary.size, np.float32)
    row[[7, 8]] = 2.0, 1.5
    sampling = Sampling(temperature=0, repeat_penalty=2.0, repeat_last_n=2)
    sampler = Sampler(sampling, vocabulary, 0, 100, [7])
    said = []
    for _ in range(6):
        said.append(sampler.sample(row))
        sampler.accept(said[-1])
    sampler.close()
    # 8 while 7 is among the last two; when both are, 7 is the higher one again
    assert said[0] == 8
    assert said[1:3] == [7, 7]
    assert 8 in said[3:]


def test_dry_stops_a_loop(vocabulary: Vocabulary) -> None:
    row = np.zeros(vocabulary.size, np.float32)
    row[[300, 301]] = 3.0, 2.0
    looping = Sampling(temperature=0)
    dry = replace(looping, dry_multiplier=2.0, dry_allowed_length=2)
    assert set(draw(looping, vocabulary, [row] * 12)) == {300}
    assert 301 in draw(dry, vocabulary, [row] * 12)


@pytest.mark.parametrize("bias", [{}, {7: 2.5}, {7: -9.0, 8: 40.0}, {8: float("-inf")}])
def test_greedy_with_a_bias_is_the_highest_of_the_biased_row(
    vocabulary: Vocabulary, bias: dict[int, float]
) -> None:
    logits = rows(vocabulary, 40, seed=3)
    logits[::3, 8] = 30.0  # the forbidden one would often have been it
    expected = logits.copy()
    for token, value in {**bias, vocabulary.eos: float("-inf")}.items():
        expected[:, token] += value
    sampling = Sampling(temperature=0, logit_bias=bias, ignore_eos=True)
    assert draw(sampling, vocabulary, logits) == expected.argmax(axis=1).tolist()


def test_forbidden_tokens_and_biases(vocabulary: Vocabulary) -> None:
    row = np.zeros(vocabulary.size, np.float32)
    row[[vocabulary.eos, 9]] = 9.0, 5.0
    assert draw(Sampling(temperature=0), vocabulary, [row]) == [vocabulary.eos]
    assert draw(Sampling(temperature=0, ignore_eos=True), vocabulary, [row]) == [9]
    biased = Sampling(temperature=0, logit_bias={vocabulary.eos: float("-inf"), 11: 6.0})
    assert draw(biased, vocabulary, [row]) == [11]


def test_a_grammar_that_is_a_dead_end_is_an_error(vocabulary: Vocabulary) -> None:
    sampler = Sampler(Sampling(temperature=0, grammar='root ::= "a" [\\U0010FFFF]'), vocabulary, 0, 100, [])
    row = np.full(vocabulary.size, -np.inf, np.float32)
    row[vocabulary.tokenize("a", add_special=False)[0]] = 1.0
    first = sampler.sample(row)
    sampler.accept(first)
    with pytest.raises(BackendError, match="grammar"):
        sampler.sample(row)
    with pytest.raises(BackendError, match="does not allow"):
        sampler.accept(first)  # llama.cpp would have ended the process
    sampler.close()


def test_greedy_takes_the_first_of_equals(vocabulary: Vocabulary, tmp_path: Path) -> None:
    row = np.zeros(vocabulary.size, np.float32)
    assert draw(Sampling(temperature=0), vocabulary, [row]) == [0]


@pytest.mark.parametrize(
    ("strength", "window"),
    [({"repeat_penalty": 1.3}, "repeat_last_n"), ({"dry_multiplier": 0.8}, "dry_penalty_last_n")],
)
def test_a_window_takes_no_more_memory_than_the_context_can_fill(
    vocabulary: Vocabulary, strength: dict[str, float], window: str
) -> None:
    logits = rows(vocabulary, 20)
    whole = draw(Sampling(temperature=0, **strength, **{window: -1}), vocabulary, logits)  # type: ignore[arg-type]
    before = psutil.Process().memory_info().rss
    sampler = Sampler(Sampling(**strength, **{window: 60_000_000}), vocabulary, 1, 100, [])  # type: ignore[arg-type]
    grown = psutil.Process().memory_info().rss - before
    sampler.close()
    assert grown < 60_000_000
    huge = Sampling(temperature=0, **strength, **{window: 60_000_000})  # type: ignore[arg-type]
    assert draw(huge, vocabulary, logits) == whole
