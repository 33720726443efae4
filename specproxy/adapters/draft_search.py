"""Draft models that lie about on this machine: GGUF files beside the target, and models that Ollama has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specproxy.adapters.gguf_facts import ModelFacts, check_pair, read_facts
from specproxy.adapters.server_program import drafter_in
from specproxy.errors import ModelFileError, PairError

__all__ = ["DraftCandidate", "files_beside", "find_drafts"]

LARGEST_SHARE = 0.5  # of the target's file; what is larger is no draft and is not looked at
MAX_FILES = 64  # that are looked at in one place


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A model that is small enough to draft. `name` is what --draft takes; `share` is its part of the target's
    weight bytes, `kind` the drafter that it is for. `fits` says whether llama.cpp would draft with it; `notes`
    are sentences on why not, or on doubts."""

    name: str
    path: Path
    share: float
    same_family: bool
    fits: bool
    kind: str
    notes: tuple[str, ...] = ()


def files_beside(model: Path) -> Iterator[tuple[str, Path]]:
    """GGUF files in the model's folder, but for itself; none where the folder cannot be listed."""
    try:
        found = sorted(model.parent.glob("*.gguf"))[:MAX_FILES]
    except OSError:
        return
    yield from ((str(path), path) for path in found if path.name != model.name)


def find_drafts(target: ModelFacts, files: Iterable[tuple[str, Path]]) -> tuple[DraftCandidate, ...]:
    """Those of `files` (name and path) that could be drafts, the best first: fitting, same family, and about a
    tenth of the target's size. Reads each file's table of contents; files that are no models are left out."""
    found: dict[str, DraftCandidate] = {}
    for name, path in files:
        try:
            if path.stat().st_size > LARGEST_SHARE * target.size_bytes:
                continue
            draft = read_facts(path)
        except (OSError, ModelFileError):
            continue
        found.setdefault(draft.digest, _candidate(name, target, draft))
    return tuple(sorted(found.values(), key=lambda c: (not c.fits, not c.same_family, abs(c.share - 0.1))))


def _candidate(name: str, target: ModelFacts, draft: ModelFacts) -> DraftCandidate:
    share = draft.weight_bytes / max(1, target.weight_bytes)
    same = draft.architecture == target.architecture
    try:
        notes, fits = check_pair(target, draft), True
    except (PairError, ModelFileError) as error:
        notes, fits = (error.message,), False
    return DraftCandidate(name, draft.path, share, same, fits, drafter_in(draft.sidecar_type), notes)
