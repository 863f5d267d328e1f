import dataclasses

import pytest

from jpaged.config import EngineConfig, ModelConfig, RopeConfig

MODEL = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 32,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("kind", "valid", "field", "value"),
    [
        (EngineConfig, {}, "max_num_seqs", 0),
        (EngineConfig, {}, "max_num_batched_tokens", 0),
        (EngineConfig, {}, "max_model_len", -1),
        (EngineConfig, {}, "block_size", 0),
        (EngineConfig, {}, "num_blocks", 0),
        (EngineConfig, {}, "kv_cache_memory_bytes", 0),
        (EngineConfig, {}, "memory_utilization", 0.0),
        (EngineConfig, {}, "memory_utilization", 1.01),
        (EngineConfig, {}, "memory_utilization", float("nan")),
        (EngineConfig, {}, "long_prefill_token_threshold", -1),
        (EngineConfig, {}, "watermark", 0.51),
        (EngineConfig, {}, "scheduling_policy", "lifo"),
        (EngineConfig, {}, "decode_buckets", (4, 0)),
        (EngineConfig, {}, "mixed_buckets", (-64,)),
        (EngineConfig, {}, "dtype", "float64"),
        (EngineConfig, {}, "seed", -1),
        (ModelConfig, MODEL, "num_layers", 0),
        (ModelConfig, MODEL, "num_tokens_known", 101),
        (ModelConfig, MODEL, "num_heads", 3),
        (ModelConfig, MODEL, "head_dim", 3),
        (RopeConfig, SCALING, "factor", 0.5),
        (RopeConfig, SCALING, "high_freq_factor", 1.0),
    ],
)
def test_value_out_of_range_is_refused_with_field_and_value(kind, valid, field, value):
    kind(**valid)
    with pytest.raises(ValueError, match=field) as error:
        kind(**valid | {field: value})
    assert str(value if not isinstance(value, tuple) else min(value)) in str(error.value)


def test_pool_size_is_given_in_one_way():
    with pytest.raises(ValueError, match="num_blocks is 3.*kv_cache_memory_bytes is 4096"):
        EngineConfig(num_blocks=3, kv_cache_memory_bytes=4096)


@pytest.mark.parametrize("config", [EngineConfig(), ModelConfig(**MODEL)])
def test_configs_are_frozen_and_refuse_unknown_fields(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = "bfloat16"
    with pytest.raises(TypeError, match="block_sise"):
        EngineConfig(block_sise=16)
