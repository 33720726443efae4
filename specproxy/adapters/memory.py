"""What each lane needs, and which lanes fit. Pure: measured figures come in, a plan comes out."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specproxy.adapters.gguf_facts import ModelFacts
from specproxy.adapters.server_program import kinds_of, uses_draft_file
from specproxy.records import Strategy

__all__ = ["Budget", "LaneNeed", "MemoryPlan", "Refusal", "choose_ctx", "lane_need", "plan"]

MIB = 1 << 20
# Measured on the wheel's llama-server (private memory at widths of 256 and 1024, vocabularies of 3 and 48
# thousand tokens, contexts of 1 to 8 thousand), and rounded up a little.
PROCESS_BYTES = 32 * MIB  # without a model
DRAFTER_BYTES = 16 * MIB  # a second context
UBATCH, BATCH = 512, 2048  # llama-server's defaults, in tokens
ACTIVATIONS = 12  # rows of a model's width that a token takes while it is computed
PLAIN_LOGITS, MTP_LOGITS = 64, 256  # rows of the vocabulary's length
REPACKED_TYPES = frozenset(
    {"Q4_0", "Q4_K", "Q2_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"}
    | ({"Q8_0"} if platform.machine().lower() in ("arm64", "aarch64") else set())
)
"""Tensor types that llama.cpp copies into an order of its own on a CPU (ggml-cpu/repack.cpp). The others
stay in the mapped file, which all processes share."""
SMALLEST_CTX = 8192  # below this, lanes are dropped before the context is halved again


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that lanes may use together. `gpu` is None where no GPU takes part. `bound` says what sets it."""

    ram: int
    gpu: int | None = None
    bound: str = "free memory"

    @classmethod
    def of(
        cls, available: int, *, limit: int | None = None, gpu: int | None = None, bound: str = "free memory"
    ) -> Budget:
        """What is available less a tenth (at least 256 MiB) for everybody else, or `limit` if that is less."""
        usable = max(0, available - max(available // 10, 256 * MIB))
        if limit is not None and limit < usable:
            return cls(limit, gpu, "the memory setting")
        return cls(usable, gpu, bound)


@dataclass(frozen=True, slots=True)
class LaneNeed:
    """What one lane takes. `shared` are mapped files (digest, bytes), which count once for all lanes."""

    id: str
    private: int
    shared: tuple[tuple[str, int], ...] = ()
    gpu: int = 0

    @property
    def total(self) -> int:
        """Bytes of RAM if the lane is alone."""
        return self.private + sum(size for _, size in self.shared)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A lane that does not start, and why, as a clause."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Which lanes start. `ram` is what they take together."""

    started: tuple[LaneNeed, ...]
    refused: tuple[Refusal, ...]
    ram: int
    gpu: int
    budget: Budget


def lane_need(
    lane_id: str,
    strategy: Strategy,
    target: ModelFacts,
    draft: ModelFacts | None,
    *,
    ctx: int,
    slots: int,
    on_gpu: bool = False,
    repack: bool = True,
) -> LaneNeed:
    """Estimate what a llama-server with this strategy takes; `ctx` in tokens for each slot.

    KV cache and recurrent state are exact up to padding; the rest follows what was measured, and errs upwards.
    """
    used = draft if draft is not None and uses_draft_file(strategy, draft.sidecar_type) else None
    mtp = "mtp" in kinds_of(strategy) and (used is None or used.sidecar_type is None)  # the target's own head
    models = [(target, target.weight_bytes - (0 if mtp else target.mtp_bytes))]
    work = _cache_bytes(target, ctx, slots) + _compute_bytes(target, UBATCH, PLAIN_LOGITS)
    if mtp:
        row = target.kv_bytes_per_token * target.mtp_layers // max(1, target.block_count)
        states = target.state_bytes * (strategy.n_max or 3) * slots  # to go back to when a draft is rejected
        work += DRAFTER_BYTES + row * ctx * slots + states + _compute_bytes(target, BATCH, MTP_LOGITS)
    if used is not None:
        models.append((used, used.weight_bytes))
        work += DRAFTER_BYTES + _cache_bytes(used, ctx, slots) + _compute_bytes(used, UBATCH, UBATCH)
    if on_gpu:
        return LaneNeed(lane_id, PROCESS_BYTES, gpu=sum(size for _, size in models) + work)
    private, shared = 0, []
    for facts, size in models:
        copied = sum(n for kind, n in facts.bytes_by_type if repack and kind in REPACKED_TYPES)
        shared.append((facts.digest, max(0, size - copied)))
        private += min(size, copied)
    return LaneNeed(lane_id, PROCESS_BYTES + private + work, tuple(shared))


def _cache_bytes(facts: ModelFacts, ctx: int, slots: int) -> int:
    padded = -(-ctx // 256) * 256
    return (facts.kv_bytes_per_token * padded + facts.state_bytes) * slots


def _compute_bytes(facts: ModelFacts, tokens: int, logits: int) -> int:
    return 4 * (tokens * ACTIVATIONS * facts.embd + logits * facts.vocab_size)


def plan(needs: Sequence[LaneNeed], budget: Budget) -> MemoryPlan:
    """Take lanes in the given order as long as they fit; one that does not leaves room for those behind it."""
    started: list[LaneNeed] = []
    refused: list[Refusal] = []
    mapped: dict[str, int] = {}
    ram = gpu = 0
    for need in needs:
        more = need.private + sum(max(0, size - mapped.get(file, 0)) for file, size in need.shared)
        if ram + more > budget.ram:
            refused.append(Refusal(need.id, _too_much(more, budget.ram - ram, "memory", budget.bound)))
        elif budget.gpu is not None and gpu + need.gpu > budget.gpu:
            refused.append(Refusal(need.id, _too_much(need.gpu, budget.gpu - gpu, "GPU memory", "free on it")))
        else:
            started.append(need)
            ram, gpu = ram + more, gpu + need.gpu
            mapped |= {file: max(size, mapped.get(file, 0)) for file, size in need.shared}
    return MemoryPlan(tuple(started), tuple(refused), ram, gpu, budget)


def _too_much(need: int, left: int, what: str, bound: str) -> str:
    return f"needs {need / MIB:.0f} MiB of {what}, {left / MIB:.0f} MiB are left ({bound})"


def choose_ctx(
    trained: int | None,
    needs_at: Callable[[int], Sequence[LaneNeed]],
    budget: Budget,
    *,
    smallest: int = SMALLEST_CTX,
) -> int:
    """Longest context at which all lanes fit, halving from what the model was trained for.

    Not below `smallest` as long as one lane fits there: all lanes need the same context, or long requests would
    fail on some, but a useful context is worth more than a further lane.
    """
    ctx = trained or smallest
    floor = min(ctx, smallest)
    while ctx > floor and plan(needs_at(ctx), budget).refused:
        ctx = max(floor, ctx // 2)
    while ctx > 512 and not plan(needs_at(ctx), budget).started:
        ctx //= 2
    return ctx
