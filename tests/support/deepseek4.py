"""A tiny deepseek4 of random weights with one MTP block: hidden rows there are four times as wide as the model.

The residual stream has four lanes (hyper-connections), all of which the MTP block takes. The three layers have
the three kinds of cache: of the window alone, and of four or 128 tokens compressed to one beside it.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

__all__ = ["LANES", "WIDTH", "write_deepseek4"]

WIDTH, LANES, HEADS, HEAD, LORA, GROUPS, OUT, EXPERTS, FF, WORDS = 64, 4, 4, 64, 32, 2, 16, 4, 32, 400
RATIOS = (0, 4, 128, 0)  # of compression, by layer; the last one is the MTP block
INDEX = 128  # width of the keys by which compressed tokens are found; llama.cpp fails if it is that of a head


def write_deepseek4(path: Path, *, seed: int = 0) -> Path:
    """Write the model in F32."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "deepseek4")
    _metadata(writer)

    def put(name: str, *shape: int, gain: float = 1.0) -> None:
        weights = gain / np.sqrt(shape[-1]) * rng.standard_normal(shape)
        writer.add_tensor(name, weights.astype(np.float32))

    def ones(name: str, count: int) -> None:
        writer.add_tensor(name, np.ones(count, np.float32))

    words = 259 + WORDS
    put("token_embd.weight", words, WIDTH, gain=8.0)
    put("output.weight", words, WIDTH, gain=4.0)
    ones("output_norm.weight", WIDTH)
    put("output_hc_fn.weight", LANES, LANES * WIDTH)
    put("output_hc_base.weight", LANES)
    ones("output_hc_scale.weight", 1)
    for i, ratio in enumerate(RATIOS):
        block = f"blk.{i}."
        for name, count in (("attn_norm", WIDTH), ("ffn_norm", WIDTH), ("attn_q_a_norm", LORA)):
            ones(f"{block}{name}.weight", count)
        ones(block + "attn_kv_a_norm.weight", HEAD)
        put(block + "attn_sinks.weight", HEADS)
        put(block + "attn_q_a.weight", LORA, WIDTH)
        put(block + "attn_q_b.weight", HEADS * HEAD, LORA, gain=2.0)
        put(block + "attn_kv.weight", HEAD, WIDTH)
        put(block + "attn_output_a.weight", OUT * GROUPS, HEADS * HEAD // GROUPS, gain=3.0)
        put(block + "attn_output_b.weight", WIDTH, GROUPS * OUT, gain=3.0)
        for part in ("attn", "ffn"):
            put(f"{block}hc_{part}_fn.weight", (2 + LANES) * LANES, LANES * WIDTH)
            put(f"{block}hc_{part}_base.weight", (2 + LANES) * LANES)
            ones(f"{block}hc_{part}_scale.weight", 3)
        for name, width in (("attn", HEAD), ("indexer", INDEX)):
            if ratio and (name == "attn" or ratio == 4):
                wide = width * (2 if ratio == 4 else 1)
                put(f"{block}{name}_compressor_kv.weight", wide, WIDTH)
                put(f"{block}{name}_compressor_gate.weight", wide, WIDTH)
                put(f"{block}{name}_compressor_ape.weight", ratio, wide)
                ones(f"{block}{name}_compressor_norm.weight", width)
        if ratio == 4:
            put(block + "indexer.proj.weight", 2, WIDTH)
            put(block + "indexer.attn_q_b.weight", 2 * INDEX, LORA)
        put(block + "ffn_gate_inp.weight", EXPERTS, WIDTH)
        put(block + "exp_probs_b.bias", EXPERTS)
        for kind, shape in (("exps", (EXPERTS,)), ("shexp", ())):
            put(f"{block}ffn_gate_{kind}.weight", *shape, FF, WIDTH)
            put(f"{block}ffn_up_{kind}.weight", *shape, FF, WIDTH)
            put(f"{block}ffn_down_{kind}.weight", *shape, WIDTH, FF, gain=2.0)
    block = f"blk.{len(RATIOS) - 1}.nextn."
    put(block + "eh_proj.weight", WIDTH, 2 * WIDTH)
    ones(block + "enorm.weight", WIDTH)
    ones(block + "hnorm.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: gguf.GGUFWriter) -> None:
    own = "deepseek4."
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(len(RATIOS))
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD // 2)
    writer.add_rope_freq_base(100.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_q_lora_rank(LORA)
    writer.add_sliding_window(32)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(FF)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(True)
    writer.add_uint32(own + "expert_gating_func", 4)  # the only one that the loader takes
    writer.add_array(own + "swiglu_clamp_exp", [10.0] * len(RATIOS))
    writer.add_uint32(own + "attention.indexer.head_count", 2)
    writer.add_uint32(own + "attention.indexer.key_length", INDEX)
    writer.add_uint32(own + "attention.indexer.top_k", 16)
    writer.add_uint32(own + "attention.output_group_count", GROUPS)
    writer.add_uint32(own + "attention.output_lora_rank", OUT)
    writer.add_float32(own + "attention.compress_rope_freq_base", 100.0)
    writer.add_array(own + "attention.compress_ratios", list(RATIOS))
    writer.add_uint32(own + "hyper_connection.count", LANES)
    writer.add_uint32(own + "hyper_connection.sinkhorn_iterations", 4)
    writer.add_float32(own + "hyper_connection.epsilon", 1e-6)
    writer.add_uint32(own + "hash_layer_count", 0)
    writer.add_uint32(own + "nextn_predict_layers", 1)
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    tokens += [f" w{i}".encode() for i in range(WORDS)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * 256, *[4] * WORDS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
