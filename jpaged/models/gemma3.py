"""Gemma 3 (https://arxiv.org/abs/2503.19786): windows and their own rotary base in most layers.

Queries and keys have norms.
"""

from typing import Any

from jpaged.config import RopeConfig
from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family
from jpaged.models.gemma2 import GEMMA_DEFAULTS, GEMMA_KEYS, GEMMA_NAMES, read_gemma


def _read(config: ConfigReader) -> dict[str, Any]:
    num_layers, head_dim = config.whole("num_hidden_layers"), config.whole("head_dim")
    pattern = config.whole("sliding_window_pattern", 6)
    fields = read_gemma(config, [(layer + 1) % pattern != 0 for layer in range(num_layers)])
    return fields | {"qk_norm": "head"} | _read_ropes(config, head_dim)


def _read_ropes(config: ConfigReader, head_dim: int) -> dict[str, RopeConfig]:
    """Those of layers without a window and with one, from either spelling."""
    nested = config.get("rope_parameters", {})
    if not isinstance(nested, dict) or not all(
        isinstance(nested.get(kind, {}), dict | None)
        for kind in ("full_attention", "sliding_attention")
    ):
        raise ValueError(
            f"config.json: rope_parameters is {nested!r}; it must hold an object for "
            "full_attention and one for sliding_attention"
        )
    scaling = config.get("rope_scaling", {})
    if not isinstance(scaling, dict):
        raise ValueError(f"config.json: rope_scaling is {scaling!r}; it must be an object")
    wide = {"rope_theta": config.number("rope_theta", 1_000_000.0)}
    wide |= (nested.get("full_attention") or {}) | scaling
    narrow = {"rope_theta": config.number("rope_local_base_freq", 10_000.0)}
    narrow |= nested.get("sliding_attention") or {}
    return {
        "rope": config.read_rope("rope_scaling", wide, head_dim=head_dim),
        "window_rope": config.read_rope("rope_parameters", narrow, head_dim=head_dim),
    }


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    _read,
    keys=GEMMA_KEYS | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
    defaults=GEMMA_DEFAULTS | {"max_position_embeddings": 131072},
    names=GEMMA_NAMES,
)
