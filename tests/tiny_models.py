"""Tiny random models of every family, written as ordinary Hugging Face directories.

Two layers, hidden size 64, weights from a fixed seed in float32. The output head is scaled up so
that the best token is usually clear, and the attention and MLP outputs so that an answer depends
on the whole prompt. Only NumPy and safetensors are needed, so that the environment of the
transformers oracle (`scripts/make_goldens`) writes the very same models.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

NUM_BYTES = 256
BOS_TOKEN_ID, EOS_TOKEN_ID, IM_START_TOKEN_ID, IM_END_TOKEN_ID = range(NUM_BYTES, NUM_BYTES + 4)
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
NUM_TOKENS_KNOWN = NUM_BYTES + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": NUM_TOKENS_KNOWN,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "use_cache": True,
    "torch_dtype": "float32",
}

# What each variant of Llama changes in config.json; its place in the dict is its seed.
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha-wide-heads": {"num_key_value_heads": 4, "head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "tied": {"tie_word_embeddings": True},
    "padded-vocab": {"vocab_size": NUM_TOKENS_KNOWN + 60},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    },
    "heads-of-64": {"head_dim": 64},
}


# Those of other families, and of rotary embeddings; their seeds are other numbers.
FAMILY_VARIANTS: dict[str, dict[str, Any]] = {
    "linear-rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn-rope": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64
        },
    },
    "dynamic-rope": {
        "max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}
    },
    "mistral-window": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen2-window": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
        "sliding_window": 24, "max_window_layers": 1, "tie_word_embeddings": True,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 20,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0,
        "cache_implementation": "hybrid",
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3, "sliding_window": 20, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0, "rope_local_base_freq": 100.0,
        "rope_scaling": {"factor": 2.0, "rope_type": "linear"},
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0,
        "sliding_window": 40,
    },
    "phi3-longrope": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0,
        "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
            "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
        },
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "pad_token_id": 0,
        "attention_bias": True, "partial_rotary_factor": 0.5,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite",
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "logits_scaling": 2.0, "tie_word_embeddings": True,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
}  # fmt: skip


# Of these, rotary embeddings depend on the length.
GROWING_ROPES = ("dynamic-rope", "phi3-longrope")


class _Form(NamedTuple):
    """Which tensors a layer of a family has.

    Attributes:
        norms: In front of attention, behind it, in front of the MLP, behind it; "": none.
        qk_norm: "", "head" or "row".
        is_fused: q, k and v are one tensor; gate and up are.
        bias: Of q, k and v; of o. `None`: as `attention_bias` says.
        norm_mean: Of the weights of norms.
    """

    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    qk_norm: str = ""
    is_fused: tuple[bool, bool] = (False, False)
    bias: tuple[bool, bool] | None = None
    norm_mean: float = 1.0


_GEMMA = _Form(
    norms=(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    norm_mean=0.0,
)  # fmt: skip
_FORMS = {
    "qwen2": _Form(bias=(True, False)),
    "qwen3": _Form(qk_norm="head"),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA._replace(qk_norm="head"),
    "phi3": _Form(is_fused=(True, True)),
    "glm4": _Form(
        norms=(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        is_fused=(False, True),
        bias=(True, False),
    ),
    "olmo2": _Form(
        norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"), qk_norm="row"
    ),
}  # fmt: skip


def tiny_config(variant: str) -> dict[str, Any]:
    """What config.json of the variant says."""
    return _BASE | (VARIANTS | FAMILY_VARIANTS)[variant]


def tiny_weights(variant: str) -> dict[str, np.ndarray]:
    """Tensors of the variant by their Hugging Face names, in the order they are drawn."""
    config = tiny_config(variant)
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    form = _FORMS.get(config["model_type"], _Form())
    names = [*VARIANTS, *[""] * (1000 - len(VARIANTS)), *FAMILY_VARIANTS]
    random = np.random.Generator(np.random.PCG64(names.index(variant)))

    def draw(*shape: int, std: float, mean: float = 0.0) -> np.ndarray:
        return (mean + std * random.standard_normal(shape)).astype(np.float32)

    def linear(name: str, rows: int, columns: int, *, gain: float, bias: bool) -> None:
        tensors[f"{name}.weight"] = draw(rows, columns, std=gain / math.sqrt(columns))
        if bias:
            tensors[f"{name}.bias"] = draw(rows, std=0.5)

    def norm(name: str, size: int) -> None:
        if name:
            tensors[f"{name}.weight"] = draw(size, std=0.2, mean=form.norm_mean)

    def fuse(name: str, *parts: str) -> None:
        for kind in ("weight", "bias"):
            if f"{parts[0]}.{kind}" in tensors:
                pieces = [tensors.pop(f"{part}.{kind}") for part in parts]
                tensors[f"{name}.{kind}"] = np.concatenate(pieces)

    tensors = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden, std=1.0)}
    qkv_bias, o_bias = form.bias or (config["attention_bias"],) * 2
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attn, mlp_name = f"{layer}.self_attn", f"{layer}.mlp"
        before, after, mlp_before, mlp_after = (name and f"{layer}.{name}" for name in form.norms)
        norm(before, hidden)
        linear(f"{attn}.q_proj", query, hidden, gain=1.5, bias=qkv_bias)
        linear(f"{attn}.k_proj", key, hidden, gain=1.5, bias=qkv_bias)
        linear(f"{attn}.v_proj", key, hidden, gain=2.0, bias=qkv_bias)
        linear(f"{attn}.o_proj", hidden, query, gain=4.0, bias=o_bias)
        if form.qk_norm:
            is_row = form.qk_norm == "row"
            norm(f"{attn}.q_norm", query if is_row else config["head_dim"])
            norm(f"{attn}.k_norm", key if is_row else config["head_dim"])
        norm(after, hidden)
        biases = {"bias": config["mlp_bias"]}
        norm(mlp_before, hidden)
        linear(f"{mlp_name}.gate_proj", mlp, hidden, gain=2.0, **biases)
        linear(f"{mlp_name}.up_proj", mlp, hidden, gain=2.0, **biases)
        linear(f"{mlp_name}.down_proj", hidden, mlp, gain=2.0, **biases)
        norm(mlp_after, hidden)
        if form.is_fused[0]:
            fuse(f"{attn}.qkv_proj", *(f"{attn}.{name}_proj" for name in "qkv"))
        if form.is_fused[1]:
            fuse(f"{mlp_name}.gate_up_proj", f"{mlp_name}.gate_proj", f"{mlp_name}.up_proj")
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        head = draw(config["vocab_size"], hidden, std=1.0)
        # Ids that no tokenizer knows would win most steps, if they could be sampled.
        head[NUM_TOKENS_KNOWN:] *= 3.0
        tensors["lm_head.weight"] = head
    return tensors


def weights_sha256(tensors: dict[str, np.ndarray]) -> str:
    """Names a set of weights: equal exactly if every name, shape and value is."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].shape}".encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def write_tiny_model(directory: Path, variant: str, *, num_shards: int = 1) -> Path:
    """Writes the variant into `directory`, made if needed, and returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", tiny_config(variant))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": [EOS_TOKEN_ID, IM_END_TOKEN_ID]},
    )
    _write_json(directory / "tokenizer.json", _byte_level_tokenizer())
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    tensors = tiny_weights(variant)
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::num_shards]}
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total_size}, "weight_map": weight_map},
    )
    return directory


def _byte_level_tokenizer() -> dict[str, object]:
    """A BPE tokenizer without merges: id n is byte n, then the special tokens."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": NUM_BYTES + index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, content in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {_printable(byte): byte for byte in range(NUM_BYTES)},
            "merges": [],
        },
    }


def _printable(byte: int) -> str:
    """The character that byte-level BPE, since GPT-2, writes for a byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in plain:
        return chr(byte)
    others = [other for other in range(NUM_BYTES) if other not in plain]
    return chr(NUM_BYTES + others.index(byte))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
