"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2412.15115): biases on q, k and v."""

from typing import Any

from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Family

QWEN_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Windows that are seldom switched on: of the layers above the first so many."""
    window = None
    if config.flag("use_sliding_window") and config.get("sliding_window") is not None:
        window = config.whole("sliding_window")
    first = config.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ValueError(
            f"config.json: max_window_layers is {first!r}; it must be a whole number from 0 up"
        )
    num_layers = config.whole("num_hidden_layers")
    return config.windows(window, [layer >= first for layer in range(num_layers)])


def _read(config: ConfigReader) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": read_windows(config)}


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", _read, keys=QWEN_KEYS, defaults=QWEN_DEFAULTS)
