"""What a model file says about itself, and whether a draft model fits a target."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import LlamaFileType

from specproxy.adapters.gguf_reader import GgufFile, TensorInfo
from specproxy.errors import ModelFileError, PairError

__all__ = ["ASSISTANTS", "MTP_ARCHITECTURES", "ModelFacts", "check_pair", "digest_file", "read_facts"]

MTP_ARCHITECTURES = frozenset(
    {
        "deepseek2",
        "deepseek32",
        "deepseek4",
        "bailingmoe3",
        "cohere2moe",
        "glm4moe",
        "glm-dsa",
        "hy_v3",
        "mimo2",
    }
    | {"glm5-next", "nemotron_h_moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp", "step35"}
)
"""Architectures for which llama-server has a graph for the MTP block (b11549)."""

ASSISTANTS = {"gemma4-assistant": "gemma4"}
"""Drafters that attend to the target's own KV cache, and the targets that have such a cache."""

SIDECAR_TYPES = {
    "gemma4-assistant": "draft-mtp",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
}
"""Architectures of drafters that are no language models of their own, and their spec type."""

MARKOV_HEAD = "markov_w1.weight"  # with this tensor a DFlash drafter is a DSpark one

VOCAB_KINDS = {"llama": "SPM", "gpt2": "BPE", "gemma4": "BPE", "bert": "WPM", "t5": "UGM"}
DEFAULT_IDS = {"SPM": (1, 2), "BPE": (11, 11), "WPM": (101, 102), "UGM": (None, 1)}  # llama-vocab.cpp: bos, eos
SIZE_GAP, FIRST_COMPARED = 128, 5  # common/speculative.cpp: SPEC_VOCAB_*
ENDS = ("BOS ids", "EOS ids", "add_bos flags", "add_eos flags")
DIGEST_BLOCKS, DIGEST_BLOCK = 64, 4096
KV_ELEMENT = 2  # bytes: the KV cache is F16 unless told otherwise
STATE_ELEMENT = 4  # recurrent states are F32
EXPERTS = re.compile(r"_exps\.|\.ffn_\w+\.\d+\.")  # a block's experts in one tensor; in old files one each
PART = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model file (or a set of split files). Sizes in bytes; None where the file does not say.

    `digest` identifies the content: SHA-256 over metadata, tensor table, size and 64 blocks of 4 KiB spread
    over the weights. `kv_bytes_per_token` holds for an F16 cache with every layer at full length, an upper
    bound where layers use a window. `state_bytes` is the recurrent state of one sequence.

    `key_lengths` are the widths of a key in layers that see everything and in those with a window, 0 where the
    file does not say.

    `expert_bytes` are all experts' weights, those of MTP layers left out. Of a drafter that is made for one
    target, `target_embd` is the width of that target (0 where the file does not say), and `markov` tells
    whether it has a Markov head.
    """

    path: Path
    digest: str
    architecture: str
    name: str
    size_bytes: int
    weight_bytes: int
    parameters: int
    quantisation: str
    bytes_by_type: tuple[tuple[str, int], ...]
    context_length: int | None
    block_count: int
    embd: int
    heads: int
    kv_heads: tuple[int, ...]
    vocab_size: int
    tokenizer: str
    tokenizer_pre: str
    bos: int | None
    eos: int | None
    add_bos: bool | None
    add_eos: bool | None
    expert_count: int
    expert_used_count: int
    mtp_layers: int
    mtp_bytes: int
    standalone: bool
    recurrent: bool
    kv_bytes_per_token: int
    state_bytes: int
    chat_template: str | None
    target_embd: int = 0
    key_lengths: tuple[int, int] = (0, 0)
    markov: bool = False
    expert_bytes: int = 0

    @property
    def expert_share(self) -> float:
        """Share of the bytes read for a token that are experts' weights; 0 for a model that has none.

        Decoding is bound by reading, so this is the part of a step that grows where tokens pick other experts.
        """
        if not self.is_moe:
            return 0.0
        read = self.expert_bytes * self.expert_used_count / self.expert_count
        return read / (self.weight_bytes - self.mtp_bytes - self.expert_bytes + read)

    @property
    def has_mtp(self) -> bool:
        """Whether llama-server can draft with MTP layers in this very file."""
        return self.mtp_layers > 0 and self.architecture in MTP_ARCHITECTURES and self.standalone

    @property
    def is_moe(self) -> bool:
        """Whether only some experts are read for a token."""
        return 0 < self.expert_used_count < self.expert_count

    @property
    def sidecar_type(self) -> str | None:
        """Spec type of a drafter that is no model of its own; None for an ordinary model."""
        if self.architecture == "dflash" and self.markov:
            return "draft-dspark"
        if self.architecture in SIDECAR_TYPES:
            return SIDECAR_TYPES[self.architecture]
        return "draft-mtp" if self.mtp_layers and not self.standalone else None

    @property
    def vocab_kind(self) -> str:
        """llama.cpp's vocabulary type."""
        return VOCAB_KINDS.get(self.tokenizer, self.tokenizer)


def read_facts(path: Path) -> ModelFacts:
    """Read a GGUF file's facts; of a split model, give the first part. Takes well under a second for any size.

    Raises:
        ModelFileError: missing, not GGUF, damaged or truncated, or no model.
    """
    with ExitStack() as stack:
        first = stack.enter_context(GgufFile(path))
        parts = [first, *(stack.enter_context(GgufFile(p)) for p in _other_parts(path, first))]
        return _facts(parts)


def _other_parts(path: Path, first: GgufFile) -> list[Path]:
    count = first.scalars.get("split.count", 0)
    if count < 2:
        return []
    name = PART.match(path.name)
    if name is None or int(name[2]) != 1:
        raise ModelFileError(
            f"{path} is a part of a split model",
            hint=f"give the first of the {count} files, …-00001-of-{count:05}.gguf",
        )
    return [path.with_name(f"{name[1]}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]


def _facts(parts: list[GgufFile]) -> ModelFacts:
    file = parts[0]
    fields = file.scalars
    arch = fields.get("general.architecture")
    tensors = [tensor for part in parts for tensor in part.tensors.values()]
    if not isinstance(arch, str) or not tensors:
        raise ModelFileError(
            f"{file.path} is a GGUF file, but holds no model", hint="a LoRA or a vocabulary only?"
        )
    if fields.get("general.type", "model") not in ("model", ""):
        raise ModelFileError(f"{file.path} is no model, but of the type {fields['general.type']}")
    shape = _Shape(file, arch)
    by_type: dict[str, int] = {}
    for tensor in tensors:
        by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.nbytes
    mtp_layers = _mtp_layers(shape, tensors)
    dense = shape.number("leading_dense_block_count") >= max(1, shape.blocks - mtp_layers)
    trunk = shape.blocks - mtp_layers
    experts = 0 if dense else shape.number("expert_count")  # experts of the MTP layers alone do not count
    vocab = "tokenizer.ggml."
    return ModelFacts(
        path=file.path,
        digest=_digest(parts),
        architecture=arch,
        name=str(fields.get("general.name") or file.path.stem),
        size_bytes=sum(part.size for part in parts),
        weight_bytes=sum(by_type.values()),
        parameters=sum(tensor.elements for tensor in tensors),
        quantisation=_quantisation(fields, by_type),
        bytes_by_type=tuple(sorted(by_type.items())),
        context_length=shape.number("context_length") or None,
        block_count=shape.blocks,
        embd=shape.embd,
        heads=max(shape.heads),
        kv_heads=shape.kv_heads,
        vocab_size=file.length(vocab + "tokens") or shape.number("vocab_size"),
        tokenizer=str(fields.get(vocab + "model", "none")),
        tokenizer_pre=str(fields.get(vocab + "pre", "")),
        bos=fields.get(vocab + "bos_token_id"),
        eos=fields.get(vocab + "eos_token_id"),
        add_bos=fields.get(vocab + "add_bos_token"),
        add_eos=fields.get(vocab + "add_eos_token"),
        expert_count=experts,
        expert_used_count=shape.number("expert_used_count") if experts else 0,
        mtp_layers=mtp_layers,
        mtp_bytes=_bytes_from_block(tensors, trunk) if mtp_layers else 0,
        standalone=any(tensor.name.startswith("blk.0.") for tensor in tensors),
        recurrent=shape.recurrent,
        kv_bytes_per_token=shape.kv_bytes_per_token(),
        state_bytes=shape.state_bytes(),
        chat_template=fields.get("tokenizer.chat_template"),
        key_lengths=(shape.number("attention.key_length"), shape.number("attention.key_length_swa")),
        target_embd=shape.number("embedding_length_out" if arch in ASSISTANTS else "target_hidden_size"),
        markov=any(tensor.name == MARKOV_HEAD for tensor in tensors),
        expert_bytes=sum(t.nbytes for t in tensors if EXPERTS.search(t.name) and _block(t.name) < trunk),
    )


class _Shape:
    """Architecture keys of one file, with llama.cpp's defaults."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self._file, self._arch, self._fields = file, arch, file.scalars
        self.blocks = self.number("block_count")
        self.embd = self.number("embedding_length")
        self.heads = self._per_block("attention.head_count", (1,))
        self.kv_heads = self._per_block("attention.head_count_kv", self.heads)
        self.recurrent = any(key.startswith((f"{arch}.ssm.", f"{arch}.wkv.")) for key in self._fields)

    def number(self, key: str) -> int:
        """An integer key of the architecture; 0 if it is missing or no plain number."""
        value = self._fields.get(f"{self._arch}.{key}", 0)
        return value if isinstance(value, int) and value >= 0 else 0

    def _per_block(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A key that is one number, or one for each block."""
        listed = self._file.numbers(f"{self._arch}.{key}")
        return tuple(int(n) for n in listed) if listed else ((n,) if (n := self.number(key)) else default)

    def kv_bytes_per_token(self) -> int:
        """K and V rows of all attention layers."""
        if self._arch in ASSISTANTS:
            return 0  # its layers read the target's
        head = self.embd // max(1, *self.heads)
        rows = (self.number("attention.key_length") or head) + (self.number("attention.value_length") or head)
        per_block = self.kv_heads if len(self.kv_heads) > 1 else self.kv_heads * self.blocks
        interval = self.number("full_attention_interval") or 1
        return sum(per_block) * rows * KV_ELEMENT // interval

    def state_bytes(self) -> int:
        """Convolution and recurrent state of one sequence (Mamba layout), summed over recurrent layers."""
        inner, state = self.number("ssm.inner_size"), self.number("ssm.state_size")
        convolution = max(0, self.number("ssm.conv_kernel") - 1) * (
            inner + 2 * max(1, self.number("ssm.group_count")) * state
        )
        interval = self.number("full_attention_interval")
        layers = self.blocks - (self.blocks // interval if interval else 0)
        return layers * (inner * state + convolution) * STATE_ELEMENT


def _mtp_layers(shape: _Shape, tensors: Iterable[TensorInfo]) -> int:
    """MTP layers whose weights are really there: some converters keep the key and leave out the tensors."""
    if not any(re.fullmatch(r"blk\.\d+\.nextn\.eh_proj\.weight", tensor.name) for tensor in tensors):
        return 0
    return shape.number("nextn_predict_layers")


def _bytes_from_block(tensors: Iterable[TensorInfo], first: int) -> int:
    return sum(tensor.nbytes for tensor in tensors if _block(tensor.name) >= first)


def _block(name: str) -> int:
    """The block that a tensor is in; -1 for one that is in none."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _quantisation(fields: Mapping[str, Any], by_type: Mapping[str, int]) -> str:
    """Name of the file type, such as Q4_K_M; without one, the type of most of the weights."""
    try:
        return str(LlamaFileType(fields["general.file_type"]).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except (KeyError, ValueError):
        return max(by_type, key=lambda name: by_type[name])


def _digest(parts: list[GgufFile]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.size.to_bytes(8, "little"))
        digest.update(part.raw(0, part.data_at))
        step = max(DIGEST_BLOCK, (part.size - part.data_at) // DIGEST_BLOCKS)
        for at in range(part.data_at, part.size, step):
            digest.update(part.raw(at, at + DIGEST_BLOCK))
    return digest.hexdigest()


def digest_file(path: Path) -> str:
    """`ModelFacts.digest` of a file.

    Raises:
        ModelFileError: see `read_facts`.
    """
    return read_facts(path).digest


# --- pairs ---------------------------------------------------------------------------------------


def check_pair(target: ModelFacts, draft: ModelFacts) -> tuple[str, ...]:
    """Check that `draft` can draft for `target` by llama.cpp's rule; returns warnings, one sentence each.

    A server loads a pair that breaks the rule without complaint, and then never drafts.

    Raises:
        PairError: it does not fit; the message says what differs.
    """
    if target.digest == draft.digest:
        raise PairError(
            "the draft model is the target itself", hint="a draft should be about a tenth of its target"
        )
    if draft.sidecar_type is None:
        _check_vocabulary(target, draft)
    else:
        _check_sidecar(target, draft)
    return tuple(_doubts(target, draft))


def _check_sidecar(target: ModelFacts, draft: ModelFacts) -> None:
    """Check that a drafter that is no model of its own was made for such a target."""
    checks = [("that is {} wide", draft.target_embd, target.embd)]
    if draft.sidecar_type == "draft-mtp":
        if draft.architecture not in ASSISTANTS:
            checks = [("that is {} wide", draft.embd, target.embd)]
        checks.append(("of {} tokens", draft.vocab_size, target.vocab_size))
        if draft.architecture in ASSISTANTS:  # it reads the last layer of each kind
            checks += [
                ("with {} KV heads in its last layer", draft.kv_heads[-1], target.kv_heads[-1]),
                ("with keys of {}", draft.key_lengths[0], target.key_lengths[0]),
                ("with keys of {} in its windows", draft.key_lengths[1], target.key_lengths[1]),
            ]
        made_for = ASSISTANTS.get(draft.architecture, draft.architecture)
        if made_for != target.architecture:
            raise _misfit(draft, f"of the architecture {made_for}", target, target.architecture)
    for what, theirs, ours in checks:
        if theirs not in (0, ours):
            raise _misfit(draft, what.format(theirs), target, ours)


def _misfit(draft: ModelFacts, made_for: str, target: ModelFacts, ours: object) -> PairError:
    return PairError(
        f"{draft.path.name} is made for a target {made_for}; {target.path.name} is {ours}",
        hint="take the drafter that was trained for this very model",
    )


def _check_vocabulary(target: ModelFacts, draft: ModelFacts) -> None:
    def differ(what: str, a: object, b: object) -> PairError:
        return PairError(
            f"{draft.path.name} cannot draft for {target.path.name}: {what} differ ({b} against {a})",
            hint="take a smaller model of the same family and generation",
        )

    if target.vocab_kind != draft.vocab_kind:
        raise differ("vocabulary types", target.vocab_kind, draft.vocab_kind)
    for what, ours, theirs in zip(ENDS, _ends(target), _ends(draft), strict=True):
        if ours != theirs:
            raise differ(what, ours, theirs)
    if abs(target.vocab_size - draft.vocab_size) > SIZE_GAP:
        raise differ("vocabulary sizes", target.vocab_size, draft.vocab_size)
    pairs = zip(_tokens(target.path), _tokens(draft.path), strict=False)
    for i, (a, b) in enumerate(pairs):
        if i >= FIRST_COMPARED and a != b:
            raise differ(f"tokens {i}", repr(a.decode("utf-8", "replace")), repr(b.decode("utf-8", "replace")))


def _ends(facts: ModelFacts) -> tuple[int | None, int | None, bool, bool]:
    """BOS, EOS, add_bos, add_eos with llama.cpp's defaults by vocabulary type."""
    bos, eos = DEFAULT_IDS.get(facts.vocab_kind, (None, None))
    return (
        facts.bos if facts.bos is not None else bos,
        facts.eos if facts.eos is not None else eos,
        facts.add_bos if facts.add_bos is not None else facts.vocab_kind in ("SPM", "WPM"),
        bool(facts.add_eos),
    )


def _tokens(path: Path) -> list[bytes]:
    with GgufFile(path) as file:
        return file.strings("tokenizer.ggml.tokens") or []


def _doubts(target: ModelFacts, draft: ModelFacts) -> Iterable[str]:
    if draft.sidecar_type is not None:
        return
    share = draft.weight_bytes / target.weight_bytes
    if share > 0.3:
        yield (
            f"The draft model is {share:.0%} of its target's size; about a tenth is usual, "
            "and drafting will hardly be worth its time."
        )
    if draft.architecture != target.architecture and draft.tokenizer_pre != target.tokenizer_pre:
        yield f"The draft model is of another family ({draft.architecture}, the target {target.architecture})."
