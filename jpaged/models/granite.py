"""Granite 3 (github.com/ibm-granite/granite-3.0-language-models): Llama with multipliers."""

from typing import Any

from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family


def _read(config: ConfigReader) -> dict[str, Any]:
    has_bias = config.flag("attention_bias")
    return {
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": config.flag("mlp_bias"),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "attention_scale": config.number("attention_multiplier", 1.0),
        "logits_scale": 1 / config.number("logits_scaling", 1.0),
    }


GRANITE = Family(
    "GraniteForCausalLM",
    "granite",
    _read,
    keys=frozenset({
        "attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier",
        "attention_multiplier", "logits_scaling",
    }),
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
)  # fmt: skip
