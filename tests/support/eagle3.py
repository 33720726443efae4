"""A target and an EAGLE-3 drafter for it, of known acceptance, on the model of `tests.support.calibrated`.

The drafter has a fusion of three of the target's layers and one decoder block, as llama.cpp wants it. It takes
the region's flag from the target's features and the rest from the token's embedding: its one head looks at its
own position alone, brings in the embedding, and takes out what the last guess has left in the residual stream.
Its guesses are those of the calibrated MTP block.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.calibrated import CONST, DIRECTION, FLAG, LEVEL, REGIONS, CalibratedPair, _Net

__all__ = ["CTX", "EMBD", "write_eagle3", "write_target"]

EMBD, CTX = 128, 4096
NEAR = 8  # fast rotary pairs by which the head tells its own position from others
SHARP = 3.5  # weight of their query and key


def write_eagle3(out_dir: Path, *, seed: int = 0, layers: int = 2) -> CalibratedPair:
    """Write ``target.gguf`` (architecture llama) and ``draft.gguf`` (eagle3) into `out_dir`.

    `layers` are the target's: with 16 it is several times as large as the drafter.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    pair = CalibratedPair(out_dir / "target.gguf", out_dir / "draft.gguf", REGIONS, seed)
    write_target(pair, layers=layers)
    heads = EMBD // 64  # as many for values, so that one has room for a whole embedding
    _write_drafter(_Net(pair, pair.draft, "eagle3", embd=EMBD, layers=1, ftype="F16", ctx=CTX, kv_heads=heads))
    return pair


def write_target(pair: CalibratedPair, *, layers: int) -> None:
    """Write the pair's target, a llama of this many layers."""
    net = _Net(pair, pair.target, "llama", embd=EMBD, layers=layers, ftype="F16", ctx=CTX)
    net.writer.add_block_count(net.layers)
    net.put("output.weight", net.output_matrix(pair.successor, branches=True), exact=True)
    for block in range(net.layers):
        net.attention(block)
        net.put(f"blk.{block}.ffn_norm.weight", np.ones(EMBD, np.float32))
        net.dense(block)
    net.finish()


def _write_drafter(net: _Net) -> None:
    w = net.writer
    w.add_block_count(1)
    w.add_array("eagle3.target_layers", [0, 1, 1])
    w.add_uint32("eagle3.target_hidden_size", EMBD)
    flags = np.zeros(EMBD, np.float32)
    flags[FLAG : FLAG + len(REGIONS)] = 1
    net.put("fc.weight", np.concatenate([np.zeros((EMBD, 2 * EMBD)), np.diag(flags)], axis=1), exact=True)
    net.put("output.weight", net.output_matrix(net.pair.guesses("mtp"), branches=False), exact=True)
    near = np.zeros((EMBD, 2 * EMBD), np.float32)
    for head in range(net.heads):
        near[head * net.head_dim + 2 * np.arange(NEAR), CONST] = SHARP
    embedding = DIRECTION**2 + LEVEL**2  # squared norms, here and behind a guess
    left = embedding + LEVEL**2
    value = np.concatenate(
        [np.sqrt(embedding / EMBD) * np.diag(1 - flags), -np.sqrt(left / EMBD) * np.diag(1 - flags)], axis=1
    )
    for name, tensor in (("q", near), ("k", near), ("v", value), ("output", np.eye(EMBD))):
        net.put(f"blk.0.attn_{name}.weight", tensor, exact=True)
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        net.put(f"blk.0.{name}.weight", np.ones(EMBD, np.float32))
    net.dense(0)
    net.finish()
