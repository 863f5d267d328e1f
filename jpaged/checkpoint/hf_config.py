"""config.json of a Hugging Face checkpoint -> `ModelConfig`.

A key of config.json is either understood here, or known not to change what the model computes,
or refused by name: a checkpoint that asks for something that jpaged does not do must not come
up and answer in a subtly wrong way. A key that is absent means what it means to transformers.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from jpaged.config import ModelConfig, RopeConfig
from jpaged.models.config_reader import ConfigReader, as_ids
from jpaged.models.family import Family
from jpaged.models.registry import FAMILIES

logger = logging.getLogger(__name__)

# What all families have; a family's own keys are in its file.
_UNDERSTOOD = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "rope_interleaved", "tie_word_embeddings", "hidden_act",
    "is_encoder_decoder", "is_causal", "quantization_config", "auto_map",
    "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "original_max_position_embeddings",
})  # fmt: skip

# Families that do not read these compute as if they were so.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "lm_head_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "max_window_layers": (),
    "layer_types": (),
    "use_mrope": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "blocksparse": (),
}

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

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


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
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"config.json: quantization_config with quant_method {method!r} is not supported. Use "
            "a float32, bfloat16 or float16 checkpoint, or a GGUF file"
        )
    family = _find_family(config)
    if config.get("auto_map"):
        # As transformers does unless told to trust it.
        logger.info("auto_map of config.json, code that came with the checkpoint, is not used")
    for key, value in config.items():
        if value is not None:
            _check_key(family, key, value, config)
    reader = ConfigReader({**family.defaults, **config})
    for key, allowed in (
        ("rope_interleaved", False), ("is_encoder_decoder", False), ("is_causal", True)
    ):  # fmt: skip
        if reader.get(key, allowed) is not allowed:
            raise ValueError(
                f"config.json: {key} is {reader.get(key)!r}; jpaged supports only {allowed!r}"
            )
    hidden_size, num_heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    if reader.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"config.json: hidden_size is {hidden_size} and num_attention_heads is {num_heads}; "
            "one must be a multiple of the other where there is no head_dim"
        )
    head_dim = reader.whole("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(
            f"config.json: head_dim is {head_dim}; rotary embeddings need it to be even"
        )
    num_kv_heads = num_heads
    if reader.get("num_key_value_heads") is not None:
        num_kv_heads = reader.whole("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads is {num_heads}; it must be a multiple of "
            f"num_key_value_heads, which is {num_kv_heads}"
        )
    fields = family.read(reader)
    rope = fields.get("rope") or reader.rope(
        head_dim=head_dim, partial="partial_rotary_factor" in family.keys
    )
    fields["rope"] = rope
    eps = reader.number("rms_norm_eps", 1e-6)
    if eps > 1:
        raise ValueError(f"config.json: rms_norm_eps is {eps}; it must be at most 1")
    if rope.theta < 1:
        raise ValueError(f"config.json: rope_theta is {rope.theta}; it must be at least 1")
    activation = fields.pop("activation", reader.get("hidden_act", "silu"))
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(
            f"config.json: hidden_act is {activation!r}; jpaged supports "
            + ", ".join(map(repr, _ACTIVATIONS))
        )
    dtype = str(reader.get("dtype", reader.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(f"config.json: dtype is {dtype!r}; it must be one of {_DTYPES}")
    defaults = {**family.defaults, **config}
    bos = as_ids(defaults.get("bos_token_id"), "config.json: bos_token_id")
    eos = generation_config.get("eos_token_id")
    if eos is not None:
        eos_token_ids = as_ids(eos, "generation_config.json: eos_token_id")
    else:
        eos_token_ids = as_ids(defaults.get("eos_token_id"), "config.json: eos_token_id")
    common = {
        "architecture": family.architecture,
        "vocab_size": reader.whole("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.whole("intermediate_size"),
        "num_layers": reader.whole("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _longest(family, reader, rope),
        "activation": _ACTIVATIONS[activation],
        "rms_norm_eps": eps,
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": eos_token_ids,
        "dtype": dtype,
    }
    return ModelConfig(**(common | fields))


def _check_key(family: Family, key: str, value: Any, config: Mapping[str, Any]) -> None:
    if key in _UNDERSTOOD | _HARMLESS | family.keys or _DROPOUT.fullmatch(key):
        return
    if key in _ONLY:
        allowed = _ONLY[key]
        # Without the switch, sizes of windows are there and mean nothing.
        is_off = key in ("sliding_window", "max_window_layers") and (
            config.get("use_sliding_window") is False
        )
        is_full = key == "layer_types" and (
            isinstance(value, list) and all(kind == "full_attention" for kind in value)
        )
        is_unused = key == "max_window_layers" and config.get("sliding_window") is None
        if value in allowed or is_off or is_full or is_unused:
            return
        raise ValueError(
            f"config.json: {key} is {value!r}; {family.architecture} has no such thing. If the "
            "model is used without it, say so in config.json"
        )
    raise ValueError(
        f"config.json: {key} is {value!r}; jpaged does not know this key, so it may change "
        "the result. Remove it from config.json if you know that it does not"
    )


def _longest(family: Family, reader: ConfigReader, rope: RopeConfig) -> int:
    """Positions, those that stretched embeddings add included, as vLLM counts them."""
    longest = reader.whole("max_position_embeddings")
    if longest * rope.factor >= 2**31:
        raise ValueError(
            f"config.json: max_position_embeddings is {longest} and the factor of its rotary "
            f"embeddings {rope.factor}; their product must be below 2**31"
        )
    if rope.rope_type == "yarn":
        return max(longest, int((rope.original_max_position_embeddings or 0) * rope.factor))
    # Gemma 3's number says it already.
    if rope.rope_type in ("linear", "dynamic") and family.model_type != "gemma3_text":
        return int(longest * rope.factor)
    return longest


def _find_family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    if not architectures:
        # transformers picks the class by model_type alone.
        architectures = [f.architecture for f in FAMILIES.values() if f.model_type == model_type]
    if architectures not in [[name] for name in FAMILIES]:
        raise ValueError(
            f"config.json: architectures is {config.get('architectures')!r} (model_type "
            f"{model_type!r}), which jpaged does not support; it supports one of "
            + ", ".join(FAMILIES)
        )
    family = FAMILIES[architectures[0]]
    if model_type is not None and model_type != family.model_type:
        raise ValueError(
            f"config.json: model_type is {model_type!r}; {family.architecture} goes with "
            f"{family.model_type!r}"
        )
    return family
