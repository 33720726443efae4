"""Whether a llama-server of ours says what somebody else's server would say: the same prompt, for one thing.

Templates are not believed but compared: both make prompts of a few chats.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from specproxy.adapters.ask import get_json, post_json
from specproxy.adapters.http import HttpTransport

__all__ = ["TIMEOUT_S", "Chat", "Overrides", "Twin", "compare", "made_by"]

Chat = dict[str, Any]
Overrides = tuple[tuple[str, str | int | float | bool | tuple[str, ...]], ...]

CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "First question?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Line one\nline two "}],
    [
        {"role": "user", "content": "First question?"},
        {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "And the next?"},
    ],
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "Which word."}},
            "required": ["word"],
        },
    },
}
TIMEOUT_S = 20.0  # the server may load or wake the model first


@dataclass(frozen=True, slots=True)
class Twin:
    """What came of comparing: `reason`, as a clause, is why lanes cannot stand in for the server, `tools` tells
    whether they can for requests with tools, and `overrides` are request fields that make defaults the same.
    """

    reason: str = ""
    tools: bool = False
    overrides: Overrides = ()


async def compare(shown: Callable[[Chat], Awaitable[str | None]], lane: HttpTransport, *, tools: bool) -> Twin:
    """Compare the prompts that a server makes (`shown`; None where it does not show them) with a lane's.

    Raises:
        BackendError: one of them does not answer.
    """
    _, props = await get_json(lane.open, "/props", timeout_s=TIMEOUT_S)
    bos = str(props.get("bos_token") or "") if isinstance(props, dict) else ""

    async def difference(chat: Chat) -> str:
        theirs, ours = await shown(chat), await made_by(lane, chat)
        if theirs is None:
            return "it does not show the prompts that it makes, so they cannot be compared"
        if ours is None or ours.removeprefix(bos) != theirs.removeprefix(bos):
            return "it makes other prompts of a chat than the template in the model's file does"
        return ""

    for messages in CHATS:
        if reason := await difference({"messages": messages}):
            return Twin(reason)
    return Twin(tools=tools and not await difference({"messages": CHATS[0], "tools": [TOOL]}))


async def made_by(server: HttpTransport, chat: Chat) -> str | None:
    """The prompt that a llama-server makes of a chat; None if it does not say.

    Raises:
        BackendError: it does not answer.
    """
    status, reply = await post_json(server.open, "/apply-template", chat, timeout_s=TIMEOUT_S)
    prompt = reply.get("prompt") if status == 200 and isinstance(reply, dict) else None
    return prompt if isinstance(prompt, str) else None
