"""Tiny models with random weights: every token of their text depends on all tokens before it, and on where they
stand. What they say means nothing and repeats nothing, so any fault in a KV cache changes it.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

__all__ = ["CHAINS", "write_random"]

CHAINS = ("step35", "mimo2", "hy_v3")
EMBD, HEADS, LAYERS, FF, WORDS, CONV = 64, 4, 2, 128, 400, 4


def write_random(
    path: Path,
    *,
    arch: str = "llama",
    seed: int = 0,
    noise: float = 0.0,
    mtp_blocks: int = 0,
    window: int = 2048,
) -> Path:
    """Write a model in F32.

    Args:
        path: where to.
        arch: ``llama``, or ``lfm2``, in which the first of the two blocks is a convolution with a state, or
            one of `CHAINS`, which may have MTP blocks.
        seed: of the weights.
        noise: share of other random weights mixed in: a draft model that agrees now and then.
        mtp_blocks: how many of them.
        window: tokens that one of the blocks looks back, if it is one of ``step35`` and ``mimo2``.
    """
    rng, other = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    tokens += [f" w{i}".encode() for i in range(WORDS)]
    types = [2, 3, 3, *[6] * 256, *[4] * WORDS]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(path.stem)
    writer.add_context_length(2048)
    writer.add_embedding_length(EMBD)
    writer.add_block_count(LAYERS + mtp_blocks)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    if arch == "lfm2":
        writer.add_head_count_kv([0, HEADS])
        writer.add_shortconv_l_cache(CONV)
    else:
        writer.add_head_count_kv(HEADS)
    if arch in CHAINS:
        writer.add_uint32(f"{arch}.nextn_predict_layers", mtp_blocks)
        writer.add_expert_feed_forward_length(FF)
    if arch in ("step35", "mimo2"):
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([block == 1 for block in range(LAYERS + mtp_blocks)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBD // HEADS)
    writer.add_rope_freq_base(100.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)

    def put(name: str, *shape: int, gain: float = 1.0) -> None:
        scale = gain / np.sqrt(shape[-1])
        weights = rng.standard_normal(shape) + noise * other.standard_normal(shape)
        writer.add_tensor(name, (scale * weights).astype(np.float32))

    put("token_embd.weight", len(tokens), EMBD, gain=8.0)
    put("output.weight", len(tokens), EMBD, gain=4.0)
    norm_name = "token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight"
    writer.add_tensor(norm_name, np.ones(EMBD, np.float32))
    for i in range(LAYERS, LAYERS + mtp_blocks):
        put(f"blk.{i}.nextn.eh_proj.weight", EMBD, 2 * EMBD)
        for norm in ("enorm", "hnorm"):
            writer.add_tensor(f"blk.{i}.nextn.{norm}.weight", np.ones(EMBD, np.float32))
    for i in range(LAYERS + mtp_blocks):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(EMBD, np.float32))
        if arch == "lfm2" and i == 0:
            put(f"blk.{i}.shortconv.conv.weight", EMBD, CONV)
            put(f"blk.{i}.shortconv.in_proj.weight", 3 * EMBD, EMBD)
            put(f"blk.{i}.shortconv.out_proj.weight", EMBD, EMBD, gain=3.0)
        else:
            if arch in ("lfm2", "hy_v3"):
                for norm in ("attn_q_norm", "attn_k_norm"):
                    writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(EMBD // HEADS, np.float32))
            if arch == "mimo2":
                put(f"blk.{i}.attn_qkv.weight", 3 * EMBD, EMBD, gain=2.0)
            else:
                for name in ("attn_q", "attn_k", "attn_v"):
                    put(f"blk.{i}.{name}.weight", EMBD, EMBD, gain=2.0)
            put(f"blk.{i}.attn_output.weight", EMBD, EMBD, gain=3.0)
        put(f"blk.{i}.ffn_gate.weight", FF, EMBD)
        put(f"blk.{i}.ffn_up.weight", FF, EMBD)
        put(f"blk.{i}.ffn_down.weight", EMBD, FF, gain=2.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
