"""Gemma 2 (https://arxiv.org/abs/2408.00118): soft caps, every second layer has a window."""

from collections.abc import Sequence
from typing import Any

from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family
from jpaged.models.weights import TensorNames

GEMMA_KEYS = frozenset({
    "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window",
    "layer_types", "final_logit_softcapping", "attn_logit_softcapping",
    "use_bidirectional_attention", "cache_implementation",
})  # fmt: skip
GEMMA_NAMES = TensorNames(
    mlp_in_norm="pre_feedforward_layernorm", mlp_out_norm="post_feedforward_layernorm"
)
GEMMA_DEFAULTS = {
    "max_position_embeddings": 8192, "head_dim": 256, "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip


def read_gemma(config: ConfigReader, has_window: Sequence[bool]) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common.

    Args:
        config: config.json.
        has_window: Which layers have one, where `layer_types` does not say.
    """
    if config.flag("use_bidirectional_attention"):
        raise ValueError(
            "config.json: use_bidirectional_attention is true; jpaged generates, from left to right"
        )
    has_bias = config.flag("attention_bias")
    window = config.whole("sliding_window") if config.get("sliding_window") is not None else None
    return {
        "activation": config.get("hidden_activation"),
        "norm_after": True,
        "norm_adds_one": True,
        "embedding_scale": config.whole("hidden_size") ** 0.5,
        "attention_scale": config.number("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": config.number_or_none("attn_logit_softcapping"),
        "logits_softcap": config.number_or_none("final_logit_softcapping"),
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "windows": config.windows(window, has_window),
    }


def _read(config: ConfigReader) -> dict[str, Any]:
    num_layers = config.whole("num_hidden_layers")
    return read_gemma(config, [layer % 2 == 0 for layer in range(num_layers)])


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    _read,
    keys=GEMMA_KEYS,
    defaults=GEMMA_DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    names=GEMMA_NAMES,
)
