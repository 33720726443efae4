"""GGUF models whose speculative acceptance is known beforehand: the oracle of routing tests and of the demo.

To an engine these are ordinary models: real matrix products, a real KV cache, real size. What they say is
fixed: the vocabulary is cut into regions, one for each kind of text; within a region every word has one
successor, and the words form one cycle. A drafter agrees with the target on a given share of a region's
words, so which strategy is best for which region follows by arithmetic (`CalibratedPair.expect`).

How the text is computed, and what it therefore depends on:

- A token's embedding is a random direction plus a constant. Marker tokens (``<|json:3|>``) also carry a mark
  and their region's flag. One attention head in block 0 looks for marks anywhere before it and copies the
  flag into the residual stream, so the KV cache has to be right.
- The output matrix scores the successor by the token's direction and the region's flag together. By direction
  alone, behind every fifth word a decoy from another region wins: text without its marker is different text.
- The MTP block takes the drafted token from its embedding, but the flag only from the target's hidden state.
- With several MTP blocks (architecture step35) each one turns the flags by one region: block k finds a flag
  only in a row that block k - 1 made, and has its own share of right guesses, smaller by `FADE` for each block.
- Where a drafter is wrong it guesses a poison token, which carries the mark and another region's flag: a
  rejected guess that stays in the KV cache changes the text.

Errors in positions do not show: the head turns with the slowest rotary pair, so that prompts may be long.

The words of the json region are members of a JSON object, so that such requests may ask for JSON output.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

__all__ = ["REGIONS", "CalibratedPair", "Expected", "Region", "plan_pair", "write_pair"]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

STARTS = 32  # marker tokens of a region; each starts its text at another word
BOS, EOS = 1, 2
COMMON = (
    "the of and to in a is that for it as with on be at by this from are or an not have was can will you your",
    "about into over after they we all one their which there what when how its more other some only new also",
    "than then two write explain describe give list rewrite change make following text code function short",
    "please sentence words story report each every data name value city customer order record field return",
)
"""Words that are one token each, so that a prompt of ordinary words does not cost a token a letter."""

# Residual dimensions with a meaning: a constant, "is a mark", and from FLAG on one for each region.
CONST, MARK, FLAG = 0, 1, 2
DIRECTION, LEVEL = 8.0, 4.0  # length of a token's direction; value of constants, marks and flags
BRANCH_GAP = 0.6  # logits between the likely continuations of a word
# Weights of the output matrix. A decoy has to win by direction alone (DECOY > TRUE), and to lose against the
# true successor with its flag; both margins are about equal, and four times the crosstalk of random
# directions at width 128. Decoys stand behind every fifth word: more of them are more crosstalk.
TRUE, DECOY, OWN, DECOY_EVERY = 3.0, 4.2, 4.9, 5
FADE = 0.85  # share of right guesses of an MTP block, of that of the block before it
MARGIN = 3.0  # logits between the best and the second best, at least


@dataclass(frozen=True, slots=True)
class Region:
    """One kind of text: how soon it repeats, and who can guess it.

    `period` is the number of words (a short one repeats soon: n-gram drafting works). `mtp` and `draft` are the
    shares of words whose successor the MTP block and the draft model know. With `branches` above 1 each word
    has that many likely successors, so that sampling at temperature > 0 cannot be guessed. With `stretches` the
    text changes its nature on the way: (words, mtp, draft) again and again, in place of `mtp` and `draft`.
    """

    name: str
    period: int
    mtp: float
    draft: float
    branches: int = 1
    stretches: tuple[tuple[int, float, float], ...] = ()


REGIONS = (
    Region("json", 400, mtp=0.95, draft=0.80),
    Region("code", 400, mtp=0.62, draft=0.96),
    Region("edit", 12, mtp=0.66, draft=0.50),
    Region("prose", 400, mtp=0.40, draft=0.30),
    Region("creative", 400, mtp=0.25, draft=0.20, branches=8),
)
"""MTP is best for json, the draft model for code, n-gram for edit, plain for the others."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Draft counters that a greedy run of `tokens` tokens shows."""

    tokens: int
    drafted: int
    accepted: int


class Vocabulary:
    """Tokens of a pair, and where each region's words, poison words, openers and markers are."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self.tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
        self.types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
        self.regions = regions
        self.words: list[Ids] = []
        self.poison: list[Ids] = []
        self.openers: list[Ids] = []
        self.markers: list[Ids] = []
        self._add([f" {word}" for line in COMMON for word in line.split()])
        for region in regions:
            name, numbers = region.name, range(region.period)
            if name == "json":
                words, poison = ([f', "{mark}json{i}": {i}' for i in numbers] for mark in ("", "~"))
                openers = [f'{{"json{i}": {i}' for i in numbers]
            else:
                words, poison = ([f" {mark}{name}{i}" for i in numbers] for mark in ("", "~"))
                openers = []
            self.words.append(self._add(words))
            self.poison.append(self._add(poison))
            self.openers.append(self._add(openers))
            self.markers.append(self._add([f"<|{name}:{i}|>" for i in range(STARTS)]))

    def _add(self, texts: list[str]) -> Ids:
        """Add tokens that are matched whole in any prompt; returns their ids."""
        first = len(self.tokens)
        self.tokens += [text.encode() for text in texts]
        self.types += [gguf.TokenType.USER_DEFINED] * len(texts)
        return np.arange(first, len(self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class CalibratedPair:
    """A target with an MTP block, a draft model for it, and what they will say."""

    target: Path
    draft: Path
    regions: tuple[Region, ...] = REGIONS
    seed: int = 0
    mtp_blocks: int = 1

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of both models."""
        return Vocabulary(self.regions)

    def marker(self, region: str, start: int = 0) -> str:
        """What a prompt must contain to get text of `region`; at its end, the text begins at a known word."""
        return f"<|{region}:{start % STARTS}|>"

    @cached_property
    def successor(self) -> Ids:
        """Next token of each token, shape (n_vocab,); -1 where no successor is set."""
        rng = np.random.default_rng(self.seed)
        vocab = self.vocabulary
        after = np.full(len(vocab), -1)
        for r, region in enumerate(self.regions):
            order = rng.permutation(vocab.words[r])
            following = np.roll(order, -1)
            after[order] = following
            after[vocab.poison[r]] = order[0]
            starts = [k * region.period // STARTS for k in range(STARTS)]
            after[vocab.markers[r]] = order[starts]
            if len(vocab.openers[r]):
                opener_of = vocab.openers[r][order - vocab.words[r][0]]
                after[opener_of] = following
                after[vocab.markers[r]] = opener_of[starts]
        return after

    def guesses(self, drafter: str, block: int = 0) -> Ids:
        """Next token of each token as a drafter has it: `draft`, or a block of `mtp`."""
        rng = np.random.default_rng([self.seed, 1 + ("mtp", "draft").index(drafter)] + [block] * (block > 0))
        vocab = self.vocabulary
        after = self.successor.copy()
        for r, region in enumerate(self.regions):
            if region.stretches:
                wrong = self._wrong_by_stretch(r, drafter, rng)
            else:
                share = region.mtp * FADE**block if drafter == "mtp" else region.draft
                wrong = rng.permutation(region.period)[: round((1 - share) * region.period)]
            after[vocab.words[r][wrong]] = vocab.poison[r][wrong]
            if len(vocab.openers[r]):
                after[vocab.openers[r][wrong]] = vocab.poison[r][wrong]
        return after

    def _wrong_by_stretch(self, r: int, drafter: str, rng: np.random.Generator) -> Ids:
        """Indices of a region's words behind which a drafter is wrong, stretch by stretch along the text."""
        region, first = self.regions[r], int(self.vocabulary.words[r][0])
        cycle = [int(self.successor[self.vocabulary.markers[r][0]])]
        while len(cycle) < region.period:
            cycle.append(int(self.successor[cycle[-1]]))
        wrong: list[int] = []
        at = 0
        for words, mtp, draft in itertools.cycle(region.stretches):
            part = cycle[at : at + words]
            share = mtp if drafter == "mtp" else draft
            wrong += rng.permutation(part)[: round((1 - share) * len(part))].tolist()
            at += words
            if at >= region.period:
                return np.array(wrong, np.int64) - first
        raise AssertionError("a cycle has no end")

    def text_ids(self, region: str, tokens: int, start: int = 0) -> list[int]:
        """Token ids that the target says greedily after a prompt that ends in this marker.

        Raises:
            ValueError: the region has branches, whose order at temperature 0 is an accident of rounding.
        """
        r = [each.name for each in self.regions].index(region)
        if self.regions[r].branches > 1:
            raise ValueError(f"the text of {region} is not known beforehand: it has branches")
        token = int(self.vocabulary.markers[r][start % STARTS])
        ids: list[int] = []
        while len(ids) < tokens:
            token = int(self.successor[token])
            ids.append(token)
        return ids

    def text(self, region: str, tokens: int, start: int = 0) -> str:
        """The same as text."""
        return b"".join(self.vocabulary.tokens[i] for i in self.text_ids(region, tokens, start)).decode()

    def expect(self, region: str, drafter: str, tokens: int, *, n_max: int = 3, start: int = 0) -> Expected:
        """Counters of a greedy run with drafts of `n_max` tokens, by walking through it.

        The first token comes out of prefill; the last draft is cut to the tokens that are still wanted, less
        the one that every step gives for free.
        """
        truth = self.text_ids(region, tokens + n_max, start)
        blocks = self.mtp_blocks if drafter == "mtp" else 1
        guesses = [self.guesses(drafter, block) for block in range(blocks)]
        done, drafted, accepted = 1, 0, 0
        while done < tokens:
            width = min(n_max, tokens - done - 1)
            token, hits = truth[done - 1], 0
            for k in range(width):
                token = int(guesses[k if blocks > 1 else 0][token])
                if token != truth[done + k]:
                    break
                hits += 1
            drafted, accepted, done = drafted + width, accepted + hits, done + hits + 1
        return Expected(tokens, drafted, accepted)


def plan_pair(
    out_dir: Path,
    *,
    regions: tuple[Region, ...] = REGIONS,
    seed: int = 0,
    target: str = "target.gguf",
    mtp_blocks: int = 1,
) -> CalibratedPair:
    """The pair that `write_pair` writes with the same arguments, without writing it."""
    return CalibratedPair(out_dir / target, out_dir / "draft.gguf", regions, seed, mtp_blocks)


def write_pair(
    out_dir: Path,
    *,
    embd: int = 128,
    layers: int = 2,
    seed: int = 0,
    regions: tuple[Region, ...] = REGIONS,
    ftype: str = "F16",
    ctx: int = 4096,
    experts: int = 0,
    experts_used: int = 4,
    draft_embd: int | None = None,
    draft_layers: int = 1,
    mtp_blocks: int = 1,
    arch: str = "glm4moe",
) -> CalibratedPair:
    """Write ``target.gguf`` and ``draft.gguf`` (llama) into `out_dir`.

    The target is a glm4moe with one MTP block, or a dense step35 with any number of them.

    `embd` is the width, a multiple of 64; 128 with 2 layers takes a fraction of a second, 1024 with 16 layers
    is about 500 MB in F16. With `experts` above 0 all blocks but the first are mixtures of experts. Another
    `seed` gives other successors with the same agreement.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    pair = plan_pair(out_dir, regions=regions, seed=seed, mtp_blocks=mtp_blocks)
    target = _Net(pair, pair.target, arch, embd=embd, layers=layers, ftype=ftype, ctx=ctx)
    if arch == "step35":
        _write_chain(target)
    else:
        _write_target(target, experts, experts_used)
    draft_embd = draft_embd or min(embd, 256)
    draft = _Net(pair, pair.draft, "llama", embd=draft_embd, layers=draft_layers, ftype=ftype, ctx=ctx)
    _write_draft(draft)
    return pair


class _Net:
    """One model being written: its metadata, and the tensors that target and draft have in common."""

    def __init__(
        self,
        pair: CalibratedPair,
        path: Path,
        arch: str,
        *,
        embd: int,
        layers: int,
        ftype: str,
        ctx: int,
        kv_heads: int | None = None,
        embed: float = 1.0,
    ) -> None:
        """`embed` scales the table of embeddings, which is left out if it is 0."""
        if embd % 64:
            raise ValueError(f"the width must be a multiple of 64, not {embd}")
        self.pair, self.vocab = pair, pair.vocabulary
        self.embd, self.layers = embd, layers
        self.ff, self.head_dim = 4 * embd, 64
        self.heads, self.kv_heads = embd // 64, kv_heads or max(1, embd // 256)
        self.dtype = gguf.GGMLQuantizationType[ftype]
        self.rng = np.random.default_rng(20)
        self.direction = self._directions()
        self.writer = gguf.GGUFWriter(path, arch)
        self._metadata(arch, ctx)
        if embed:
            self.put("token_embd.weight", np.float32(embed) * self._embedding())
        self.put("output_norm.weight", np.ones(embd, np.float32))

    def _directions(self) -> Floats:
        """A random unit vector for each token, zero in the dimensions that have a meaning."""
        unit = self.rng.standard_normal((len(self.vocab), self.embd), dtype=np.float32)
        unit[:, : FLAG + len(self.pair.regions)] = 0
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        return unit

    def _embedding(self) -> Floats:
        table = DIRECTION * self.direction
        table[:, CONST] = LEVEL
        for r in range(len(self.pair.regions)):
            marks, poison = self.vocab.markers[r], self.vocab.poison[r]
            table[np.concatenate([marks, poison]), MARK] = LEVEL
            table[marks, FLAG + r] = LEVEL
            table[poison, FLAG + (r + 1) % len(self.pair.regions)] = LEVEL
        return table

    def _metadata(self, arch: str, ctx: int) -> None:
        w = self.writer
        w.add_name(f"calibrated {arch}")
        w.add_context_length(ctx)
        w.add_embedding_length(self.embd)
        w.add_feed_forward_length(self.ff)
        w.add_head_count(self.heads)
        w.add_head_count_kv(self.kv_heads)
        w.add_key_length(self.head_dim)
        w.add_value_length(self.head_dim)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_dimension_count(self.head_dim)
        w.add_rope_freq_base(1e7)
        w.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{self.dtype.name}"]) if self.dtype.name != "F32" else 0)
        w.add_vocab_size(len(self.vocab))
        w.add_tokenizer_model("llama")
        w.add_token_list(self.vocab.tokens)
        w.add_token_scores([0.0] * len(self.vocab))
        w.add_token_types(self.vocab.types)
        w.add_bos_token_id(BOS)
        w.add_eos_token_id(EOS)
        w.add_unk_token_id(0)
        w.add_add_bos_token(True)
        w.add_add_eos_token(False)
        w.add_add_space_prefix(False)
        w.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    def put(self, name: str, tensor: npt.NDArray[np.floating], *, exact: bool = False) -> None:
        """Add a tensor in the model's type; vectors, and what must be `exact`, in F32."""
        data = np.ascontiguousarray(tensor, dtype=np.float32)
        if exact or data.ndim == 1 or self.dtype == gguf.GGMLQuantizationType.F32:
            self.writer.add_tensor(name, data)
        elif self.dtype == gguf.GGMLQuantizationType.F16:
            self.writer.add_tensor(name, data.astype(np.float16))
        else:
            self.writer.add_tensor(name, gguf.quants.quantize(data, self.dtype), raw_dtype=self.dtype)

    def noise(self, *shape: int) -> Floats:
        """Weights whose product is thrown away further on: they cost what real ones cost."""
        return self.rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)

    def flag(self, r: int, turn: int = 0) -> int:
        """Dimension of a region's flag, `turn` MTP blocks behind the target."""
        return FLAG + (r + turn) % len(self.pair.regions)

    def output_matrix(
        self, after: Ids, *, branches: bool, turn: int = 0, decoy: float = DECOY, level: float = LEVEL
    ) -> Floats:
        """Matrix (n_vocab, embd) that scores `after[t]` highest behind t if the region's flag is there.

        The flag stands at `level` then; a higher weight of a `decoy` needs more of it.
        """
        vocab = self.vocab
        out = np.zeros_like(self.direction)
        step = np.float32(
            BRANCH_GAP / (np.sqrt(2 / 3) * np.sqrt(self.embd))
        )  # √(2/3): share of the direction in the norm
        steady = np.concatenate(
            [w for w, region in zip(vocab.words, self.pair.regions, strict=True) if region.branches == 1]
        )
        for r, region in enumerate(self.pair.regions):
            words = vocab.words[r]
            for own in (words, vocab.poison[r], vocab.openers[r]):
                out[own, self.flag(r, turn)] = OWN
            foreign = np.setdiff1d(steady, words)
            for k, token in enumerate(words[::DECOY_EVERY] if len(foreign) else ()):
                out[foreign[37 * k % len(foreign)]] += decoy * self.direction[token]
            for token in np.concatenate([words, vocab.openers[r], vocab.markers[r]]):
                target = after[token]
                out[target] += TRUE * self.direction[token]
                for b in range(1, region.branches if branches else 1):
                    other = words[(target - words[0] + 13 * b) % region.period]
                    out[other] += (TRUE - b * step) * self.direction[token]
        self._settle(out, after, turn, level)
        return out

    def _settle(self, out: Floats, after: Ids, turn: int, level: float) -> None:
        """Push apart the few successors that crosstalk between random directions has made ambiguous."""
        for r, region in enumerate(self.pair.regions):
            if region.branches > 1:
                continue
            tokens = np.concatenate([self.vocab.words[r], self.vocab.openers[r], self.vocab.markers[r]])
            state = DIRECTION * self.direction[tokens]
            state[:, CONST], state[:, self.flag(r, turn)] = LEVEL, level
            state *= np.float32(np.sqrt(self.embd)) / np.linalg.norm(state, axis=1, keepdims=True)
            rows = np.arange(len(tokens))
            for _ in range(30):
                scores = state @ out.T
                own = scores[rows, after[tokens]]
                scores[rows, after[tokens]] = -np.inf
                rival = scores.argmax(axis=1)
                close = own - scores[rows, rival] < MARGIN
                if not close.any():
                    break
                np.add.at(out, after[tokens[close]], 0.2 * self.direction[tokens[close]])
                np.add.at(out, rival[close], -0.2 * self.direction[tokens[close]])

    def attention(self, block: int) -> None:
        """Block 0: a head that finds the mark and copies its flag. Elsewhere: work without effect."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        query, key, value = (
            self.noise(width, self.embd),
            self.noise(kv_width, self.embd),
            self.noise(kv_width, self.embd),
        )
        output = np.zeros((self.embd, width), np.float32)
        if block == 0:
            scale = np.sqrt(self.embd) / 16
            flag = LEVEL * np.sqrt(self.embd / (DIRECTION**2 + 3 * LEVEL**2))  # a marker's flag behind the norm
            slowest = self.head_dim - 1  # last dimension of the slowest rotary pair, in both pairings
            query[: self.head_dim], key[: self.head_dim], value[: self.head_dim] = 0, 0, 0
            query[slowest, CONST] = key[slowest, MARK] = 2.5 / scale
            for r in range(len(self.pair.regions)):
                value[r, FLAG + r] = 1
                output[FLAG + r, r] = LEVEL / flag
        self.put(f"blk.{block}.attn_norm.weight", np.ones(self.embd, np.float32))
        for name, tensor in (("q", query), ("k", key), ("v", value), ("output", output)):
            self.put(f"blk.{block}.attn_{name}.weight", tensor)

    def dense(self, block: int) -> None:
        """A feed-forward part whose result is multiplied by zero."""
        self.put(f"blk.{block}.ffn_gate.weight", self.noise(self.ff, self.embd))
        self.put(f"blk.{block}.ffn_up.weight", self.noise(self.ff, self.embd))
        self.put(f"blk.{block}.ffn_down.weight", np.zeros((self.embd, self.ff), np.float32))

    def experts(self, block: int, count: int, width: int) -> None:
        """The same as a mixture of experts; the router spreads tokens over them."""
        prefix = f"blk.{block}."
        self.put(prefix + "ffn_gate_inp.weight", 50 * self.noise(count, self.embd), exact=True)
        self.put(prefix + "exp_probs_b.bias", np.zeros(count, np.float32))
        self.put(prefix + "ffn_gate_exps.weight", self.noise(count, width, self.embd))
        self.put(prefix + "ffn_up_exps.weight", self.noise(count, width, self.embd))
        self.put(prefix + "ffn_down_exps.weight", np.zeros((count, self.embd, width), np.float32))
        self.put(prefix + "ffn_gate_shexp.weight", self.noise(width, self.embd))
        self.put(prefix + "ffn_up_shexp.weight", self.noise(width, self.embd))
        self.put(prefix + "ffn_down_shexp.weight", np.zeros((self.embd, width), np.float32))

    def finish(self) -> None:
        """Write everything to the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def _write_target(net: _Net, experts: int, experts_used: int) -> None:
    arch, w = "glm4moe", net.writer
    expert_width = 64
    w.add_block_count(net.layers + 1)  # the MTP block counts
    w.add_uint32(f"{arch}.nextn_predict_layers", 1)
    w.add_expert_count(experts or 2)
    w.add_expert_used_count(experts_used if experts else 1)
    w.add_expert_shared_count(1)
    w.add_expert_feed_forward_length(expert_width)
    w.add_leading_dense_block_count(1 if experts else net.layers)
    net.put("output.weight", net.output_matrix(net.pair.successor, branches=True), exact=True)
    for block in range(net.layers + 1):
        net.attention(block)
        net.put(f"blk.{block}.post_attention_norm.weight", np.ones(net.embd, np.float32))
        if block == 0 or (block < net.layers and not experts):
            net.dense(block)
        else:
            net.experts(block, experts or 2, expert_width)
    _write_mtp(net, f"blk.{net.layers}.nextn.")
    net.finish()


def _write_chain(net: _Net) -> None:
    """A dense step35 target, whose MTP blocks are run one behind the other."""
    arch, w, blocks = "step35", net.writer, net.layers + net.pair.mtp_blocks
    w.add_block_count(blocks)
    w.add_uint32(f"{arch}.nextn_predict_layers", net.pair.mtp_blocks)
    w.add_expert_feed_forward_length(64)
    w.add_sliding_window(512)
    w.add_sliding_window_pattern([block == 1 for block in range(blocks)])  # llama.cpp wants one at least
    net.put("output.weight", net.output_matrix(net.pair.successor, branches=True), exact=True)
    for block in range(blocks):
        net.attention(block)
        net.put(f"blk.{block}.ffn_norm.weight", np.ones(net.embd, np.float32))
        net.dense(block)
    for k in range(net.pair.mtp_blocks):
        _write_mtp(net, f"blk.{net.layers + k}.nextn.", block=k, turn=k + 1 if net.pair.mtp_blocks > 1 else 0)
    net.finish()


def _write_mtp(net: _Net, prefix: str, *, block: int = 0, turn: int = 0) -> None:
    """The MTP block's own tensors: flags from the hidden state, everything else from the token's embedding.

    Where `turn` is set, what comes in has been turned once less.
    """
    flags = np.zeros(net.embd, np.float32)
    flags[FLAG : FLAG + len(net.pair.regions)] = 1
    # behind its norm a hidden state is shorter by the flag that it carries and an embedding does not
    level = np.sqrt((DIRECTION**2 + 2 * LEVEL**2) / (DIRECTION**2 + LEVEL**2))
    from_row = np.diag(level * flags)
    if turn:
        own = slice(FLAG, FLAG + len(net.pair.regions))
        from_row[own] = np.roll(from_row[own], 1, axis=0)
    joined = np.concatenate([np.diag(1 - flags), from_row], axis=1)
    net.put(prefix + "eh_proj.weight", joined, exact=True)
    net.put(prefix + "enorm.weight", np.ones(net.embd, np.float32))
    net.put(prefix + "hnorm.weight", np.ones(net.embd, np.float32))
    guesses = net.output_matrix(net.pair.guesses("mtp", block), branches=False, turn=turn)
    net.put(prefix + "shared_head_head.weight", guesses, exact=True)


def _write_draft(net: _Net) -> None:
    net.writer.add_block_count(net.layers)
    net.put("output.weight", net.output_matrix(net.pair.guesses("draft"), branches=False), exact=True)
    for block in range(net.layers):
        net.attention(block)
        net.put(f"blk.{block}.ffn_norm.weight", np.ones(net.embd, np.float32))
        net.dense(block)
    net.finish()
