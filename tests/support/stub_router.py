"""A program that looks like a llama-server which can be a router: --help, --version, --models-preset FILE.

It reads the file as llama.cpp does, as far as a list of models goes, and serves that as `FakeRouter`.
"""

from __future__ import annotations

import asyncio
import configparser
import sys
from pathlib import Path

from tests.support.fake_router import FakeRouter, arguments

__all__ = ["write_program"]

TOP = "above all sections"
HELP = """
-m,    --model FNAME                    model path
-c,    --ctx-size N                     size of the prompt context
-np,   --parallel N                     number of server slots
--port PORT                             port to listen
--slots, --no-slots                     expose slots monitoring endpoint
--no-webui                              Disable the Web UI
--spec-type none,draft-simple,draft-mtp,ngram-simple   types of speculative decoding
--spec-draft-n-max N                    number of tokens to draft
--spec-draft-model, -md FNAME           draft model
--spec-ngram-simple-size-n N            length of lookup
--spec-ngram-simple-size-m N            length of draft
--models-preset PATH                    path to INI file
--models-max N                          maximum number of models
"""


def write_program(path: Path, *options: str) -> Path:
    """Write the program; with ``--deaf`` it takes every section for plain."""
    extra = " ".join(options)
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.support.stub_router "$@" {extra}\n')
    path.chmod(0o755)
    return path


async def _serve(text: str, *, deaf: bool) -> None:
    parser = configparser.ConfigParser(default_section="*", comment_prefixes=(";", "#"))
    parser.read_string(f"[{TOP}]\n{text}")
    sections = {}
    for name in parser.sections():
        if name != TOP:
            values = dict(parser[name])
            flags = [
                w for k, v in values.items() if k != "model" for w in (f"--{k}", *([v] if v != "true" else []))
            ]
            sections[name] = arguments(values["model"], *([] if deaf else flags), alias=name)
    async with FakeRouter(sections) as router:
        print(f"srv: listening on {router.url}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Answer and end, or serve until killed."""
    words = sys.argv[1:]
    if "--version" in words:
        print("version: b11434 (stub)", file=sys.stderr)
    elif "--help" in words:
        print(HELP)
    else:
        file = Path(words[words.index("--models-preset") + 1])
        asyncio.run(_serve(file.read_text(encoding="utf-8"), deaf="--deaf" in words))


if __name__ == "__main__":
    main()
