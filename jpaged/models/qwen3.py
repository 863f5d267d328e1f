"""Qwen3 (https://arxiv.org/abs/2505.09388): norms of each head's queries and keys."""

from typing import Any

from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family
from jpaged.models.qwen2 import QWEN_DEFAULTS, QWEN_KEYS, read_windows


def _read(config: ConfigReader) -> dict[str, Any]:
    has_bias = config.flag("attention_bias")
    return {
        "qk_norm": "head",
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "windows": read_windows(config),
    }


QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    _read,
    keys=QWEN_KEYS | {"attention_bias"},
    defaults=QWEN_DEFAULTS | {"head_dim": 128},
)
