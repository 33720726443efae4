"""Does anything change on the way? The same requests, directly and through the proxy, compared byte for byte.

    python -m benchmarks.conformance [--only llama-server,engine,ollama]

Each case runs three times against one server: once so that prompt caches are as warm for the next two,
directly, and through the proxy. Sampling is greedy. curl's replies are compared as bytes, the clients' by
field. What no two runs have in common (times, drawn ids) is counted as explained, everything else as different.
The last line is one JSON object; the exit code is 1 if anything is different.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.conformance_cases import Case, curl_cases, ollama_cases, openai_cases
from benchmarks.conformance_compare import Verdict, compare
from benchmarks.conformance_fake import fake_ollama
from benchmarks.engine_servers import start_engine, start_llama_server
from benchmarks.models import smollm2
from specproxy.adapters.server_program import find_program
from tests.support.ports import free_port, wait_for

KINDS = ("llama-server", "engine", "ollama")
MODEL = "smollm2"
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Target:
    """A server to ask: what it is, where it listens, and what its model is called."""

    label: str
    kind: str
    url: str
    model: str


@contextmanager
def proxy_before(url: str, state: Path) -> Iterator[str]:
    """A proxy in front of one server, as people start it; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "specproxy", "start", "--port", str(port), "--upstream", url]
    command += ["--state-dir", str(state)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPECPROXY_")}
    env |= {"XDG_CONFIG_HOME": str(state)}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            wait_for(f"http://127.0.0.1:{port}/specproxy/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            child.terminate()
            child.wait(30)


# --- the servers ---------------------------------------------------------------------------------


@contextmanager
def llama_server() -> Iterator[Target]:
    """llama-server with SmolLM2: the one that is named for tests, one on PATH, or the wheel's."""
    named = os.environ.get("SPECPROXY_TEST_LLAMA_SERVER")
    program = find_program(Path(named) if named else None)
    with start_llama_server(program, smollm2(), None, "plain", threads=2, shipped=True) as server:
        label = f"llama-server ({program.kind}, {program.build})"
        yield Target(label, "llama-server", f"http://127.0.0.1:{server.port}", "bench")


@contextmanager
def engine() -> Iterator[Target | None]:
    """The embedded engine with SmolLM2, if it is compiled."""
    if importlib.util.find_spec("llama_cpp") is None:
        yield None
        return
    with start_engine(smollm2(), None, threads=2, slots=1) as server:
        url = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
            model = json.load(reply)["data"][0]["id"]
        yield Target("the embedded engine", "engine", url, model)


@contextmanager
def ollama() -> Iterator[Target]:
    """The Ollama that SPECPROXY_TEST_OLLAMA names, with SmolLM2; without one a fake, which is called a fake."""
    binary = os.environ.get("SPECPROXY_TEST_OLLAMA")
    if not binary:
        with fake_ollama(MODEL) as url:
            yield Target("a fake Ollama (SPECPROXY_TEST_OLLAMA names no real one)", "ollama", url, MODEL)
        return
    with tempfile.TemporaryDirectory() as home:
        host = f"127.0.0.1:{free_port()}"
        env = os.environ | {"HOME": home, "OLLAMA_HOST": host, "OLLAMA_MODELS": f"{home}/models"}
        env |= {"OLLAMA_CONTEXT_LENGTH": "4096", "OLLAMA_KEEP_ALIVE": "-1"}
        quiet = subprocess.DEVNULL
        with subprocess.Popen([binary, "serve"], env=env, stdout=quiet, stderr=quiet) as child:
            try:
                wait_for(f"http://{host}/api/version")
                Path(home, "Modelfile").write_text(f"FROM {smollm2()}\n")
                create = [binary, "create", MODEL, "-f", f"{home}/Modelfile"]
                subprocess.run(create, env=env, check=True, capture_output=True, timeout=120)
                with urllib.request.urlopen(f"http://{host}/api/version", timeout=5) as reply:
                    version = json.load(reply)["version"]
                yield Target(f"a real Ollama {version}", "ollama", f"http://{host}", MODEL)
            finally:
                child.terminate()
                child.wait(30)


# --- the run -------------------------------------------------------------------------------------


def cases_of(target: Target) -> list[Case]:
    """All that is asked of a server of this kind."""
    kind = "ollama" if target.kind == "ollama" else "llama-server"
    cases = [*curl_cases(kind, target.model), *openai_cases(target.model)]
    return cases + (ollama_cases(target.model) if target.kind in ("ollama", "engine") else [])


def ask(case: Case, direct: str, proxied: str) -> tuple[Verdict, int]:
    """Run a case to warm caches, directly, and through the proxy; again if the replies differ, since a server
    may not have put a prompt into its cache when the next request is there. The verdict, and the attempts."""
    attempts, verdict = 0, Verdict("different")
    while verdict.outcome == "different" and attempts < ATTEMPTS:
        attempts += 1
        case.run(direct)
        verdict = compare(case.run(direct), case.run(proxied))
    return verdict, attempts


def check(target: Target, state: Path, counts: Counter[str], *, verbose: bool) -> None:
    """Run all cases against one server, and print what is worth it."""
    print(f"\n{target.label}", flush=True)
    reasons: Counter[str] = Counter()
    before = Counter(counts)
    with proxy_before(target.url, state) as proxied:
        for case in cases_of(target):
            verdict, attempts = ask(case, target.url, proxied)
            counts["asked_again"] += attempts > 1
            counts["cases"] += 1
            counts[verdict.outcome] += 1
            reasons.update({note.rpartition(": ")[2] for note in verdict.notes} if verdict.notes else ())
            if verdict.outcome == "different" or verbose:
                print(f"  {verdict.outcome}  {case.client}: {case.name}", *verdict.notes, sep="\n      ")
    done = {name: counts[name] - before[name] for name in ("cases", "identical", "explained", "different")}
    print("  " + ", ".join(f"{number} {name}" for name, number in done.items()), flush=True)
    for reason, number in reasons.most_common(8) if not done["different"] else ():
        print(f"      explained in {number} cases: {reason}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask every server that there is; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of server, with commas")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    given = parser.parse_args(arguments)
    if shutil.which("curl") is None:
        sys.exit("curl is not installed, and its replies are half of what is compared")
    wanted = given.only.split(",")
    if unknown := set(wanted) - set(KINDS):
        parser.error(f"no such server: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    counts: Counter[str] = Counter()
    servers = {}
    for kind, start in zip(KINDS, (llama_server, engine, ollama), strict=True):
        if kind not in wanted:
            continue
        with ExitStack() as stack:
            target = stack.enter_context(start())
            state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers[kind] = target.label if target is not None else "not compiled here"
            if target is None:
                print(f"\n{kind}: not compiled here, so not asked", flush=True)
                continue
            check(target, state, counts, verbose=given.verbose)
    names = ("cases", "identical", "explained", "different", "asked_again")
    print(json.dumps({**{name: counts[name] for name in names}, "servers": servers}))
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
