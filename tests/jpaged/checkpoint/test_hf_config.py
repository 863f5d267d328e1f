import copy

import pytest
from transformers import AutoConfig

from jpaged.checkpoint import expected_shapes, read_model_config
from jpaged.config import RopeConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None,
    "num_key_value_heads": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(changes=None, base=LLAMA, generation_config=None):
    return read_model_config(base | (changes or {}), generation_config or {})


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        MISTRAL,
        {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
        | {"num_attention_heads": 8},
        LLAMA | {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None},
        LLAMA | {"head_dim": 32, "rope_theta": 500000, "rms_norm_eps": 1e-5},
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
        LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}},
        LLAMA | {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
        LLAMA | {"rope_scaling": {"type": "default"}, "rope_theta": 7.0},
        LLAMA | {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 4096},
        LLAMA | {"bos_token_id": None, "eos_token_id": [5, 6], "tie_word_embeddings": True},
        LLAMA | {"eos_token_id": None, "attention_bias": True, "mlp_bias": True},
    ],
)
def test_config_means_what_it_means_to_transformers(config):
    ours = read(base=config)
    theirs = AutoConfig.for_model(**copy.deepcopy(config))
    # As its models do when they are built; only then an outer original length is looked at.
    theirs.standardize_rope_params()
    eos = theirs.eos_token_id
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size,
    )  # fmt: skip
    assert (ours.num_layers, ours.num_heads) == (
        theirs.num_hidden_layers, theirs.num_attention_heads,
    )  # fmt: skip
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.rope_type == theirs.rope_parameters["rope_type"]
    if ours.rope.rope_type == "llama3":
        for field in ("factor", "low_freq_factor", "original_max_position_embeddings"):
            assert getattr(ours.rope, field) == theirs.rope_parameters[field]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, eos)
    for ours_is, theirs_is in (("qkv", "attention"), ("o", "attention"), ("mlp", "mlp")):
        assert getattr(ours, f"{ours_is}_bias") == getattr(theirs, f"{theirs_is}_bias", False)


def test_llama3_rope_is_read_whole():
    assert read({"rope_scaling": LLAMA3_ROPE}).rope == RopeConfig(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [({"eos_token_id": [7, 8, 7]}, (7, 8)), ({"eos_token_id": 9}, (9,)), ({}, (3,))],
)
def test_eos_ids_come_from_the_generation_config_first(generation_config, expected):
    config = read({"eos_token_id": 3}, generation_config=generation_config)
    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16"}, "float16"),
    ],
)
def test_dtype_is_read_under_both_names(changes, dtype):
    assert read(changes).dtype == dtype


def test_bookkeeping_keys_are_accepted():
    changes = {
        "_name_or_path": "x", "transformers_version": "5", "use_cache": True, "pretraining_tp": 2,
        "attention_dropout": 0.1, "resid_pdrop": 0.1, "is_llama_config": True,
        "rope_interleaved": False, "id2label": {"0": "a"}, "temperature": 0.7,
        "initializer_range": 0.02, "some_future_feature": None,
    }  # fmt: skip
    assert read(changes) == read()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3Moe.*supports one of LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"model_type": "granite"}, "model_type is 'granite'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type 'su'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "rope.factor is 0.5"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type 'proportional'"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": None}}, "rope_scaling.factor is None"),
        ({"rope_scaling": LLAMA3_ROPE | {"mscale": 1.0}}, "rope_scaling.mscale is 1.0"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "320"}, "vocab_size is '320'"),
        ({"hidden_size": 66}, "hidden_size is 66"),
        ({"num_key_value_heads": 3}, "num_key_value_heads, which is 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"architectures": 5}, "architectures is 5"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "architectures is"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers is '30'"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings is 2147483648"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"rope_theta": 10**400}, "rope_theta is 10+"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": [1.0]}, "rope_theta is"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'"),
        ({"rope_parameters": 5}, "rope_parameters is 5"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": float("inf")}}, "rope_scaling.factor is inf"),
        (
            {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": "8192"}},
            "original_max_position_embeddings is '8192'",
        ),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"eos_token_id": "x"}, "config.json: eos_token_id is 'x'"),
        ({"eos_token_id": [[2]]}, "eos_token_id is"),
        ({"eos_token_id": 2**31}, "eos_token_id is 2147483648"),
        ({"bos_token_id": 1.0}, "bos_token_id is 1.0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        read(changes)


@pytest.mark.parametrize("eos", ["x", -1, 1.5, True, [1, None], {"id": 2}, 10**400])
def test_eos_ids_of_the_generation_config_are_checked_too(eos):
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id is"):
        read(generation_config={"eos_token_id": eos})


def test_mistral_without_the_key_has_a_window():
    config = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert read(base=config).windows == (4096,) * config["num_hidden_layers"]
    assert read(base=MISTRAL | {"sliding_window": None}).windows == ()


def test_code_of_a_checkpoint_is_left_alone():
    assert read({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}) == read()


def test_mistral_with_biases_is_refused():
    with pytest.raises(ValueError, match="attention_bias is True"):
        read({"attention_bias": True}, base=MISTRAL)


def test_expected_shapes_follow_the_config():
    config = read({"num_key_value_heads": 2, "head_dim": 32, "attention_bias": True})
    shapes = expected_shapes(config)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (128, 64)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (64,)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (64, 128)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 128)
    assert "model.layers.1.mlp.down_proj.bias" not in shapes
    assert shapes["lm_head.weight"] == (320, 64)
    assert "lm_head.weight" not in expected_shapes(read({"tie_word_embeddings": True}))
