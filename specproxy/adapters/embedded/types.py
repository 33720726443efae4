"""What goes into the engine and what comes out: the border between its HTTP face and its decode thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from specproxy.records import EnginePriors, EngineReport, Strategy

__all__ = [
    "Engine",
    "Finished",
    "GenerateRequest",
    "ModelCard",
    "Outlet",
    "Sampling",
    "TokenEvent",
    "TokenLogprob",
]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling exactly as asked; defaults are llama-server's. `seed` None draws one.

    `grammar` is GBNF text. `stop` strings end the text before them, `stop_tokens` are token ids.
    `logprobs` is the number of alternatives to report for each token (0: the token's own only, None: none).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    grammar: str | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


class Outlet(Protocol):
    """A way for a stream's text past the event loop, which lends it to the courier while it is idle."""

    send: Callable[[TokenEvent], bool] | None
    """Takes an event on the courier's thread, never waits, and says whether it has dealt with it; None: shut.

    The loop opens it when nothing waits to be sent. Whoever gives the loop an event shuts it before.
    """


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate. `max_tokens` None means up to the context's end; 0 only processes the prompt.

    Control tokens are left out of the text, as llama-server does, except those in `render_tokens`: tags of tool
    calls and of reasoning, which the HTTP face reads.
    """

    request_id: str
    prompt: tuple[int, ...] = field(repr=False)
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    strategy: Strategy = field(default_factory=Strategy)
    priors: EnginePriors | None = None
    want_embedding: bool = False
    render_tokens: frozenset[int] = frozenset()
    outlet: Outlet | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability under the target, and the most likely alternatives, best first."""

    token: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


class TokenEvent(NamedTuple):  # one a token: a frozen dataclass takes several times as long to make
    """Text that became final: whole UTF-8 characters, never part of a possible stop string.

    `tokens` are the ids behind it (several, when a draft was accepted).
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """How a sequence ended. `reason` is stop (end token or stop string), length, or cancelled.

    Counts are llama-server's: `predicted_n` tokens in `predicted_ms` after the prompt was processed.
    """

    reason: str
    stop_text: str = ""
    prompt_n: int = 0  # prompt tokens processed now
    cached_n: int = 0  # prompt tokens taken from the cache
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    load_ms: float = 0.0
    embedding: tuple[float, ...] = ()
    report: EngineReport | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the engine has loaded."""

    name: str
    path: str
    context: int  # tokens per sequence
    train_context: int
    vocab: int
    embedding: int
    parameters: int
    size_bytes: int
    architecture: str
    quantisation: str
    chat_template: str | None
    bos: int
    eos: int
    strategies: tuple[Strategy, ...]  # those that can run, plain first
    refused: Mapping[str, str] = field(default_factory=dict)  # strategy name → why it cannot run
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes: weights, kv, states, and mtp, draft if any


class Engine(Protocol):
    """The decode thread as asyncio sees it."""

    card: ModelCard

    async def start(self) -> None:
        """Load the model.

        Raises:
            ModelFileError: the file cannot be loaded.
            PairError: the draft does not fit.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Finished]:
        """Generate; the last item is `Finished`. Closing the iterator cancels within one step.

        Raises:
            RequestError: the prompt does not fit the context (code ``exceed_context_size_error``), the grammar
                does not parse, or the strategy cannot run on this model; raised before the first item.
        """
        ...

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def detokenize(self, tokens: list[int]) -> bytes:
        """Bytes of token ids, special tokens rendered."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds that the running decode has taken; 0 between decodes, and while the model is loaded."""
        ...

    async def unload(self) -> None:
        """Free the model; the next `generate` loads it again."""
        ...

    async def aclose(self) -> None:
        """Stop the thread and free everything; idempotent."""
        ...
