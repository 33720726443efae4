"""Fuzz every parser: whatever comes, only errors of ours are raised. The last line is a JSON object.

    python -m benchmarks.fuzz [--seconds N] [--seed N] [--only NAME]
    python -m benchmarks.fuzz --atheris NAME [atheris options]

Inputs are made by hypothesis, out of nothing or from well-formed ones, in the time that there is; an input that
fails is made smaller and shown. With atheris (``pip install atheris`` in an environment of its own, on a Python
that has wheels for it) one target is fuzzed with coverage as its guide until it fails or is stopped.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
import warnings

import hypothesis
from hypothesis import strategies as st

from benchmarks.fuzz_targets import SEEDS, TARGETS, Target

EXAMPLES = 150  # of one round
TOKENS = (
    b"null",
    b"-1",
    b"1e999",
    b"{}",
    b"[]",
    b'"',
    b"\\u0000",
    b"\xff",
    b"\r\n\r\n",
    b"data: ",
    b"0",
    b"true",
)


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A well-formed input with some places cut out, doubled, or replaced."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 40)))
        piece = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=8), st.just(data[start:end] * 2)))
        data = data[:start] + piece + data[end:]
    return data


def rounds(name: str, target: Target, seconds: float, seed: int, examples: int = EXAMPLES) -> tuple[int, str]:
    """Fuzz one target for so long; returns how many inputs it got, and what failed."""
    tried = 0
    inputs = st.one_of(st.binary(max_size=400), mutated(SEEDS[name]), mutated(SEEDS[name]))
    until = time.monotonic() + seconds
    number = 0
    while number == 0 or time.monotonic() < until:

        @hypothesis.seed(seed * 100_000 + number)
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            print_blob=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(inputs)
        def check(data: bytes) -> None:
            nonlocal tried
            tried += 1
            try:
                target(data)
            except BaseException as error:
                error.add_note(f"input (base64): {base64.b64encode(data).decode()}")
                raise

        try:
            check()
        except Exception as error:
            notes = "; ".join(note for note in getattr(error, "__notes__", ()) if note.startswith("input"))
            return tried, f"{name}: {error!r}; {notes}"
        number += 1
    return tried, ""


def with_atheris(name: str, options: list[str]) -> None:
    """Fuzz one target with libFuzzer, guided by coverage."""
    import atheris

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", choices=sorted(TARGETS))
    parser.add_argument("--atheris", metavar="NAME", choices=sorted(TARGETS))
    args, options = parser.parse_known_args()
    if args.atheris:
        with_atheris(args.atheris, options)
        return
    warnings.simplefilter("ignore")
    names = [args.only] if args.only else list(TARGETS)
    counts, failures = {}, []
    for name in names:
        counts[name], failure = rounds(name, TARGETS[name], args.seconds / len(names), args.seed)
        print(f"{name:12} {counts[name]} inputs{'; FAILED' if failure else ''}", flush=True)
        if failure:
            failures.append(failure)
            print(failure, file=sys.stderr, flush=True)
    print(json.dumps({"seed": args.seed, "inputs": sum(counts.values()), "failed": len(failures), **counts}))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
