"""A target, and a DFlash or DSpark drafter for it of known acceptance, made as in `tests.support.calibrated`.

Both guess a block at once: the last token and masks behind it, which look at the target's features and at each
other. The region's flag comes from the features alone.

- DFlash: the mask behind the last token looks at that token, whose direction it takes, and then at the newest
  features. There is one mask, since a second one would have to know the first one's guess.
- DSpark: the guess before each one is known to the Markov head, which takes its direction, so that blocks are
  long. Flags come from all features alike, and from there on as large as the norm lets them be.

The guesses are those of the calibrated MTP block.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.support.calibrated import CONST, DIRECTION, FLAG, LEVEL, REGIONS, CalibratedPair, Floats, _Net
from tests.support.eagle3 import CTX, EMBD, write_target

__all__ = ["write_dflash", "write_dspark"]

MASK = 0
NEAR = 8  # fast rotary pairs by which a head tells positions apart
SHARP = 5.0  # weight of queries and keys behind their norm
BASE = 1e7  # of the rotary frequencies
LOUD = 50.0  # weight of flags that a norm is to cut down

FLAGS = slice(FLAG, FLAG + len(REGIONS))
PLAIN = np.ones(EMBD, np.float32)
PLAIN[[CONST, *range(FLAG, FLAG + len(REGIONS))]] = 0  # where a token's direction is


class _BlockNet(_Net):
    """With a mask, which is a token without a direction."""

    def _directions(self) -> Floats:
        unit = super()._directions()
        unit[MASK] = 0
        return unit


def write_dflash(out_dir: Path, *, seed: int = 0) -> CalibratedPair:
    """Write ``target.gguf`` (llama) and ``draft.gguf`` (dflash, drafts of one token) into `out_dir`."""
    pair, net = _begin(out_dir, seed, blocks=2, size=2)
    net.put("output.weight", net.output_matrix(pair.guesses("mtp"), branches=False), exact=True)
    root, length = np.sqrt(EMBD), np.sqrt(DIRECTION**2 + LEVEL**2)
    direction = np.diag(PLAIN) * length / root  # of the last token, as long as in its embedding
    flag = np.zeros((EMBD, EMBD), np.float32)
    flag[FLAGS, FLAGS] = np.eye(len(REGIONS)) * LEVEL / np.sqrt(EMBD / 2)  # beside a constant in the features
    _block(net, 0, query=_looks_at(1), value=direction)
    _block(net, 1, query=_looks_at(2), value=flag)
    net.finish()
    return pair


def write_dspark(out_dir: Path, *, seed: int = 0) -> CalibratedPair:
    """Write ``target.gguf`` (llama) and ``draft.gguf`` (dflash with a Markov head) into `out_dir`."""
    pair, net = _begin(out_dir, seed, blocks=1, size=8)
    scores = net.output_matrix(pair.guesses("mtp"), branches=False)
    root, length = np.sqrt(EMBD), np.sqrt(DIRECTION**2 + 2 * LEVEL**2)  # of what `scores` is made for
    flags = np.zeros_like(scores)
    flags[:, FLAGS] = scores[:, FLAGS] * LEVEL / length
    net.put("output.weight", flags, exact=True)
    net.put("markov_w1.weight", DIRECTION * root / length * net.direction, exact=True)
    net.put("markov_w2.weight", scores * PLAIN, exact=True)
    net.writer.add_bool("dflash.has_confidence_head", False)
    loud = np.zeros((EMBD, EMBD), np.float32)
    loud[FLAGS, FLAGS] = np.eye(len(REGIONS)) * LOUD
    _block(net, 0, query=np.zeros((EMBD, EMBD), np.float32), value=loud)
    net.finish()
    return pair


def _begin(out_dir: Path, seed: int, *, blocks: int, size: int) -> tuple[CalibratedPair, _Net]:
    """Write the target, and what both drafters have in common."""
    out_dir.mkdir(parents=True, exist_ok=True)
    pair = CalibratedPair(out_dir / "target.gguf", out_dir / "draft.gguf", REGIONS, seed)
    write_target(pair, layers=2)
    heads = EMBD // 64  # as many for values, so that one position can hand on all that it has
    net = _BlockNet(pair, pair.draft, "dflash", embd=EMBD, layers=blocks, ftype="F16", ctx=CTX, kv_heads=heads)
    w = net.writer
    w.add_block_count(blocks)
    w.add_uint32("dflash.block_size", size)
    w.add_array("dflash.target_layers", [1])  # what comes out of the first block, where flags are
    w.add_mask_token_id(MASK)
    kept = np.zeros(EMBD, np.float32)
    kept[CONST] = kept[FLAGS] = 1
    net.put("fc.weight", np.diag(kept), exact=True)
    net.put("enc.output_norm.weight", np.ones(EMBD, np.float32))
    return pair, net


def _looks_at(distance: int) -> npt.NDArray[np.float32]:
    """Queries of heads that look `distance` positions back, whatever is there."""
    angles = distance * BASE ** (-2 * np.arange(NEAR) / 64)
    query = np.zeros((EMBD, EMBD), np.float32)
    for head in range(EMBD // 64):
        pairs = 64 * head + np.arange(NEAR)
        query[pairs, CONST], query[pairs + 32, CONST] = np.cos(angles), -np.sin(angles)
    return query


def _block(net: _Net, block: int, *, query: Floats, value: Floats) -> None:
    """One block; what it hands on is what `value` makes of the positions that are looked at."""
    prefix = f"blk.{block}."
    for name, tensor in (("q", query), ("k", _looks_at(0)), ("v", value), ("output", np.eye(EMBD))):
        net.put(f"{prefix}attn_{name}.weight", tensor, exact=True)
    for name in ("q", "k"):
        net.put(f"{prefix}attn_{name}_norm.weight", np.full(64, SHARP, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        net.put(f"{prefix}{name}.weight", np.ones(EMBD, np.float32))
    net.dense(block)
