"""What a llama-server in router mode says about its presets, read into `ServedModel`, and how long loads take.

A section of a preset file is a model to the router. Sections whose command lines differ only in how they decode
are one and the same model to us: lanes of one target.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specproxy.adapters.ask import get_json
from specproxy.adapters.base import ServedModel
from specproxy.adapters.http import HttpTransport
from specproxy.adapters.server_program import (
    SAMPLED,
    SAMPLING_FLAG,
    SHIPPED_NGRAM_MAX,
    SHIPPED_NGRAM_SIZE,
    our_name,
)
from specproxy.errors import BackendError, LaneUnavailable
from specproxy.records import Strategy

__all__ = ["read_sections", "until_loaded", "watch_load"]

POLL_S = 0.05  # first pause between questions while a model loads; grows to twenty times that
LOAD_TIMEOUT_S = 900.0

INDIFFERENT = frozenset(
    {"--alias", "-a", "--host", "--port", "--tags", "--api-key", "--threads", "-t", "--threads-batch", "-tb"}
    | {"--parallel", "-np", "--batch-size", "-b", "--ubatch-size", "-ub", "--cache-ram", "-cram", "--no-webui"}
    | {"--no-ui", "--slots", "--metrics", "--log-colors", "--sleep-idle-seconds", "--warmup", "--no-warmup"}
)
"""Flags that do not bear on what a model says."""

NAMES_ONLY = frozenset({"--alias", "-a", "--host", "--port", "--tags", "--api-key", "--log-colors"})
"""Flags that do not bear on how fast it says it either."""

DRAFT_MODEL = frozenset({"--spec-draft-model", "--model-draft", "-md"})

SHIPPED = SHIPPED_NGRAM_SIZE, SHIPPED_NGRAM_MAX, 1  # lengths, and hits that a draft takes

Flags = tuple[tuple[str, ...], ...]


def read_sections(entries: Iterable[Mapping[str, Any]]) -> tuple[ServedModel, ...]:
    """Models from the entries of ``GET /models``. One that sleeps is not in memory."""
    return tuple(_section(entry) for entry in entries if entry.get("id"))


async def watch_load(transport: HttpTransport, name: str, *, poll_s: float = POLL_S) -> float | None:
    """Wait until the router says that a model is loaded; returns the seconds that took.

    None where it failed, the router has gone, or it was loaded at the first look: then it was there before.
    """
    started = time.monotonic()
    try:
        looks = await until_loaded(transport, name, poll_s=poll_s)
    except BackendError:
        return None
    return time.monotonic() - started if looks > 1 else None


async def until_loaded(transport: HttpTransport, name: str, *, poll_s: float = POLL_S) -> int:
    """Wait until the router says that a model is loaded; returns how often it was asked.

    Raises:
        LaneUnavailable: it has no such model, or could not load it in `LOAD_TIMEOUT_S`.
        BackendError: it does not answer.
    """
    deadline, pause, looks = time.monotonic() + LOAD_TIMEOUT_S, poll_s, 0
    while time.monotonic() < deadline:
        _, listed = await get_json(transport.open, "/models")
        looks += 1
        entries = listed.get("data") if isinstance(listed, dict) else None
        found = next((e for e in entries or () if isinstance(e, dict) and e.get("id") == name), None)
        if found is None:
            raise LaneUnavailable(f"the router has no model {name}")
        model = _section(found)
        if model.failed:
            raise LaneUnavailable(f"{name} could not be loaded: {model.failed}")
        if model.loaded:
            return looks
        await asyncio.sleep(pause)
        pause = min(20 * poll_s, pause * 1.5)
    raise LaneUnavailable(f"{name} was not loaded within {LOAD_TIMEOUT_S:g} s")


def _section(entry: Mapping[str, Any]) -> ServedModel:
    status = entry.get("status")
    status = status if isinstance(status, dict) else {}
    words = status.get("args")
    flags = tuple(_flags([str(word) for word in words])) if isinstance(words, list) else ()
    path = str(entry.get("path") or _behind(flags, "--model", "-m"))
    strategy = _strategy(flags)
    same = tuple(sorted(flag for flag in flags if flag[0] not in INDIFFERENT and not _speculative(flag[0])))
    name = str(entry["id"])
    meta = entry.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    slots, ctx = _behind(flags, "--parallel", "-np"), _behind(flags, "--ctx-size", "-c")
    return ServedModel(
        name,
        path=path,
        draft=_behind(flags, *DRAFT_MODEL),
        loaded=status.get("value") == "loaded",
        ctx=int(ctx) if ctx.isdigit() and int(ctx) else None,
        slots=int(slots) if slots.isdigit() and int(slots) else None,
        drafting=not strategy.is_plain,
        weights=_number(meta.get("n_params")),
        capabilities=_modalities(entry.get("architecture")),
        unrouted="" if _writes(entry.get("architecture")) else "it generates no text",
        aliases=tuple(str(alias) for alias in entry.get("aliases") or ()),
        group=_hash((("path", path), *same)) if path else name,
        strategy=strategy,
        setup=_hash(tuple(sorted(flag for flag in flags if flag[0] not in NAMES_ONLY))),
        failed=_failure(status),
        ngram=_ngram_lengths(flags),
    )


def _flags(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A command line cut before each flag, the program's own name left out."""
    flag: list[str] = []
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            if flag:
                yield tuple(flag)
            flag = [word]
        elif flag:
            flag.append(word)
    if flag:
        yield tuple(flag)


def _speculative(flag: str) -> bool:
    return flag.startswith(("--spec-", "--draft")) or flag.endswith("-draft") or flag in DRAFT_MODEL


def _strategy(flags: Flags) -> Strategy:
    """What the command line asks for, in our names. A draft model alone is loaded and never used."""
    types = [name for name in _behind(flags, "--spec-type").split(",") if name not in ("", "none")]
    sampled = SAMPLED if _behind(flags, SAMPLING_FLAG) == "probabilistic" else ""
    drafters = tuple(our_name(t) + ("" if t.startswith("ngram") else sampled) for t in types)
    length = _behind(flags, "--spec-draft-n-max", *(f"--spec-{name}-size-m" for name in types))
    return Strategy(drafters, int(length) if drafters and length.isdigit() and int(length) else None)


def _ngram_lengths(flags: Flags) -> tuple[int, int] | None:
    """What is looked up and drafted, in tokens; None where not by ``ngram-simple`` alone, on a single hit."""
    if _behind(flags, "--spec-type") != "ngram-simple":
        return None
    given = (_behind(flags, f"--spec-ngram-simple-{name}") for name in ("size-n", "size-m", "min-hits"))
    size, longest, hits = (int(v) if v.isdigit() else usual for v, usual in zip(given, SHIPPED, strict=True))
    return (size, longest) if size and longest and hits == 1 else None


def _behind(flags: Flags, *names: str) -> str:
    """The value of the first of these flags, or nothing."""
    return next((flag[1] for name in names for flag in flags if flag[0] == name and len(flag) > 1), "")


def _failure(status: Mapping[str, Any]) -> str:
    if status.get("failed") is not True:
        return ""
    return f"its process ended with exit code {status.get('exit_code')}; the router's log says why"


def _modalities(architecture: Any) -> frozenset[str]:
    inputs = architecture.get("input_modalities") if isinstance(architecture, dict) else None
    theirs = {"image": "vision", "audio": "audio"}
    return frozenset(theirs[m] for m in inputs if m in theirs) if isinstance(inputs, list) else frozenset()


def _writes(architecture: Any) -> bool:
    outputs = architecture.get("output_modalities") if isinstance(architecture, dict) else None
    return not isinstance(outputs, list) or "text" in outputs


def _hash(flags: Flags) -> str:
    return hashlib.sha256(repr(flags).encode()).hexdigest()[:16]


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
