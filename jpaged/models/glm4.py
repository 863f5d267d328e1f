"""GLM-4-0414 (https://arxiv.org/abs/2406.12793): half of each head is rotated, by neighbours.

Attention and MLP have norms around them.
"""

from typing import Any

from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family
from jpaged.models.weights import TensorNames


def _read(config: ConfigReader) -> dict[str, Any]:
    return {"norm_after": True, "qkv_bias": config.flag("attention_bias")}


GLM4 = Family(
    "Glm4ForCausalLM",
    "glm4",
    _read,
    keys=frozenset({"attention_bias", "partial_rotary_factor"}),
    defaults={
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    names=TensorNames(
        attention_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
        gate_up=("mlp.gate_up_proj",),
    ),
    interleaved=True,
)
