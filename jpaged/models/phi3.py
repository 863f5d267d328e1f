"""Phi-3, Phi-3.5 and Phi-4 (https://arxiv.org/abs/2404.14219): fused weights, LongRoPE."""

from typing import Any

from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family
from jpaged.models.weights import TensorNames


def _read(config: ConfigReader) -> dict[str, Any]:
    num_heads = config.whole("num_attention_heads")
    head_dim = config.whole("hidden_size") // num_heads
    window = config.whole("sliding_window") if config.get("sliding_window") is not None else None
    return {
        "head_dim": head_dim,
        # Their files say "su" or "yarn" for it.
        "rope": config.rope(head_dim=head_dim, partial=True, family_type="longrope"),
        "windows": config.windows(window, [True] * config.whole("num_hidden_layers")),
    }


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    _read,
    keys=frozenset({"sliding_window", "layer_types", "partial_rotary_factor"}),
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
