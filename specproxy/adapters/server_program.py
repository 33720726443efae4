"""Which llama-server is there, what it can do, and the arguments that make it a lane of one strategy."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specproxy.adapters import xllama_child
from specproxy.errors import ConfigError
from specproxy.records import Strategy

__all__ = [
    "DRAFT_FILE",
    "NGRAM_MAX",
    "NGRAM_SIZE",
    "SAMPLED",
    "SAMPLING_FLAG",
    "SHIPPED_NGRAM_MAX",
    "SHIPPED_NGRAM_SIZE",
    "LaneOptions",
    "ServerProgram",
    "drafter_in",
    "find_program",
    "kinds_of",
    "lane_arguments",
    "our_name",
    "uses_draft_file",
]

SPEC_TYPES = {
    "ngram": "ngram-simple",
    "draft": "draft-simple",
    "mtp": "draft-mtp",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
"""Our names of drafters → llama-server's, where they differ."""

NGRAM_SIZE, NGRAM_MAX = 3, 8
"""Tokens that n-gram lanes of ours look up, and the longest draft: most of a batch of llama-server's own 48 is
wasted."""

SHIPPED_NGRAM_SIZE, SHIPPED_NGRAM_MAX = 12, 48
"""The same lengths as llama-server has them by itself."""

SAMPLED, SAMPLING_FLAG = "-sampled", "--spec-draft-sampling"
"""Behind a drafter's name: drafts are drawn, and verified by rejection sampling, instead of the likeliest token
compared with the one drawn. The same distribution, but another text for the same seed."""

DRAFT_FILE = frozenset({"draft", "eagle3", "dflash", "dspark"})
"""Drafters that always come in a file of their own; a prediction head (mtp) may too."""

_OUR_NAMES = {theirs: ours for ours, theirs in SPEC_TYPES.items()}

INSTALL_HINT = "pip install 'specproxy[managed]', or put a llama-server on PATH or in the llama_server setting"


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """A llama-server that can be run. `build` identifies it; statistics of another build don't count for it."""

    kind: Literal["binary", "wheel"]
    command: tuple[str, ...]
    build: str
    flags: frozenset[str]
    spec_types: frozenset[str]

    def flag(self, *spellings: str) -> str | None:
        """The first of these spellings that it knows."""
        return next((flag for flag in spellings if flag in self.flags), None)


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """What all lanes of a target have in common. `ctx` is in tokens for each slot; None is up to the server.

    `ngram_size` is the length of the n-gram that is looked up. `draft_type` is the spec type that a draft
    file asks for.
    """

    model: Path
    alias: str
    ctx: int | None = None
    slots: int = 1
    threads: int | None = None
    n_gpu_layers: int | None = None
    cache_ram_mib: int | None = None
    draft: Path | None = None
    draft_type: str = "draft-simple"
    ngram_size: int = NGRAM_SIZE
    draft_p_min: float | None = None
    extra_args: tuple[str, ...] = field(default=())


def our_name(spec_type: str) -> str:
    """Our name of what llama-server calls a spec type."""
    return _OUR_NAMES.get(spec_type, spec_type)


def kinds_of(strategy: Strategy) -> frozenset[str]:
    """Its drafters, whether they are sampled or not."""
    return frozenset(name.removesuffix(SAMPLED) for name in strategy.drafters)


def uses_draft_file(strategy: Strategy, sidecar_type: str | None) -> bool:
    """Whether it drafts with what is in a draft file, by that file's `ModelFacts.sidecar_type`."""
    return drafter_in(sidecar_type) in kinds_of(strategy)


def drafter_in(sidecar_type: str | None) -> str:
    """Our name of the drafter in a draft file, by its `ModelFacts.sidecar_type`."""
    return our_name(sidecar_type or "draft-simple")


def find_program(configured: Path | None = None) -> ServerProgram:
    """The llama-server to use: the configured binary, one on PATH, or the one in the xllamacpp wheel.

    Runs the binary twice (``--version``, ``--help``); blocks for up to some seconds.

    Raises:
        ConfigError: there is none, or the configured one cannot be run.
    """
    if configured is not None:
        if not configured.is_file():
            raise ConfigError(f"llama_server: {configured}: no such file", hint=INSTALL_HINT)
        return _binary(configured)
    if found := shutil.which("llama-server"):
        return _binary(Path(found))
    if importlib.util.find_spec("xllamacpp") is not None:
        return _wheel()
    raise ConfigError("no llama-server found: none on PATH, and xllamacpp is not installed", hint=INSTALL_HINT)


def _wheel() -> ServerProgram:
    return ServerProgram(
        kind="wheel",
        command=(sys.executable, "-m", "specproxy.adapters.xllama_child"),
        build=f"xllamacpp {importlib.metadata.version('xllamacpp')}",
        flags=xllama_child.known_flags(),
        spec_types=frozenset(
            {"none", "draft-simple", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"}
            | {"ngram-simple", "ngram-map-k", "ngram-mod"}
        ),
    )


def _binary(path: Path) -> ServerProgram:
    version = re.search(r"version: (.+)", _ask(path, "--version"))
    text = _ask(path, "--help")
    lines = [line for line in text.splitlines() if line.startswith("-") and "has been removed" not in line]
    flags = {flag for line in lines for flag in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", line)}
    if "--port" not in flags:
        raise ConfigError(
            f"{path} does not look like a llama-server: --help shows no --port", hint=INSTALL_HINT
        )
    listed = re.search(r"--spec-type\s+(\S+)", text)
    types = frozenset(re.findall(r"[a-z][\w-]+", listed[1])) if listed else frozenset()
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    build = f"llama-server {version[1].strip() if version else 'unknown'} {content}"
    return ServerProgram("binary", (str(path),), build, frozenset(flags), types)


def _ask(path: Path, flag: str) -> str:
    try:
        done = subprocess.run([path, flag], capture_output=True, text=True, errors="replace", timeout=30)  # noqa: S603 - the user's own llama-server
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"llama_server: {path} cannot be run: {error}", hint=INSTALL_HINT) from error
    return done.stdout + done.stderr


def lane_arguments(program: ServerProgram, options: LaneOptions, strategy: Strategy) -> tuple[str, ...]:
    """Arguments of a llama-server that decodes with `strategy`, on a port of its own choice.

    Raises:
        ConfigError: this llama-server cannot do that, or does not know an extra argument.
    """
    arguments = ["-m", str(options.model), "--host", "127.0.0.1", "--port", "0", "--alias", options.alias]
    arguments += ["-np", str(options.slots)]
    if options.ctx is not None:
        arguments += ["-c", str(options.ctx * options.slots)]
    if options.threads is not None:
        arguments += ["-t", str(options.threads)]
    if options.n_gpu_layers is not None:
        arguments += ["-ngl", str(options.n_gpu_layers)]
    if options.cache_ram_mib is not None and program.flag("--cache-ram"):
        arguments += ["--cache-ram", str(options.cache_ram_mib)]
    if no_ui := program.flag("--no-webui", "--no-ui"):
        arguments.append(no_ui)
    if slots := program.flag("--slots"):
        arguments.append(slots)
    arguments += _speculation(program, options, strategy)
    arguments += options.extra_args
    if program.kind == "wheel":
        xllama_child.parse(arguments)
    return tuple(arguments)


def _speculation(program: ServerProgram, options: LaneOptions, strategy: Strategy) -> list[str]:
    types = [_spec_type(name) for name in strategy.drafters]
    if "--spec-type" not in program.flags:
        return _speculation_before_types(program, options, strategy)
    if missing := [kind for kind in types if kind not in program.spec_types]:
        raise ConfigError(
            f"{program.build} has no spec type {missing[0]}", hint="a newer llama.cpp may have it"
        )
    arguments = ["--spec-type", ",".join(types) or "none"]
    for kind in types:
        if kind.startswith("ngram-"):
            arguments += _ngram_sizes(program, kind, options.ngram_size, strategy.n_max)
        else:
            # never 0: with draft-mtp the server aborts on its first request
            arguments += ["--spec-draft-n-max", str(strategy.n_max or 3)]
            if options.draft_p_min is not None:
                arguments += ["--spec-draft-p-min", str(options.draft_p_min)]
            if options.draft is not None and kind == options.draft_type:
                arguments += ["--spec-draft-model", str(options.draft)]
    if any(name.endswith(SAMPLED) for name in strategy.drafters):
        if program.flag(SAMPLING_FLAG) is None:
            raise ConfigError(f"{program.build} cannot sample drafts", hint="a newer llama.cpp may")
        arguments += [SAMPLING_FLAG, "probabilistic"]
    return arguments


def _spec_type(drafter: str) -> str:
    kind = drafter.removesuffix(SAMPLED)
    return SPEC_TYPES.get(kind, kind)


def _ngram_sizes(program: ServerProgram, kind: str, size: int, n_max: int | None) -> list[str]:
    if kind == "ngram-mod":  # its own defaults are as good as any that were measured
        return []
    arguments = []
    for flag, value in ((f"--spec-{kind}-size-n", size), (f"--spec-{kind}-size-m", n_max or NGRAM_MAX)):
        if flag in program.flags:
            arguments += [flag, str(value)]
    return arguments


def _speculation_before_types(program: ServerProgram, options: LaneOptions, strategy: Strategy) -> list[str]:
    """Builds without --spec-type: a draft model is all they have."""
    if strategy.is_plain:
        return []
    flag = program.flag("--draft-max", "--draft")
    if strategy.drafters != ("draft",) or options.draft is None or flag is None:
        raise ConfigError(f"{program.build} cannot do {strategy.name}", hint="a newer llama.cpp can")
    return ["-md", str(options.draft), flag, str(strategy.n_max or 3)]
