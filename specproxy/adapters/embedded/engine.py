"""The engine as asyncio sees it: a decode thread that owns llama.cpp, and bounded streams out of it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import cast

from specproxy.adapters.embedded.courier import Courier, Stream, call
from specproxy.adapters.embedded.embedder import Embedder
from specproxy.adapters.embedded.measured import Measured
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.runtime import Runtime
from specproxy.adapters.embedded.scheduler import Event, Scheduler
from specproxy.adapters.embedded.sequence import Sink
from specproxy.adapters.embedded.types import Finished, GenerateRequest, ModelCard, TokenEvent
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.errors import BackendError, SpecproxyError

__all__ = ["LlamaEngine"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerateRequest
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Cancel:
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Do:
    """Run something on the decode thread, and settle a future with its result."""

    work: Callable[[], None]
    done: asyncio.Future[None]


class LlamaEngine:
    """One model in this process; see `types.Engine`."""

    card: ModelCard

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._measured = Measured(options)
        self._commands: deque[_Submit | _Cancel | _Do] = deque()
        self._wake = threading.Event()
        self._outbox: list[tuple[Stream, Event]] = []
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._vocabulary: Vocabulary | None = None
        self._runtime: Runtime | None = None
        self._scheduler: Scheduler | None = None
        self._embedder: Embedder | None = None
        self._unload_wanted = False
        self._step_since: float | None = None

    # --- on the event loop -----------------------------------------------------------------------------

    async def start(self) -> None:
        """See `types.Engine`."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="specproxy decode", daemon=True)
            self._thread.start()
        try:
            await self._on_thread(self._load)
        except BaseException:
            await self.aclose()
            raise

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | Finished, None]:
        """See `types.Engine`."""
        if self._thread is None:
            raise BackendError("the engine is not running")
        stream = Stream(asyncio.get_running_loop(), self._wake.set, request.outlet)
        self._send(_Submit(request, stream))
        ended = False
        try:
            while not ended:
                event = await stream.get()
                ended = not isinstance(event, TokenEvent)
                if isinstance(event, SpecproxyError):
                    raise event
                yield event
        finally:
            if not ended:
                self._send(_Cancel(stream))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """See `types.Engine`."""
        return self._words.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: list[int]) -> bytes:
        """See `types.Engine`."""
        return b"".join(self._words.piece(token, special=True) for token in tokens)

    async def unload(self) -> None:
        """See `types.Engine`. Requests that run are finished first."""
        if self._thread is not None:
            await self._on_thread(self._unload_when_idle)

    async def aclose(self) -> None:
        """See `types.Engine`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(thread.join)
        if self._vocabulary is not None:
            self._vocabulary.close()
            self._vocabulary = None

    @property
    def native_s(self) -> float:
        """Seconds spent in llama.cpp's decodes since the model was loaded."""
        return 0.0 if self._runtime is None else self._runtime.native_s

    @property
    def step_s(self) -> float:
        """See `types.Engine`."""
        since = self._step_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._runtime is not None

    @property
    def _words(self) -> Vocabulary:
        if self._vocabulary is None:
            raise BackendError("the engine has not been started")
        return self._vocabulary

    def _send(self, command: _Submit | _Cancel | _Do) -> None:
        self._commands.append(command)
        self._wake.set()

    async def _on_thread(self, work: Callable[[], None]) -> None:
        done = asyncio.get_running_loop().create_future()
        self._send(_Do(work, done))
        await done

    # --- on the decode thread --------------------------------------------------------------------------

    def _run(self) -> None:
        self._courier = Courier(lambda stream: self._send(_Cancel(stream)))
        try:
            self._work()
        finally:
            self._courier.close()

    def _work(self) -> None:
        idle_since: float | None = None  # known once there was nothing to do
        while not self._stopping:
            self._obey()
            if self._step():
                idle_since = None
                continue
            if idle_since is None or self._wake.is_set():
                idle_since = time.monotonic()
                self._wake.clear()
                continue  # once more: what came before the flag was cleared must not be waited for
            self._measured.save_now_and_then()
            if self._unload_wanted and self._is_idle():
                self._free()
            timeout = self._idle_left(idle_since)
            if timeout is not None and timeout <= 0:
                log.info("unloading the model: idle for %.0f s", self._options.idle_unload_s)
                self._free()
                timeout = None
            self._wake.wait(timeout)
        if self._scheduler is not None:
            self._scheduler.fail_all(BackendError("the engine is shutting down"))
        self._refuse_rest()
        self._deliver()
        self._free()

    def _idle_left(self, since: float) -> float | None:
        """Seconds until the model is unloaded, or None if it is not going to be."""
        limit = self._options.idle_unload_s
        if limit is None or self._runtime is None or not self._is_idle():
            return None
        return since + limit - time.monotonic()

    def _is_idle(self) -> bool:
        return self._scheduler is None or self._scheduler.idle

    def _obey(self) -> None:
        """Carry out what the event loop has asked for."""
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Submit):
                self._submit(command.request, command.stream)
            elif isinstance(command, _Cancel):
                if self._scheduler is not None:
                    self._scheduler.cancel(command.stream)
            else:
                self._settle(command)

    def _settle(self, command: _Do) -> None:
        error: BaseException | None = None
        try:
            command.work()
        except Exception as raised:
            error = raised

        def settle() -> None:
            if command.done.cancelled():
                return
            if error is None:
                command.done.set_result(None)
            else:
                command.done.set_exception(error)

        call(command.done.get_loop(), settle)

    def _submit(self, request: GenerateRequest, stream: Stream) -> None:
        started = time.perf_counter()
        was_loaded = self._scheduler is not None
        try:
            self._load()
            assert self._scheduler is not None
            load_ms = 0.0 if was_loaded else 1000 * (time.perf_counter() - started)
            if request.want_embedding:
                self._emit(stream, self._embed(request, load_ms))
            else:
                self._scheduler.submit(request, stream, load_ms=load_ms)
        except SpecproxyError as error:
            self._emit(stream, error)
        self._deliver()

    def _step(self) -> bool:
        """One step; False if there is nothing to do."""
        if self._scheduler is None:
            return False
        self._step_since = time.monotonic()
        try:
            stepped = self._scheduler.step()
        except Exception as error:
            # what the caches hold is unknown now, but the next request starts from nothing
            log.exception("decoding failed, all requests end")
            known = error if isinstance(error, SpecproxyError) else BackendError(f"decoding failed: {error!r}")
            self._scheduler.fail_all(known)
            self._scheduler.reset()
            stepped = True
        finally:
            self._step_since = None
        self._deliver()
        return stepped

    def _embed(self, request: GenerateRequest, load_ms: float) -> Finished:
        assert self._runtime is not None
        started = time.perf_counter()
        if self._embedder is None:
            self._embedder = Embedder(
                self._runtime.target, size=min(self._runtime.per_sequence, 2048), threads=self._runtime.threads
            )
        vector = self._embedder.embed(request.prompt)
        elapsed = 1000 * (time.perf_counter() - started)
        return Finished(
            "length", prompt_n=len(request.prompt), prompt_ms=elapsed, load_ms=load_ms, embedding=vector
        )

    def _emit(self, sink: Sink, event: Event) -> None:
        stream = cast("Stream", sink)  # every sink that this engine hands out is one
        stream.made += 1
        self._outbox.append((stream, event))

    def _deliver(self) -> None:
        """Hand the step's events over."""
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._courier.carry(outbox)

    def _load(self) -> None:
        self._unload_wanted = False
        if self._runtime is not None:
            return
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._options.model)
        self._runtime = Runtime(self._options, self._vocabulary)
        costs = self._measured.costs(self._runtime)
        self._scheduler = Scheduler(self._runtime, self._vocabulary, self._emit, costs, deliver=self._deliver)
        self.card = self._runtime.card

    def _unload_when_idle(self) -> None:
        if self._is_idle():
            self._free()
        else:
            self._unload_wanted = True

    def _free(self) -> None:
        self._unload_wanted = False
        self._scheduler = None
        if self._embedder is not None:
            self._embedder.close()
            self._embedder = None
        if self._runtime is not None:
            self._measured.save()
            self._runtime.close()
            self._runtime = None

    def _refuse_rest(self) -> None:
        """Answer commands that came too late."""
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Submit):
                self._emit(command.stream, BackendError("the engine is shutting down"))
            elif isinstance(command, _Do):
                call(command.done.get_loop(), command.done.cancel)
