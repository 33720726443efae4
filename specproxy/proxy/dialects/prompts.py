"""Raw prompts: strings, token ids, mixtures, and text to which a client already applied a chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specproxy.proxy.dialects.fields import items, mapping, text
from specproxy.records import Turn

__all__ = ["prompt_turns", "template_turns"]

# One pattern a template family; group 1 is the role. Text up to the next header, less the end marks, is the
# turn.
_HEADERS = (
    re.compile(r"<\|im_start\|>(\w+)\n?"),  # ChatML
    re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*"),  # Llama 3
    re.compile(r"<start_of_turn>(\w+)\n?"),  # Gemma
    re.compile(r"<\|(system|user|assistant)\|>\n?"),  # Phi, Zephyr
    re.compile(r"^### (System|Instruction|Input|Response):\n?", re.MULTILINE),  # Alpaca
    re.compile(r"(\[/?INST\])"),  # Mistral, Llama 2
)
_ENDS = re.compile(r"<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|</s>|<s>|<\|begin_of_text\|>|<bos>")
_ROLES = {
    "system": "system",
    "assistant": "assistant",
    "model": "assistant",
    "response": "assistant",
    "[/inst]": "assistant",
    "tool": "tool",
    "ipython": "tool",
}


def prompt_turns(prompt: object) -> tuple[tuple[Turn, ...], int]:
    """Turns and number of images of a `prompt` field.

    A string may hold a chat template; token ids say nothing that can be read; llama.cpp's object form carries
    its text in `prompt_string` and its media in `multimodal_data`. A list of strings is a batch.
    """
    if isinstance(prompt, str):
        return tuple(template_turns(prompt)), 0
    entries = [prompt] if isinstance(prompt, dict) else items(prompt)
    turns: list[Turn] = []
    images = 0
    for entry in entries:
        if isinstance(entry, dict):
            images += len(items(mapping(entry).get("multimodal_data")))
            entry = text(entry.get("prompt_string"))
        if isinstance(entry, str):
            turns += template_turns(entry)
    return tuple(turns), images


def template_turns(prompt: str) -> list[Turn]:
    """Split a prompt at the headers of the chat templates in common use; without any it is one user turn."""
    for header in _HEADERS:
        found = list(header.finditer(prompt))
        if found:
            return [turn for turn in _split(prompt, found) if turn.text]
    return [Turn("user", prompt)]


def _split(prompt: str, headers: list[re.Match[str]]) -> Iterator[Turn]:
    yield Turn("system", _clean(prompt[: headers[0].start()]))
    ends = [header.start() for header in headers[1:]] + [len(prompt)]
    for header, end in zip(headers, ends, strict=True):
        role = _ROLES.get(header.group(1).lower(), "user")
        yield Turn(role, _clean(prompt[header.end() : end]))


def _clean(piece: str) -> str:
    return _ENDS.sub("", piece).strip()
