"""Running a model in Ollama's place: only if it says what Ollama would say, and once Ollama has let go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from specproxy.adapters.embedded.templates import ChatTemplate
from specproxy.adapters.gguf_facts import ModelFacts, read_facts
from specproxy.adapters.gguf_reader import GgufFile
from specproxy.adapters.ollama_setup import PROBES, Message, ModelSetup, Render, read_setup, settle
from specproxy.adapters.ollama_store import store_folders
from specproxy.adapters.twin_ollama import take_leave
from specproxy.config import Settings

__all__ = ["take_over"]

USUAL_URL = "http://127.0.0.1:11434"

log = structlog.get_logger("specproxy")


async def take_over(settings: Settings) -> ModelSetup:
    """Read the model that the settings name from Ollama's folder, settle which template makes Ollama's prompts,
    and have an Ollama that runs put the model out of memory.

    Raises:
        ConfigError: there is no such model, or it cannot be run in Ollama's place; says why.
    """
    name = settings.model or ""
    setup = await asyncio.to_thread(read_setup, name, store_folders())
    shown: list[str] | None = None
    for url in settings.upstream or (USUAL_URL,):
        shown = await take_leave(url, name, PROBES)
        if shown is not None:
            log.info("prompts are compared with those of Ollama", model=name, url=url)
            break
    return await asyncio.to_thread(_settle, setup, shown)


def _settle(setup: ModelSetup, shown: list[str] | None) -> ModelSetup:
    facts = read_facts(setup.model)
    bos, eos = _texts(setup.model, facts)
    own: Render | None = None
    if facts.chat_template is not None:
        template = ChatTemplate(facts.chat_template, bos, eos)

        def own(messages: Sequence[Message]) -> str:
            return template.render(list(messages))

    return settle(setup, own, shown, own_source=facts.chat_template or "", bos=bos)


def _texts(path: Path, facts: ModelFacts) -> tuple[str, str]:
    """The texts of the tokens that begin and end a sequence."""
    with GgufFile(path) as file:
        tokens = file.strings("tokenizer.ggml.tokens") or []
    ids = (facts.bos, facts.eos)
    found = [tokens[i].decode("utf-8", "replace") if i is not None and i < len(tokens) else "" for i in ids]
    return found[0], found[1]
