"""Llama 2 and 3, SmolLM2, and whatever else has taken over their form."""

from typing import Any

from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family


def _read(config: ConfigReader) -> dict[str, Any]:
    has_bias = config.flag("attention_bias")
    return {"qkv_bias": has_bias, "o_bias": has_bias, "mlp_bias": config.flag("mlp_bias")}


LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    _read,
    keys=frozenset({"attention_bias", "mlp_bias"}),
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
)
