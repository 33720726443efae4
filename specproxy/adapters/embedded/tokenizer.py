"""Cuts texts into tokens by a model file's vocabulary: the program behind `adapters.tokens`.

    python -m specproxy.adapters.embedded.tokenizer MODEL.gguf

Every line of standard input is a JSON list of texts, and is answered by a line with the list of their token
ids. It ends when standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.errors import ModelFileError

__all__ = ["main", "parts"]

PART = 4096  # characters that are cut at once
NEAR = 1024  # how many characters before the end of a part a word's end is looked for
WORD_END = re.compile(r"\w(?= \w)")
NICE = 10  # whoever waits for tokens of an answer comes first


def parts(text: str) -> Iterator[str]:
    """A text in parts of at most `PART` characters, cut between words where there are any.

    llama.cpp takes more than linear time on some vocabularies, and no token that matters goes from one word to
    the next.
    """
    at = 0
    while len(text) - at > PART:
        words = [found.end() for found in WORD_END.finditer(text, at + PART - NEAR, at + PART)]
        end = words[-1] if words else at + PART
        yield text[at:end]
        at = end
    yield text[at:]


def main() -> int:
    """Answer until there is nothing more to do; exit code 1 for a file that cannot be loaded."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        vocabulary = Vocabulary(Path(sys.argv[1]))
    except ModelFileError as error:
        print(error, file=sys.stderr)
        return 1
    for line in sys.stdin.buffer:
        found = [
            [
                token
                for part in parts(text)
                for token in vocabulary.tokenize(part, add_special=False, parse_special=False)
            ]
            for text in json.loads(line)
        ]
        sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
        sys.stdout.buffer.flush()
    vocabulary.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
