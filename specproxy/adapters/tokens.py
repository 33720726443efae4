"""Texts cut into tokens by the vocabulary in a model file, where no server does it.

llama.cpp does the cutting, in a process of its own: damage in a file that ends the process, or a text that it
takes too long over, is not the proxy's end. The process starts with the first text.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from specproxy.adapters.gguf_facts import read_facts
from specproxy.errors import BackendError, ModelFileError

__all__ = ["Tokenizer"]

PROGRAM = (sys.executable, "-m", "specproxy.adapters.embedded.tokenizer")
TIMEOUT_S = 20.0  # loading the vocabulary included
MOST_REPLY = 64 * 1024 * 1024  # bytes of one reply
MOST_FAILURES = 3  # in a row


class Tokenizer:
    """The vocabulary of one model file. One caller at a time.

    Args:
        path: the file. It is read through beforehand, so that no part of it is missing.
        program: what is run, with the path as its last argument.
        timeout_s: seconds within which a reply has to come.
    """

    def __init__(self, path: Path, *, program: Sequence[str] = PROGRAM, timeout_s: float = TIMEOUT_S) -> None:
        self.path, self._program, self._timeout_s = path, tuple(program), timeout_s
        self._process: Process | None = None
        self._failures = 0
        self._checked = False
        self._busy = False  # with a text of which nobody has read the tokens

    @property
    def usable(self) -> bool:
        """Whether it is worth asking: not once it has turned out that it cannot answer."""
        return self._failures < MOST_FAILURES

    async def cut(self, *texts: str) -> list[list[int]]:
        """Token ids of each text, without those that open or end one; texts are never read as control tokens.

        Raises:
            BackendError: the file or what reads it is missing or damaged, or the process died or took too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._ask(texts)
        except (OSError, ValueError, TimeoutError) as error:
            self._failures += 1
            raise BackendError(f"{self.path.name} cuts no text into tokens: {error or 'no reply'}") from error
        except ModelFileError as error:
            self._failures = MOST_FAILURES
            raise BackendError(error.message) from error
        finally:
            if self._busy:
                await self._end()  # its reply to this would be taken for one to the next
        self._failures = 0
        return found

    async def aclose(self) -> None:
        """End the process, and start no other; idempotent."""
        self._failures = MOST_FAILURES
        await self._end()

    def kill(self) -> None:
        """The same without waiting for its end."""
        self._failures = MOST_FAILURES
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _end(self) -> None:
        self._busy = False
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _ask(self, texts: Sequence[str]) -> list[list[int]]:
        if self._process is None:
            self._process = await self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self._busy = True
        process.stdin.write(json.dumps(texts).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError(f"its process ended with code {await process.wait()}")
        self._busy = False
        found: list[list[int]] = json.loads(line)
        return found

    async def _start(self) -> Process:
        """Start the process.

        Raises:
            ModelFileError: the file is damaged, or nothing here can read it.
            OSError: there can be no process.
        """
        if not self._checked:
            await asyncio.to_thread(read_facts, self.path)
            if importlib.util.find_spec("llama_cpp") is None:
                raise ModelFileError("llama-cpp-python is not installed, which would cut texts into tokens")
            self._checked = True
        return await asyncio.create_subprocess_exec(
            *self._program, str(self.path), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MOST_REPLY
        )
