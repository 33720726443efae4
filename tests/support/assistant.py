"""A gemma4 target and its assistant, of known acceptance, on the model of `tests.support.calibrated`.

The assistant keeps no cache: its layers attend to the target's last two. It takes the token from its embedding,
half of the region's flag from the target's hidden row, and the other half from what its one head finds at marks
in the cache of the target's last layer. Behind every fifth word half a flag is not enough against the decoy.
Its guesses are those of the calibrated MTP block.

`write_noisy_assistant` writes a pair of random weights instead, whose guesses depend on everything.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.support.calibrated import (
    CONST,
    DIRECTION,
    FLAG,
    LEVEL,
    MARK,
    OWN,
    REGIONS,
    TRUE,
    CalibratedPair,
    _Net,
)

__all__ = ["copy_model", "split_model", "write_assistant", "write_noisy_assistant"]

EMBD, LAYERS, WIDTH, CTX = 128, 3, 192, 4096  # `WIDTH` is the assistant's own
WINDOWS = (False, True, False)  # which layers look at a window; the last two are those that an assistant reads
SCORE = 10.0  # logits by which a mark wins in the head that looks for marks
WEIGHT = TRUE + 1.5 * OWN * LEVEL / DIRECTION  # of the assistant's decoys: between half a flag and all of it


def write_assistant(out_dir: Path, *, seed: int = 0, window: int = 1024) -> CalibratedPair:
    """Write ``target.gguf`` (gemma4) and ``draft.gguf`` (gemma4-assistant) into `out_dir`."""
    out_dir.mkdir(parents=True, exist_ok=True)
    pair = CalibratedPair(out_dir / "target.gguf", out_dir / "draft.gguf", REGIONS, seed)
    target = _Net(pair, pair.target, "gemma4", embd=EMBD, layers=LAYERS, ftype="F16", ctx=CTX, embed=EMBD**-0.5)
    _write_target(target, window)
    own = _Net(
        pair, pair.draft, "gemma4-assistant", embd=WIDTH, layers=2, ftype="F16", ctx=CTX, kv_heads=1, embed=0
    )
    own.direction = np.pad(target.direction, ((0, 0), (0, WIDTH - EMBD)))
    _write_assistant(own, window)
    return pair


def _write_target(net: _Net, window: int) -> None:
    net.writer.add_embedding_length_per_layer_input(0)
    net.put("output.weight", net.output_matrix(net.pair.successor, branches=True), exact=True)
    _windows(net, WINDOWS, window)
    for block in range(LAYERS):
        _attention(net, block, finds=block == 0)
        key, value = net.noise(net.kv_heads * 64, EMBD), net.noise(net.kv_heads * 64, EMBD)
        if not WINDOWS[block]:  # the first and the last layer: marks by their key, flags as values
            key[:64] = value[:64] = 0
            key[63, MARK] = 1
            value[np.arange(len(REGIONS)), FLAG + np.arange(len(REGIONS))] = 1
        net.put(f"blk.{block}.attn_k.weight", key)
        net.put(f"blk.{block}.attn_v.weight", value)
        net.put(f"blk.{block}.attn_k_norm.weight", np.full(64, SCORE / 64))
    net.finish()


def _write_assistant(net: _Net, window: int) -> None:
    w = net.writer
    w.add_embedding_length_out(EMBD)
    w.add_nextn_predict_layers(net.layers)
    guesses = net.output_matrix(net.pair.guesses("mtp"), branches=False, decoy=WEIGHT, level=2 * LEVEL)
    net.put("token_embd.weight", guesses, exact=True)
    flags = np.zeros(EMBD, np.float32)
    flags[FLAG : FLAG + len(REGIONS)] = 1
    # what a flag is in a row of the target, and in the assistant's last one, behind their norms
    given = LEVEL * np.sqrt(EMBD / (DIRECTION**2 + 2 * LEVEL**2))
    made = 2 * LEVEL * np.sqrt(WIDTH / (DIRECTION**2 + 5 * LEVEL**2))
    joined = np.zeros((WIDTH, 2 * EMBD), np.float32)
    joined[:EMBD] = np.concatenate([np.diag(1 - flags), LEVEL / given * np.diag(flags)], axis=1)
    net.put("nextn.pre_projection.weight", joined, exact=True)
    rows = np.zeros((EMBD, WIDTH), np.float32)
    rows[:, :EMBD] = given / made * np.diag(flags)
    net.put("nextn.post_projection.weight", rows, exact=True)
    _windows(net, WINDOWS[-2:], window)
    for block in range(net.layers):
        _attention(net, block, finds=not WINDOWS[1 + block])
        net.put(f"blk.{block}.layer_output_scale.weight", np.ones(1))
    net.finish()


def _windows(net: _Net, pattern: tuple[bool, ...], window: int) -> None:
    w = net.writer
    w.add_block_count(len(pattern))
    w.add_sliding_window(window)
    w.add_sliding_window_pattern(pattern)
    w.add_key_length_swa(64)
    w.add_value_length_swa(64)
    w.add_rope_freq_base_swa(1e7)
    net.put("rope_freqs.weight", np.ones(32))


def _attention(net: _Net, block: int, *, finds: bool) -> None:
    """Query and output of a block whose first head finds the mark and adds its flag, or has no effect."""
    width = net.heads * 64
    query, output = net.noise(width, net.embd), np.zeros((net.embd, width), np.float32)
    if finds:
        query[:64] = 0
        query[63, CONST] = 1
        output[FLAG + np.arange(len(REGIONS)), np.arange(len(REGIONS))] = 1
    prefix = f"blk.{block}."
    net.put(prefix + "attn_q.weight", query)
    net.put(prefix + "attn_output.weight", output)
    net.put(prefix + "attn_q_norm.weight", np.ones(64))
    for name in ("attn_norm", "ffn_norm", "post_ffw_norm"):
        net.put(prefix + name + ".weight", np.ones(net.embd))
    net.put(prefix + "post_attention_norm.weight", np.full(net.embd, LEVEL / np.sqrt(net.embd)))
    net.dense(block)


def write_noisy_assistant(pair: CalibratedPair, out_dir: Path) -> CalibratedPair:
    """A pair's shapes with random weights, fast rotation and a short window; what it says means nothing."""
    rng = np.random.default_rng(7)
    changes = {"rope.freq_base": 100.0, "rope.freq_base_swa": 100.0, "attention.sliding_window": 24}
    noisy = CalibratedPair(out_dir / "target.gguf", out_dir / "draft.gguf")
    for calm, path in ((pair.target, noisy.target), (pair.draft, noisy.draft)):
        tensors = {}
        for tensor in gguf.GGUFReader(calm).tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            norm = "norm" in tensor.name or "scale" in tensor.name or tensor.name == "rope_freqs.weight"
            weights = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))
            tensors[tensor.name] = np.ones(shape, np.float32) if norm else weights
        _copy(calm, path, tensors, changes)
    return noisy


def split_model(model: Path, trunk: Path, head: Path) -> None:
    """Put a model's MTP blocks into a file of their own, with the tensors that both parts need."""
    tensors = gguf.GGUFReader(model).tensors
    blocks = {t.name.split(".")[1] for t in tensors if ".nextn." in t.name}

    def of_head(name: str) -> bool:
        return name.startswith("blk.") and name.split(".")[1] in blocks

    shared = {t.name for t in tensors if not t.name.startswith("blk.")}
    for path, wanted in ((trunk, False), (head, True)):
        names = {t.name for t in tensors if of_head(t.name) == wanted} | shared
        _copy(model, path, {t.name: t.data for t in tensors if t.name in names})


def copy_model(model: Path, path: Path, *, changes: dict[str, float] | None = None, without: str = "") -> None:
    """Copy a model with keys of its architecture changed, or without a tensor."""
    tensors = {t.name: t.data for t in gguf.GGUFReader(model).tensors if t.name != without}
    _copy(model, path, tensors, changes)


def _copy(
    model: Path, path: Path, tensors: dict[str, np.ndarray], changes: dict[str, float] | None = None
) -> None:
    """Write a model with another's metadata, keys of the architecture changed, and these tensors."""
    reader = gguf.GGUFReader(model)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, arch)
    changed = {f"{arch}.{key}": value for key, value in (changes or {}).items()}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.get(name, field.contents()), field.types[0], sub)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
