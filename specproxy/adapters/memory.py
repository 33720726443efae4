"""What each lane needs, and which lanes fit. Pure: measured figures come in, a plan comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specproxy.adapters.gguf_facts import ModelFacts
from specproxy.records import Strategy

__all__ = ["Budget", "LaneNeed", "MemoryPlan", "Refusal", "choose_ctx", "lane_need", "plan"]

MIB = 1 << 20
PROCESS_BYTES = 60 * MIB  # a llama-server without a model, measured with the wheel
UBATCH = 512  # llama-server's default: rows of the largest compute batch
MAPPED_TYPES = frozenset({"F32", "F16", "BF16", "Q8_0"})
"""Tensor types that stay in the mapped file on a CPU, so that processes share them. Others are repacked into
memory of their own where llama.cpp has kernels for that."""
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

    KV cache and recurrent state are exact up to padding. Compute buffers follow llama.cpp's reservation: the
    widest activations of a micro-batch, and its logits, in F32.
    """
    models = [(target, target.weight_bytes - (0 if "mtp" in strategy.drafters else target.mtp_bytes))]
    cache = _cache_bytes(target, ctx, slots)
    compute = _compute_bytes(target)
    if "mtp" in strategy.drafters:
        mtp_row = target.kv_bytes_per_token * target.mtp_layers // max(1, target.block_count)
        cache += mtp_row * ctx * slots + _recurrent_margin(target, strategy, slots)
        compute *= 2
    if "draft" in strategy.drafters and draft is not None:
        models.append((draft, draft.weight_bytes))
        cache += _cache_bytes(draft, ctx, slots)
        compute += _compute_bytes(draft)
    if on_gpu:
        on_device = sum(size for _, size in models) + cache + compute
        return LaneNeed(lane_id, PROCESS_BYTES, gpu=on_device)
    private, shared = 0, []
    for facts, size in models:
        mapped = sum(n for kind, n in facts.bytes_by_type if kind in MAPPED_TYPES or not repack)
        shared.append((facts.digest, min(size, mapped)))
        private += size - min(size, mapped)
    return LaneNeed(lane_id, PROCESS_BYTES + private + cache + compute, tuple(shared))


def _cache_bytes(facts: ModelFacts, ctx: int, slots: int) -> int:
    padded = -(-ctx // 256) * 256
    return (facts.kv_bytes_per_token * padded + facts.state_bytes) * slots


def _recurrent_margin(target: ModelFacts, strategy: Strategy, slots: int) -> int:
    """Recurrent states that are kept to go back to when a draft is rejected: one for each drafted token."""
    return target.state_bytes * (strategy.n_max or 3) * slots


def _compute_bytes(facts: ModelFacts) -> int:
    return UBATCH * (facts.vocab_size + 12 * facts.embd) * 4


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
