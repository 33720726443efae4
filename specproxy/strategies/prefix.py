"""What each lane probably has in its prompt cache.

Prompts are cut into blocks; a block's hash covers everything up to its end, so equal hashes mean equal
prefixes. Hashes are keyed with a secret of this process and never leave it. Per lane, the most recently used
blocks are remembered up to a capacity, as a server's cache would keep them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

__all__ = ["BLOCK_CHARS", "BLOCK_TOKENS", "PrefixModel", "block_hashes"]

BLOCK_TOKENS = 64
BLOCK_CHARS = 4 * BLOCK_TOKENS
"""Characters of a block, at four characters a token."""


def block_hashes(texts: Iterable[str], key: bytes) -> tuple[int, ...]:
    """Chained hashes of the whole blocks of a prompt whose pieces are `texts`, in order.

    A piece's boundary is part of what is hashed, so that ("ab", "c") and ("a", "bc") differ. The unfinished
    block at the end is left out. `key` has 16 to 64 bytes.
    """
    prompt = "\0".join(texts)
    if len(prompt) < BLOCK_CHARS:
        return ()
    chain = blake2b(key=key, digest_size=8)
    found = []
    for start in range(0, len(prompt) - BLOCK_CHARS + 1, BLOCK_CHARS):
        chain.update(prompt[start : start + BLOCK_CHARS].encode("utf-8", "surrogatepass"))
        found.append(int.from_bytes(chain.digest(), "little"))
    return tuple(found)


class PrefixModel:
    """Remembered blocks by lane, least recently used ones forgotten first.

    `capacity_tokens` is what one lane's cache holds; every method is linear in the number of blocks passed.
    """

    def __init__(self, capacity_tokens: int = 65_536) -> None:
        self._capacity = max(1, capacity_tokens // BLOCK_TOKENS)
        self._lanes: dict[str, OrderedDict[int, None]] = {}

    def note(self, lane: str, hashes: Sequence[int]) -> None:
        """A prompt with these blocks ran on a lane."""
        blocks = self._lanes.setdefault(lane, OrderedDict())
        for value in reversed(hashes):  # the end of a prompt is forgotten before its beginning
            blocks[value] = None
            blocks.move_to_end(value)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def hits(self, hashes: Sequence[int]) -> dict[str, int]:
        """Tokens of the prompt that each lane has cached; lanes without any are left out."""
        found = {}
        for lane, blocks in self._lanes.items():
            n = 0
            for value in hashes:
                if value not in blocks:
                    break
                n += 1
            if n:
                found[lane] = n * BLOCK_TOKENS
        return found

    def forget(self, lane: str) -> None:
        """The lane's cache is gone: it was restarted or reloaded."""
        self._lanes.pop(lane, None)
