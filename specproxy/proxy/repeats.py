"""Which prompts were seen before, without keeping any: keyed hashes in memory, with a key that dies with us."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from specproxy.records import Turn

__all__ = ["RepeatMemory"]


class RepeatMemory:
    """The latest `capacity` prompts as 16-byte hashes under `key` (random by default)."""

    def __init__(self, capacity: int = 8192, key: bytes | None = None) -> None:
        self._capacity = capacity
        self._key = key or os.urandom(32)
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def digest(self, target: str, turns: Sequence[Turn]) -> bytes:
        """Hash of a prompt: the model and every turn, unambiguously joined."""
        hasher = blake2b(target.encode("utf-8", "surrogatepass"), digest_size=16, key=self._key)
        for turn in turns:
            text = turn.text.encode("utf-8", "surrogatepass")
            hasher.update(f"\0{turn.role}\0{len(text)}\0".encode("utf-8", "surrogatepass"))
            hasher.update(text)
        return hasher.digest()

    def knows(self, digest: bytes) -> bool:
        """Whether it was added and is still remembered."""
        return digest in self._seen

    def add(self, digest: bytes) -> bool:
        """Remember it; returns whether it was known already."""
        known = digest in self._seen
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return known
