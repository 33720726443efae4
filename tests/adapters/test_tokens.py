"""Texts cut into tokens in a process of its own: what can go wrong there stays there."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from specproxy.adapters import tokens as module
from specproxy.adapters.tokens import MOST_FAILURES, Tokenizer
from specproxy.errors import BackendError
from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.relay import settled

LENGTHS = """
import json, sys
for line in sys.stdin:
    print(json.dumps([[len(text)] for text in json.loads(line)]), flush=True)
"""
MOODS = {
    "dies": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "import time\ntime.sleep(60)",
    "babbles": "import sys\nfor line in sys.stdin: print('no', flush=True)",
    "dies half-way": "import sys\nsys.stdin.readline()\nsys.stdout.write('[[1,')",
}


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is taken for a whole one."""
    monkeypatch.setattr(module, "read_facts", lambda path: None)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    return Path("m.gguf")


def scripted(path: Path, script: str, timeout_s: float = 10.0) -> Tokenizer:
    return Tokenizer(path, program=(sys.executable, "-c", script), timeout_s=timeout_s)


async def test_one_process_answers_one_text_after_another(sound: Path) -> None:
    """It starts with the first one, and ends when told."""
    tokenizer = scripted(sound, LENGTHS)
    assert tokenizer._process is None
    assert await tokenizer.cut("four", "line\nbreak") == [[4], [10]]
    process = tokenizer._process
    assert process is not None
    assert await tokenizer.cut("") == [[0]]
    assert tokenizer._process is process
    await tokenizer.aclose()
    assert process.returncode is not None
    await tokenizer.aclose()
    assert not tokenizer.usable


async def test_it_can_be_killed_at_once(sound: Path) -> None:
    tokenizer = scripted(sound, LENGTHS)
    tokenizer.kill()
    tokenizer = scripted(sound, LENGTHS)
    await tokenizer.cut("four")
    process = tokenizer._process
    assert process is not None
    tokenizer.kill()
    assert await process.wait() < 0
    assert not tokenizer.usable
    await tokenizer.aclose()


@pytest.mark.parametrize("mood", list(MOODS))
async def test_a_process_that_fails_is_replaced_and_at_last_given_up(mood: str, sound: Path) -> None:
    """A crash in native code, an endless text: an error each, nothing that lingers, and no fourth try."""
    tokenizer = scripted(sound, MOODS[mood], 0.5 if mood == "hangs" else 10.0)
    for failures in range(MOST_FAILURES):
        assert tokenizer.usable, failures
        with pytest.raises(BackendError, match=r"m\.gguf cuts no text into tokens"):
            await tokenizer.cut("text")
        process = tokenizer._process
        assert process is None or mood == "babbles"
    assert not tokenizer.usable
    await tokenizer.aclose()


async def test_a_success_makes_up_for_failures(sound: Path) -> None:
    tokenizer = scripted(sound, LENGTHS)
    tokenizer._failures = MOST_FAILURES - 1
    assert await tokenizer.cut("text") == [[4]]
    assert tokenizer._failures == 0
    await tokenizer.aclose()


async def test_who_gives_up_leaves_no_answer_for_the_next(sound: Path) -> None:
    """A question that was cancelled is not answered to somebody else."""
    slow = "import sys, time\nfor line in sys.stdin:\n time.sleep(0.2)\n print([[len(line)]], flush=True)"
    tokenizer = scripted(sound, slow)
    asking = asyncio.ensure_future(tokenizer.cut("a long text that nobody waits for"))
    await settled(lambda: tokenizer._process is not None)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert tokenizer._process is None
    assert await tokenizer.cut("ab") == [[len('["ab"]\n')]]
    await tokenizer.aclose()


async def test_a_damaged_file_is_not_even_tried(tmp_path: Path, pair: CalibratedPair) -> None:
    """llama.cpp gets to see whole files only."""
    whole = pair.target.read_bytes()
    for content in (b"", b"GGUF", whole[: len(whole) // 2], whole[:-100]):
        path = tmp_path / "cut.gguf"
        path.write_bytes(content)
        tokenizer = Tokenizer(path, program=("/nowhere",))
        with pytest.raises(BackendError, match=r"cut\.gguf"):
            await tokenizer.cut("text")
        assert not tokenizer.usable


async def test_without_the_binding_there_is_no_vocabulary(
    pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    tokenizer = Tokenizer(pair.target, program=("/nowhere",))
    with pytest.raises(BackendError, match="llama-cpp-python is not installed"):
        await tokenizer.cut("text")
    assert not tokenizer.usable


async def test_no_process_can_be_started(sound: Path) -> None:
    tokenizer = Tokenizer(sound, program=("/nowhere/at/all",))
    with pytest.raises(BackendError, match="cuts no text"):
        await tokenizer.cut("text")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("calibrated"))


@pytest.mark.embedded
async def test_the_vocabulary_of_a_model(pair: CalibratedPair) -> None:
    """The same tokens as the engine's, also of a text that is cut in parts."""
    from specproxy.adapters.embedded.tokenizer import PART
    from specproxy.adapters.embedded.vocabulary import Vocabulary

    text = "some words of this language, " * (PART // 10)
    vocabulary = Vocabulary(pair.target)
    expected = [vocabulary.tokenize(t, add_special=False, parse_special=False) for t in ("", "ab", text)]
    vocabulary.close()
    tokenizer = Tokenizer(pair.target)
    assert await tokenizer.cut("", "ab", text) == expected
    await tokenizer.aclose()


@pytest.mark.embedded
async def test_a_file_without_a_model_that_llama_cpp_knows(tmp_path: Path, pair: CalibratedPair) -> None:
    """It is whole by its table, and cannot be loaded all the same: an error, and the proxy goes on."""
    foreign = tmp_path / "foreign.gguf"
    whole = pair.target.read_bytes()
    foreign.write_bytes(whole.replace(b"llama", b"lllma"))
    tokenizer = Tokenizer(foreign)
    with pytest.raises(BackendError):
        await tokenizer.cut("text")
    await tokenizer.aclose()
