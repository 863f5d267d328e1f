"""Tiny GGUF files written by the `gguf` package's own writer, as llama.cpp's converter does it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests import tiny_models

Q = gguf.GGMLQuantizationType

ARCHITECTURES = {"gemma3_text": "gemma3"}  # those with another name than `model_type`
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    path: Path,
    variant: str = "padded-vocab",
    *,
    kind: Q = Q.F32,
    extra: dict[str, Any] | None = None,
    replaced: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    architecture: str | None = None,
    tokenizer_model: str = "gpt2",
    pre: str = "gpt-2",
    skip: str = "",
) -> Path:
    """Writes the variant; what no variant has are the options.

    Args:
        path: Of the file.
        variant: Of `tiny_models`.
        kind: Of its matrices.
        extra: Further metadata.
        replaced: Metadata instead of those; `None`: without them.
        extra_tensors: By their names in the file.
        architecture: Instead of the variant's own.
        tokenizer_model: Its name.
        pre: Likewise.
        skip: A tensor to leave out.
    """
    config = tiny_models.tiny_config(variant)
    model_type = config["model_type"]
    architecture = architecture or ARCHITECTURES.get(model_type, model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if model_type == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
    if model_type != "gemma2":
        writer.add_rope_freq_base(config["rope_theta"])
    if model_type.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if model_type == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    extra_tensors = dict(extra_tensors or {})
    scaling = config["rope_scaling"] or {}
    match scaling.get("rope_type", scaling.get("type")):
        case None:
            pass
        case "llama3":
            extra_tensors["rope_freqs.weight"] = llama3_factors(config)
        case name:
            writer.add_rope_scaling_type(gguf.RopeScalingType(name))
            writer.add_rope_scaling_factor(scaling["factor"])
            if name == "yarn":
                writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    for key, value in (extra or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    tokenizer = tiny_models._byte_level_tokenizer()
    tokens = [*tokenizer["model"]["vocab"], *tiny_models.SPECIAL_TOKENS, "Ġh", "Ġhe"]
    tokens += [f"[unused{index}]" for index in range(config["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens[: config["vocab_size"]])
    special = range(tiny_models.NUM_BYTES, tiny_models.NUM_TOKENS_KNOWN)
    types = [3 if token_id in special else 1 for token_id in range(config["vocab_size"])]
    writer.add_token_types(types)
    # Only the default variant has room for the merged tokens; the others' tokenizer is not built.
    writer.add_token_merges(["Ġ h", "Ġh e"])
    writer.add_bos_token_id(tiny_models.BOS_TOKEN_ID)
    writer.add_eos_token_id(tiny_models.EOS_TOKEN_ID)
    writer.add_chat_template(tiny_models.CHAT_TEMPLATE)
    for key, value in (replaced or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in tiny_models.tiny_weights(variant).items():
        if name == skip:
            continue
        tensor = stored(name, tensor, config)
        own_kind = kind if tensor.ndim == 2 else Q.F32
        data = gguf.quants.quantize(tensor, own_kind)
        writer.add_tensor(gguf_name(name, model_type), data, raw_dtype=own_kind)
    for name, tensor in extra_tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, model_type: str) -> str:
    """What a tensor is called in the file."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, suffix = rest.rsplit(".", 1)
    names = GEMMA_NAMES if model_type.startswith("gemma") else LAYER_NAMES
    return f"blk.{layer}.{names[stem]}.{suffix}"


def stored(name: str, tensor: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """The tensor as it stands in the file."""
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    if config["model_type"] == "llama":
        if ".q_proj." in name:
            return permute(tensor, config["num_attention_heads"])
        if ".k_proj." in name:
            return permute(tensor, config["num_key_value_heads"])
    return tensor


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As convert_hf_to_gguf.py of llama.cpp does it (LlamaModel.permute)."""
    shape = weights.shape
    return (
        weights.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
        .swapaxes(1, 2)
        .reshape(shape)
    )


def llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """As convert_hf_to_gguf.py does it (LlamaModel.generate_extra_tensors)."""
    scaling, head_dim = config["rope_scaling"], config["head_dim"]
    original = scaling["original_max_position_embeddings"]
    low_wavelength = original / scaling["low_freq_factor"]
    high_wavelength = original / scaling["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (index / head_dim)
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(scaling["factor"])
        else:
            share = (original / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - share) / scaling["factor"] + share))
    return np.array(factors, np.float32)
