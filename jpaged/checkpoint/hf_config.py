"""config.json of a Hugging Face checkpoint -> `ModelConfig`.

A key of config.json is either understood here, or known not to change what the model computes,
or refused by name: a checkpoint that asks for something that jpaged does not do must not come
up and answer in a subtly wrong way. A key that is absent means what it means to transformers.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from jpaged.config import Llama3RopeScaling, ModelConfig

# Architecture -> the model_type that goes with it.
SUPPORTED_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}

_UNDERSTOOD = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "rope_interleaved", "tie_word_embeddings", "attention_bias",
    "mlp_bias", "hidden_act", "sliding_window", "layer_types", "use_sliding_window",
    "max_window_layers", "is_encoder_decoder", "is_causal", "quantization_config", "auto_map",
    "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "original_max_position_embeddings",
})  # fmt: skip

# Training, bookkeeping and the output options of transformers; and its generation defaults,
# which old checkpoints keep here: what a caller may ask is `SamplingParams`.
_HARMLESS = frozenset({
    "_name_or_path", "transformers_version", "transformers.js_config", "tokenizer_class",
    "use_cache", "initializer_range", "pretraining_tp", "pad_token_id", "sep_token_id",
    "cls_token_id", "unk_token_id", "decoder_start_token_id", "is_llama_config", "is_decoder",
    "unsloth_version", "unsloth_fixed", "model_max_length", "max_sequence_length",
    "return_dict", "output_hidden_states",
    "output_attentions", "output_scores", "return_dict_in_generate", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "pruned_heads", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder",
    "finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id",
    "num_labels", "prefix", "gradient_checkpointing", "_attn_implementation",
    "_attn_implementation_autoset", "attn_implementation", "_flash_attn_2_enabled",
    "use_flash_attn",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
})  # fmt: skip

# Dropout acts in training only.
_DROPOUT = re.compile(r".*(dropout|pdrop)(_prob|_rate)?")

# What transformers takes where config.json has no such key.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "sliding_window": None},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
    },
}
_DTYPES = ("float32", "bfloat16", "float16")
# Sizes and ids are int32 on the device.
_MAX_INT = 2**31 - 1


def read_model_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> ModelConfig:
    """Translates config.json, refusing what jpaged would compute differently.

    Args:
        config: config.json.
        generation_config: generation_config.json, or nothing; its `eos_token_id` comes first.

    Raises:
        ValueError: Naming the key and its value.
    """
    if config.get("auto_map"):
        raise ValueError(
            f"config.json: auto_map is {config['auto_map']!r}; jpaged runs no code that comes with "
            "a checkpoint. Use a checkpoint of a supported architecture without auto_map"
        )
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"config.json: quantization_config with quant_method {method!r} is not supported. Use "
            "a float32, bfloat16 or float16 checkpoint, or a GGUF file"
        )
    architecture = _read_architecture(config)
    for key, value in config.items():
        known = key in _UNDERSTOOD or key in _HARMLESS or _DROPOUT.fullmatch(key)
        if not known and value is not None:
            raise ValueError(
                f"config.json: {key} is {value!r}; jpaged does not know this key, so it may change "
                "the result. Remove it from config.json if you know that it does not"
            )

    config = {
        key: value
        for key, value in config.items()
        if value is not None or key in ("sliding_window", "bos_token_id", "eos_token_id")
    }
    config = {**_DEFAULTS[architecture], **config}
    for key, allowed in (
        ("hidden_act", ("silu",)),
        ("partial_rotary_factor", (1.0,)),
        ("rope_interleaved", (False,)),
        ("is_encoder_decoder", (False,)),
        ("is_causal", (True,)),
    ):
        if config.get(key, allowed[0]) not in allowed:
            raise ValueError(
                f"config.json: {key} is {config[key]!r}; jpaged supports only {allowed[0]!r}"
            )
    _check_no_window(config)
    if architecture == "MistralForCausalLM" and (
        config.get("attention_bias") or config.get("mlp_bias")
    ):
        raise ValueError(
            f"config.json: attention_bias is {config.get('attention_bias')!r} and mlp_bias is "
            f"{config.get('mlp_bias')!r}; {architecture} has no biases"
        )

    hidden_size = _read_int(config, "hidden_size")
    num_heads = _read_int(config, "num_attention_heads")
    if "head_dim" not in config and hidden_size % num_heads:
        raise ValueError(
            f"config.json: hidden_size is {hidden_size} and num_attention_heads is {num_heads}; "
            "one must be a multiple of the other where there is no head_dim"
        )
    rope_theta, rope_scaling = _read_rope(config)
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(f"config.json: dtype is {dtype!r}; it must be one of {_DTYPES}")
    bos = _read_ids(config.get("bos_token_id", 1), "config.json: bos_token_id")
    eos = generation_config.get("eos_token_id")
    if eos is not None:
        eos_token_ids = _read_ids(eos, "generation_config.json: eos_token_id")
    else:
        eos_token_ids = _read_ids(config.get("eos_token_id", 2), "config.json: eos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_read_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_read_int(config, "intermediate_size"),
        num_layers=_read_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_read_int(config, "num_key_value_heads", num_heads),
        head_dim=_read_int(config, "head_dim", hidden_size // num_heads),
        max_position_embeddings=_read_int(config, "max_position_embeddings"),
        rms_norm_eps=_as_float(config.get("rms_norm_eps", 1e-6), "config.json: rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=_read_bool(config, "tie_word_embeddings"),
        attention_bias=_read_bool(config, "attention_bias"),
        mlp_bias=_read_bool(config, "mlp_bias"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos_token_ids,
        dtype=dtype,
    )


def _read_architecture(config: Mapping[str, Any]) -> str:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    if not architectures:
        # transformers picks the class by model_type alone.
        architectures = [a for a, m in SUPPORTED_ARCHITECTURES.items() if m == model_type]
    if architectures not in [[name] for name in SUPPORTED_ARCHITECTURES]:
        raise ValueError(
            f"config.json: architectures is {config.get('architectures')!r} (model_type "
            f"{model_type!r}); supported: {supported}, in a list of one"
        )
    (architecture,) = architectures
    expected = SUPPORTED_ARCHITECTURES[architecture]
    if model_type is not None and model_type != expected:
        raise ValueError(
            f"config.json: model_type is {model_type!r}; {architecture} goes with {expected!r}"
        )
    return architecture


def _check_no_window(config: Mapping[str, Any]) -> None:
    if config.get("use_sliding_window") is not False:
        if config["sliding_window"] is not None:
            raise ValueError(
                f"config.json: sliding_window is {config['sliding_window']!r} (absent, it means "
                "4096 for Mistral); jpaged supports full attention only. If the model is used "
                "with null, say so in config.json"
            )
        if config.get("use_sliding_window"):
            raise ValueError(
                "config.json: use_sliding_window is True; jpaged supports full attention only"
            )
    layer_types = config.get("layer_types", [])
    if not isinstance(layer_types, list):
        raise ValueError(f"config.json: layer_types is {layer_types!r}; it must be a list")
    for layer_type in layer_types:
        if layer_type != "full_attention":
            raise ValueError(
                f"config.json: layer_types holds {layer_type!r}; jpaged supports only "
                "'full_attention'"
            )


def _read_rope(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Rope base and scaling, from either spelling and with the defaults of transformers 5."""
    owner = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(owner, {})
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: {owner} is {rope!r}; it must be an object")
    rope = dict(rope)
    theta = _as_float(
        rope.pop("rope_theta", config.get("rope_theta", 10000.0)), "config.json: rope_theta"
    )
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"config.json: {owner}.partial_rotary_factor is "
            f"{config[owner]['partial_rotary_factor']!r}; jpaged supports only 1.0"
        )
    rope_type = rope.pop("rope_type", rope.get("type", "default"))
    rope.pop("type", None)
    if rope_type == "default":
        # Whatever else stands there has no effect on this type.
        return theta, None
    if rope_type != "llama3":
        raise ValueError(
            f"config.json: {owner} has rope_type {rope_type!r}; supported: 'default', 'llama3'"
        )
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    rope["original_max_position_embeddings"] = config.get(
        "original_max_position_embeddings", original
    )
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = {key: _as_float(rope.get(key), f"config.json: {owner}.{key}") for key in fields}
    for key, value in rope.items():
        if key not in fields:
            raise ValueError(
                f"config.json: {owner}.{key} is {value!r}; rope_type 'llama3' has no such key"
            )
    return theta, Llama3RopeScaling(
        factor=numbers["factor"],
        low_freq_factor=numbers["low_freq_factor"],
        high_freq_factor=numbers["high_freq_factor"],
        original_max_position_embeddings=int(numbers["original_max_position_embeddings"]),
    )


def _read_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"config.json: {key} is missing; a Llama-like model needs it")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INT:
        raise ValueError(
            f"config.json: {key} is {value!r}; it must be a whole number from 1 to {_MAX_INT}"
        )
    return value


def _as_float(value: Any, owner: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN and infinity, which Python reads in JSON, are in no range.
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{owner} is {value!r}; it must be a finite number above 0")
    return float(value)


def _read_bool(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} is {value!r}; it must be true or false")
    return value


def _read_ids(value: Any, owner: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_id or not 0 <= token_id <= _MAX_INT:
            raise ValueError(
                f"{owner} is {value!r}; it must be an id from 0 to {_MAX_INT} or a list of them"
            )
    return tuple(dict.fromkeys(ids))
