"""Mistral: Llama, with a window in its first version (https://arxiv.org/abs/2310.06825)."""

from typing import Any

from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family


def _read(config: ConfigReader) -> dict[str, Any]:
    window = config.whole("sliding_window") if config.get("sliding_window") is not None else None
    return {"windows": config.windows(window, [True] * config.whole("num_hidden_layers"))}


MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    _read,
    keys=frozenset({"sliding_window", "layer_types"}),
    defaults={
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
