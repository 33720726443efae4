"""Fuzz every parser: whatever comes, only errors of ours are raised. The last line is a JSON object.

    python -m benchmarks.fuzz [--seconds N] [--seed N] [--only NAME] [--jobs N] [--engine hypothesis|atheris]

Inputs are made in two ways, in half of the time each: by hypothesis, out of nothing or from well-formed ones,
where an input that fails is made smaller; and by atheris (libFuzzer), guided by which lines of specproxy an
input reaches, if it is installed (the extra ``fuzz``). What atheris has found worth keeping stays in
``.cache/fuzz``, and is where the next run goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINES = ("hypothesis", "atheris")
ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / ".cache" / "fuzz"


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """What came of one target. `reached` counts what libFuzzer has seen: edges of the code."""

    inputs: int
    failure: str = ""
    reached: int | None = None


def with_hypothesis(name: str, seconds: float, seed: int) -> Fuzzed:
    """Fuzz one target in this process."""
    from benchmarks import fuzz_files  # noqa: F401 - adds targets
    from benchmarks.fuzz_inputs import rounds
    from benchmarks.fuzz_targets import TARGETS

    return Fuzzed(*rounds(name, TARGETS[name], seconds, seed))


def with_atheris(name: str, seconds: float, seed: int) -> Fuzzed:
    """Fuzz one target in a process of its own, which libFuzzer ends itself."""
    corpus, failed = CORPUS / name, CORPUS / "failed"
    for folder in (corpus, failed):
        folder.mkdir(parents=True, exist_ok=True)
    options = ["-max_len=4096", "-timeout=20", "-rss_limit_mb=3000", f"-seed={1 + seed % 2**31}"]
    options += [f"-max_total_time={max(1, round(seconds))}", f"-artifact_prefix={failed / name}-"]
    command = [sys.executable, "-m", "benchmarks.fuzz_atheris", name, *options, "-print_final_stats=1"]
    done = subprocess.run([*command, str(corpus)], capture_output=True, text=True, cwd=ROOT, errors="replace")
    lines = done.stderr.splitlines()
    inputs = next((int(line.split()[-1]) for line in lines if "number_of_executed_units" in line), 0)
    reached = [line.partition("cov: ")[2].split()[0] for line in lines if "cov: " in line]
    failure = ""
    if done.returncode:
        shown = "\n".join(line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("#"))
        failure = f"{name}: atheris ended with {done.returncode}: {shown[-3000:]}"
    return Fuzzed(inputs, failure, int(reached[-1]) if reached else None)


def run(name: str, seconds: float, seed: int, engines: list[str]) -> dict[str, Fuzzed]:
    """Fuzz one target in every way, in a process of its own each."""
    found = {}
    for engine in engines:
        if engine == "atheris":
            found[engine] = with_atheris(name, seconds / len(engines), seed)
        else:
            command = [sys.executable, "-m", "benchmarks.fuzz", "--one", name, "--seed", str(seed)]
            command += ["--seconds", str(seconds / len(engines))]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            try:
                found[engine] = Fuzzed(*json.loads(done.stdout.splitlines()[-1]))
            except (ValueError, IndexError):
                found[engine] = Fuzzed(
                    0, f"{name}: hypothesis ended with {done.returncode}: {done.stderr[-2000:]}"
                )
    return found


def told(name: str, found: dict[str, Fuzzed]) -> str:
    """A line for one target."""
    parts = [
        f"{one.inputs} inputs by {engine}" + (f" (reached {one.reached} edges)" if one.reached else "")
        for engine, one in found.items()
    ]
    return f"{name:14} {', '.join(parts)}{'; FAILED' if any(one.failure for one in found.values()) else ''}"


def main() -> None:
    """Run and print."""
    from benchmarks import fuzz_files  # noqa: F401 - adds targets
    from benchmarks.fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together, on one core")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", choices=sorted(TARGETS))
    parser.add_argument("--jobs", type=int, default=1, help="targets at the same time")
    parser.add_argument("--engine", choices=ENGINES, help="one way only")
    parser.add_argument("--one", choices=sorted(TARGETS), help=argparse.SUPPRESS)  # a process of `run`
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.one:
        one = with_hypothesis(args.one, args.seconds, args.seed)
        print(json.dumps([one.inputs, one.failure, one.reached]))
        return
    engines = [args.engine] if args.engine else list(ENGINES)
    if "atheris" in engines and importlib.util.find_spec("atheris") is None:
        print("atheris is not installed (pip install 'specproxy[fuzz]'), so hypothesis alone makes inputs")
        engines = ["hypothesis"]
    names = [args.only] if args.only else list(TARGETS)
    results = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {name: pool.submit(run, name, args.seconds / len(names), args.seed, engines) for name in names}
        for name, job in jobs.items():
            results[name] = job.result()
            print(told(name, results[name]), flush=True)
    report(args.seed, engines, results)


def report(seed: int, engines: list[str], results: dict[str, dict[str, Fuzzed]]) -> None:
    """Print what failed, and the JSON object; exits with 1 if something did."""
    failures = [one.failure for found in results.values() for one in found.values() if one.failure]
    for failure in failures:
        print(failure, file=sys.stderr, flush=True)
    whole: dict[str, Any] = {
        "seed": seed,
        "targets": len(results),
        "inputs": sum(one.inputs for found in results.values() for one in found.values()),
        "failed": len(failures),
    }
    for engine in engines:
        whole[engine] = {name: found[engine].inputs for name, found in results.items()}
    print(json.dumps(whole))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
