"""A scripted engine: tokens are bytes, replies are written down beforehand, and every request is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from specproxy.adapters.embedded.types import (
    Finished,
    GenerateRequest,
    ModelCard,
    TokenEvent,
    TokenLogprob,
)
from specproxy.errors import RequestError
from specproxy.records import EngineReport, Strategy

__all__ = ["BOS", "EOS", "FakeEngine", "card"]

BOS, EOS = 256, 257
SPECIAL = {BOS: "<s>", EOS: "</s>", 258: "<tool_call>", 259: "</tool_call>", 260: "<think>", 261: "</think>"}


def card(**changes: object) -> ModelCard:
    """The fake model's card."""
    values: dict[str, object] = {
        "name": "fake", "path": "/models/fake.gguf", "context": 4096, "train_context": 2048, "vocab": 262,
        "embedding": 4, "parameters": 1_000_000, "size_bytes": 2_000_000, "architecture": "llama",
        "quantisation": "F16", "chat_template": None, "bos": BOS, "eos": EOS,
        "strategies": (Strategy(), Strategy(("ngram",), 8), Strategy(("auto",))),
        "refused": {"mtp": "the model file has no MTP layers"},
    }  # fmt: skip
    return ModelCard(**{**values, **changes})  # type: ignore[arg-type]  # of any field


class FakeEngine:
    """Plays back `replies`: each a sequence of texts, one event each; the last reply repeats.

    An exception among the texts is raised at that point. With `gate` set, every event waits for it.
    """

    def __init__(self, *replies: Sequence[str | Exception], **card_changes: object) -> None:
        self.card = card(**card_changes)
        self.replies = list(replies) or [["Hello", " world"]]
        self.requests: list[GenerateRequest] = []
        self.closed = 0  # generations that were given up before their end
        self.unloads = 0
        self.step_s = 0.0
        self.started = False
        self.gate: asyncio.Event | None = None
        self.given_up = asyncio.Event()
        self.taken = asyncio.Event()  # a request has come
        self.finish = "stop"
        self.stop_text = ""

    async def start(self) -> None:
        self.started = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | Finished, None]:
        self.requests.append(request)
        self.taken.set()
        if len(request.prompt) >= self.card.context:
            raise RequestError("the prompt is too long", code="exceed_context_size_error")
        index = min(len(self.requests), len(self.replies)) - 1
        ids: list[int] = []
        ended = False
        try:
            for text in self.replies[index] if not request.want_embedding else ():
                if self.gate is not None:
                    await self.gate.wait()
                if isinstance(text, Exception):
                    raise text
                tokens = tuple(text.encode())
                ids += tokens
                yield TokenEvent(text, tokens, self._logprobs(request, tokens))
            ended = True
        finally:
            if not ended:
                self.closed += 1
                self.given_up.set()
        yield Finished(
            reason=self.finish, stop_text=self.stop_text, prompt_n=len(request.prompt) - 2, cached_n=2,
            prompt_ms=10.0, predicted_n=len(ids), predicted_ms=20.0, draft_n=8, draft_n_accepted=6, load_ms=5.0,
            embedding=(3.0, 4.0, 0.0, 0.0) if request.want_embedding else (),
            report=EngineReport(request.request_id, request.strategy.name, 3, prompt_ids=request.prompt,
                                output_ids=tuple(ids), plans=(("mtp:3", 2), ("plain", 1)),
                                stopped_drafting="mtp is wrong"),
        )  # fmt: skip

    @staticmethod
    def _logprobs(request: GenerateRequest, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        if request.sampling.logprobs is None:
            return ()
        top = tuple((t, bytes([t]), -0.5 - t) for t in range(65, 65 + request.sampling.logprobs))
        return tuple(TokenLogprob(token, bytes([token]), -0.25, top) for token in tokens)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        ids: list[int] = [BOS] if add_special else []
        while text:
            special = next((i for i, t in SPECIAL.items() if parse_special and text.startswith(t)), None)
            if special is None:
                ids += text[0].encode()
                text = text[1:]
            else:
                ids.append(special)
                text = text[len(SPECIAL[special]) :]
        return ids

    def detokenize(self, tokens: list[int]) -> bytes:
        return b"".join(SPECIAL[t].encode() if t in SPECIAL else bytes([t]) for t in tokens)

    async def unload(self) -> None:
        self.unloads += 1

    async def aclose(self) -> None:
        self.started = False
