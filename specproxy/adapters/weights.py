"""The file that a running server decodes with, if we can use it too, and how that server was started."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from specproxy.adapters.base import ServedModel
from specproxy.adapters.gguf_facts import ModelFacts, read_facts
from specproxy.adapters.server_program import our_name
from specproxy.errors import ModelFileError
from specproxy.records import Strategy

__all__ = ["Listener", "Weights", "find_listener", "find_weights"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SIZE_RANGE = 0.75, 1.02  # a server may leave MTP layers out of what it counts
DRAFT_FLAGS = ("-md", "--spec-draft-model", "--model-draft")
RUNNING = ("OLLAMA_", "CUDA_", "HIP_", "ROCR_", "HSA_", "GPU_", "GGML_", "LLAMA_ARG_")
SECRETS = frozenset({"OLLAMA_API_KEY", "LLAMA_ARG_API_KEY"})


@dataclass(frozen=True, slots=True)
class Listener:
    """A process that listens on a port: its command line and working directory, and as far as they can be read
    its program and what its environment says about how models run."""

    command: tuple[str, ...]
    cwd: Path
    program: str = ""
    environ: tuple[tuple[str, str], ...] | None = None

    def behind(self, *flags: str) -> str:
        """The word behind the first of these flags, or nothing."""
        return next((b for a, b in itertools.pairwise(self.command) if a in flags), "")

    @property
    def strategy(self) -> Strategy | None:
        """What ``--spec-type`` asks for, in our names; None where nothing is said."""
        types = [name for name in self.behind("--spec-type").split(",") if name not in ("", "none")]
        drafters = tuple(our_name(name) for name in types)
        return Strategy(drafters) if drafters else None


@dataclass(frozen=True, slots=True)
class Weights:
    """Facts of the file, or as a clause why there are none; `draft` is the drafter's file beside it."""

    facts: ModelFacts | None = None
    draft: ModelFacts | None = None
    reason: str = ""
    listener: Listener | None = None


def find_weights(url: str, model: ServedModel) -> Weights:
    """Look for a model's file where its server says that it is. Blocks: reads files and the process table."""
    parts = urlsplit(url)
    if parts.hostname not in LOOPBACK:
        return Weights(reason=f"{parts.hostname} may be another machine, so its files are not ours to use")
    listener = find_listener(parts.port or 80)
    if not model.path:
        return Weights(reason="it does not say which file it has loaded", listener=listener)
    cwd = listener.cwd if listener is not None else None
    path = _absolute(Path(model.path), cwd)
    try:
        facts = read_facts(path) if path.is_absolute() else None
    except ModelFileError as error:
        return Weights(reason=error.message, listener=listener)
    if facts is None:
        return Weights(reason=f"it names a relative path, {path}, and its directory is not known")
    if model.weights and not SIZE_RANGE[0] <= model.weights / facts.parameters <= SIZE_RANGE[1]:
        reason = f"{path} is another model here (does the server run in a container?)"
        return Weights(reason=reason, listener=listener)
    draft = model.draft or (listener.behind(*DRAFT_FLAGS) if listener is not None else "")
    return Weights(facts, _read_draft(_absolute(Path(draft), cwd)) if draft else None, "", listener)


def _absolute(path: Path, cwd: Path | None) -> Path:
    return path if cwd is None else cwd / path


def _read_draft(path: Path) -> ModelFacts | None:
    try:
        return read_facts(path)
    except ModelFileError:
        return None  # the model can be used without it


def find_listener(port: int) -> Listener | None:
    """The process that listens on a TCP port of this machine, if it is one of ours to look at."""
    try:
        pids = {
            c.pid
            for c in psutil.net_connections(kind="tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid
        }
        process = psutil.Process(pids.pop()) if len(pids) == 1 else None
        return _listener(process) if process is not None else None
    except psutil.Error:
        return None


def _listener(process: psutil.Process) -> Listener:
    command: Sequence[str] = process.cmdline()
    cwd = Path(process.cwd())
    try:
        told = sorted(
            (k, v) for k, v in process.environ().items() if k.startswith(RUNNING) and k not in SECRETS
        )
        return Listener(tuple(command), cwd, process.exe(), tuple(told))
    except (psutil.Error, OSError):
        return Listener(tuple(command), cwd)
