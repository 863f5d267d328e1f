"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms after attention and MLP, none before.

Those of queries and keys span all heads together.
"""

from typing import Any

from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family


def _read(config: ConfigReader) -> dict[str, Any]:
    has_bias = config.flag("attention_bias")
    return {
        "norm_before": False,
        "norm_after": True,
        "qk_norm": "row",
        "qkv_bias": has_bias,
        "o_bias": has_bias,
    }


OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    _read,
    keys=frozenset({"attention_bias"}),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
)
