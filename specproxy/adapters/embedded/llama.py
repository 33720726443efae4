"""The part of llama.cpp that the engine uses, typed, with every return value checked.

All llama.cpp calls of the embedded engine are made here and in `sampler`. Objects belong to the thread that
uses them; only `Vocabulary` may be shared, since llama.cpp never writes to a vocabulary.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from specproxy.adapters.embedded.batch import Batch
from specproxy.errors import BackendError, ModelFileError

__all__ = [
    "Context",
    "ContextParams",
    "DecodeError",
    "Model",
    "ModelParams",
    "NoRoomError",
    "captured_log",
    "nextn_missing",
]

Floats = npt.NDArray[np.float32]

WARNING, ERROR, CONTINUATION = 3, 4, 5  # ggml_log_level; continuations repeat the level before them
NO_SLOT = 1  # llama_decode: no room in the KV cache for this batch


class DecodeError(BackendError):
    """llama_decode failed; `code` is its return value."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class NoRoomError(DecodeError):
    """The KV cache has no room for the batch; nothing was changed."""


# --- log ---------------------------------------------------------------------------------------------

_lines: deque[str] = deque(maxlen=40)
_errors: deque[str] = deque(maxlen=40)  # those of them that are no warnings


def _on_log(level: int, text: bytes, _user: object) -> None:
    if level >= WARNING:
        line = text.decode("utf-8", "replace").rstrip()
        _lines.append(line)
        if level == ERROR:
            _errors.append(line)


_callback = lib.llama_log_callback(_on_log)  # llama.cpp keeps a bare pointer to it: must outlive every model
_started = threading.Lock()
_ready = False


def _start() -> None:
    """Initialise the library once a process."""
    global _ready
    with _started:
        if not _ready:
            lib.llama_log_set(_callback, ctypes.c_void_p(0))
            lib.llama_backend_init()
            _ready = True


@contextmanager
def captured_log() -> Iterator[deque[str]]:
    """What llama.cpp warns of meanwhile, for an error message: it returns null, and logs the reason."""
    _lines.clear()
    _errors.clear()
    yield _lines


def _reason() -> str:
    """The first error, or warning if there is none: later ones only say that it failed."""
    for line in (*_errors, *_lines):
        text = line.partition(": ")[2] or line
        if text:
            return text
    return "no reason given"


# --- multi-token prediction ----------------------------------------------------------------------------

_nextn: Any = None
try:
    _nextn = importlib.import_module("llama_cpp.llama_cpp_ext")
except (ImportError, AttributeError) as error:  # a private module: symbols come and go
    _nextn_error = str(error)


def nextn_missing() -> str:
    """Why this build cannot do multi-token prediction, or an empty text."""
    if _nextn is None:
        return f"this llama-cpp-python does not bind the calls for it ({_nextn_error})"
    needed = ("llama_set_embeddings_nextn", "llama_get_embeddings_nextn", "llama_set_nextn_layer_offset")
    missing = [name for name in needed if not hasattr(_nextn, name)]
    if missing or not hasattr(lib, "LLAMA_CONTEXT_TYPE_MTP"):
        return f"this llama-cpp-python lacks {', '.join(missing) or 'MTP contexts'}"
    return ""


# --- model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelParams:
    """How to load a model file. `gpu_layers` -1 puts all layers on the GPU.

    With `mmap` the file is mapped, otherwise read into memory; None leaves that to the runtime, and maps here.
    """

    gpu_layers: int = 0
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    mmap: bool | None = None
    mlock: bool = False
    repack: bool = True
    mtp: bool = False
    vocab_only: bool = False


class Model:
    """Weights.

    Raises:
        ModelFileError: the file is missing, not GGUF, truncated, or of an architecture that this build lacks,
            or memory ran out.
    """

    def __init__(self, path: Path, params: ModelParams) -> None:
        _start()
        if not path.is_file():
            raise ModelFileError(f"model file {path} does not exist")
        raw = lib.llama_model_default_params()
        raw.n_gpu_layers = params.gpu_layers
        raw.main_gpu = params.main_gpu
        raw.use_extra_bufts = params.repack
        raw.vocab_only = params.vocab_only
        raw.load_mtp = params.mtp
        raw.load_mode = (lib.LLAMA_LOAD_MODE_MMAP if params.mmap is not False else 0) | (
            lib.LLAMA_LOAD_MODE_MLOCK if params.mlock else 0
        )
        split = (ctypes.c_float * int(lib.llama_max_devices()))(*params.tensor_split)
        if params.tensor_split:
            raw.tensor_split = split
        with captured_log():
            self.handle = lib.llama_model_load_from_file(str(path).encode(), raw)
            if not self.handle:
                raise ModelFileError(f"{path} cannot be loaded: {_reason()}")
        self.path = path
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))
        self.n_embd = int(lib.llama_model_n_embd_out(self.handle))
        self.n_layer = int(lib.llama_model_n_layer(self.handle))
        self.train_context = int(lib.llama_model_n_ctx_train(self.handle))
        self.window = int(
            lib.llama_model_n_swa(self.handle)
        )  # tokens that some layers look back; 0: none is limited
        self.mtp_heads = int(lib.llama_model_n_layer_nextn(self.handle))
        self.recurrent = bool(
            lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle)
        )

    @property
    def generates(self) -> bool:
        """Whether it is a causal text model."""
        return bool(lib.llama_model_has_decoder(self.handle)) and not (
            lib.llama_model_has_encoder(self.handle) or lib.llama_model_is_diffusion(self.handle)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(lib.llama_model_size(self.handle))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return int(lib.llama_model_n_params(self.handle))

    def meta(self, key: str) -> str | None:
        """A metadata value as text, or None."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            needed = int(lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, size))
            if needed < 0:
                return None
            if needed < size:
                return buffer.raw[:needed].decode("utf-8", "replace")
            size = needed + 1

    def close(self) -> None:
        """Free it; contexts over it must have been closed."""
        if self.handle:
            lib.llama_model_free(self.handle)
            self.handle = None


def _short(function: Any, result: Any, *arguments: Any) -> Any:
    """The same C function, for calls that take microseconds: it keeps the GIL.

    A ctypes call gives it up, and where the event loop has work to do it then takes longer to come back than
    all else between two decodes. Pointers are given as addresses: wrapping them costs more than the call.
    """
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None, "a loaded function has an address"
    return ctypes.PYFUNCTYPE(result, *arguments)(address)


_ON_GPU = bool(lib.llama_supports_gpu_offload())  # then a decode may still be running when llama_decode returns
_logits_at = _short(lib.llama_get_logits, ctypes.c_void_p, ctypes.c_void_p)
_remove = _short(
    lib.llama_memory_seq_rm,
    ctypes.c_bool,
    ctypes.c_void_p,
    lib.llama_seq_id,
    lib.llama_pos,
    lib.llama_pos,
)

# --- context -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContextParams:
    """How to decode. `cells` is the size of the KV cache, shared by all sequences.

    `outputs` is the most logits rows in one decode. `states` is how many recurrent states are kept for
    rollback. `pooling` is a llama_pooling_type, for embeddings only. `other` is the
    target's context for a drafter that reads its cache and its embeddings; it has to be closed last.
    """

    cells: int
    sequences: int
    outputs: int
    batch: int = 512
    ubatch: int = 512
    threads: int = 2
    threads_batch: int = 2
    states: int = 0
    flash_attention: bool | None = None
    type_k: int | None = None
    type_v: int | None = None
    offload_kqv: bool = True
    mtp: bool = False
    pooling: int | None = None
    other: Context | None = None


class Context:
    """A KV cache over a model, and the outputs of its last decode.

    Attributes:
        states: recurrent states that are kept for rollback.
        native_s: seconds spent in llama_decode so far.

    Raises:
        ModelFileError: memory ran out, or the model cannot be run this way.
    """

    def __init__(self, model: Model, params: ContextParams) -> None:
        raw = lib.llama_context_default_params()
        raw.n_ctx = params.cells
        raw.n_seq_max = params.sequences
        raw.n_batch, raw.n_ubatch = params.batch, params.ubatch
        raw.n_outputs_max = max(params.outputs, params.sequences)
        raw.n_rs_seq = params.states
        raw.n_threads, raw.n_threads_batch = params.threads, params.threads_batch
        raw.offload_kqv = params.offload_kqv
        # one stream: sequences with drafts of different lengths go through the weights together, while
        # separate streams would be cut into parts of equal length
        raw.kv_unified = True
        if params.flash_attention is not None:
            raw.flash_attn_type = int(params.flash_attention)
        if params.type_k is not None:
            raw.type_k = params.type_k
        if params.type_v is not None:
            raw.type_v = params.type_v
        if params.mtp:
            raw.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        if params.other is not None:
            raw.ctx_other = params.other.handle
        if params.pooling is not None:
            raw.embeddings, raw.pooling_type = True, params.pooling
        with captured_log():
            self.handle: Any = lib.llama_init_from_model(model.handle, raw)
            if not self.handle:
                raise ModelFileError(
                    f"no context of {params.cells} tokens for {model.path}: {_reason()}",
                    hint="a smaller context or fewer parallel sequences need less memory",
                )
        self.model = model
        self.native_s = 0.0
        self.states = int(lib.llama_n_rs_seq(self.handle))
        self._memory = lib.llama_get_memory(self.handle)
        self._views: dict[tuple[int, int], Floats] = {}
        self._hidden_on = False
        self._hidden_at: Any = None

    def decode(self, batch: Batch) -> None:
        """Run a batch.

        Raises:
            NoRoomError: the KV cache is full; nothing was changed.
            DecodeError: anything else. What the cache holds of the batch's sequences is then unknown.
        """
        batch.raw.n_tokens = batch.n
        started = time.perf_counter()
        code = lib.llama_decode(self.handle, batch.raw)
        if _ON_GPU:
            lib.llama_synchronize(self.handle)
        self.native_s += time.perf_counter() - started
        if code == 0:
            return
        if code == NO_SLOT:
            raise NoRoomError("the KV cache is full", code)
        raise DecodeError(f"llama_decode returned {code}: {_reason()}", code)

    def logits(self, rows: int) -> Floats:
        """Logits of the last decode, shape (rows, n_vocab), valid until the next one."""
        return self._view(_logits_at(self.handle), rows, self.model.n_vocab)

    def hidden(self, rows: int) -> Floats:
        """Hidden rows of the last decode, shape (rows, n_embd), valid until the next one; see `want_hidden`."""
        return self._view(self._hidden_at(self.handle), rows, self.model.n_embd)

    def pooled(self, seq: int) -> Floats:
        """The pooled embedding of a sequence in the last decode, shape (n_embd,)."""
        pointer = lib.llama_get_embeddings_seq(self.handle, seq)
        rows = self._view(ctypes.cast(pointer, ctypes.c_void_p).value, 1, self.model.n_embd)
        return cast(Floats, rows[0])

    def want_hidden(self, on: bool, *, of_outputs: bool = False) -> None:
        """Give hidden rows from now on, or none.

        Args:
            on: whether to give any.
            of_outputs: copy as many rows as there are tokens with logits, instead of one for each token. Which
                those are depends on the architecture: its graph makes rows of all tokens, and then these are
                the first ones, or rows of tokens with logits alone, and then asking for more ends the process.
        """
        if on != self._hidden_on:
            if self._hidden_at is None:
                self._hidden_at = _short(_nextn.llama_get_embeddings_nextn, ctypes.c_void_p, ctypes.c_void_p)
            _nextn.llama_set_embeddings_nextn(self.handle, on, of_outputs)
            self._hidden_on = on

    def use_head(self, index: int) -> None:
        """Choose the MTP head that the following decodes run."""
        _nextn.llama_set_nextn_layer_offset(self.handle, index)

    def drop(self, seq: int, start: int) -> bool:
        """Remove a sequence's positions from `start` on; False if the model cannot go back so far."""
        return bool(_remove(self._memory, seq, start, -1))

    def empty(self, seq: int) -> None:
        """Remove all of a sequence.

        Raises:
            DecodeError: llama.cpp refuses.
        """
        if not self.drop(seq, 0):
            raise DecodeError(f"the cache of sequence {seq} cannot be emptied", 0)

    def share(self, source: int, target: int, end: int) -> None:
        """Let sequence `target` have positions 0 to `end` - 1 of `source`; costs no memory."""
        lib.llama_memory_seq_cp(self._memory, source, target, 0, end)

    def state_bytes(self, seq: int) -> int:
        """Bytes of memory that `save` would take for a sequence."""
        return int(lib.llama_state_seq_get_size(self.handle, seq))

    def save(self, seq: int) -> npt.NDArray[np.uint8]:
        """Copy all that the cache holds of a sequence.

        Raises:
            DecodeError: llama.cpp gave less than it announced.
        """
        state = np.empty(self.state_bytes(seq), np.uint8)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if lib.llama_state_seq_get_data(self.handle, pointer, state.nbytes, seq) != state.nbytes:
            raise DecodeError(f"the cache of sequence {seq} cannot be saved", 0)
        return state

    def restore(self, seq: int, state: npt.NDArray[np.uint8]) -> bool:
        """Give a sequence, which must be empty, what `save` copied; False if there is no room for it."""
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return bool(lib.llama_state_seq_set_data(self.handle, pointer, state.nbytes, seq) == state.nbytes)

    def last_position(self, seq: int) -> int:
        """The last position that the cache holds of a sequence, or -1."""
        return int(lib.llama_memory_seq_pos_max(self._memory, seq))

    def covers(self, seq: int, end: int) -> bool:
        """Whether the cache of a sequence that is cut at `end` holds all that token number `end` looks at.

        Layers with a window keep what is behind it neither when they are saved nor when others need the cells.
        """
        if not end or not self.model.window:
            return True
        first = int(lib.llama_memory_seq_pos_min(self._memory, seq))
        return 0 <= first <= max(0, end + 1 - self.model.window)

    def clear(self) -> None:
        """Forget everything."""
        lib.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        """Free it."""
        if self.handle:
            self._views.clear()
            lib.llama_free(self.handle)
            self.handle = None

    def _view(self, address: int | None, rows: int, width: int) -> Floats:
        if not address:
            raise DecodeError("llama.cpp gave no output rows", 0)
        key = (address, rows)
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 64:
                self._views.clear()
            raw = (ctypes.c_float * (rows * width)).from_address(address)
            view = self._views[key] = np.ctypeslib.as_array(raw).reshape(rows, width)
        return view
