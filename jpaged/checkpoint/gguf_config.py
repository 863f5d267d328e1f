"""Metadata of a GGUF file -> the config.json that they stand for, and what its tensors are called.

A key of the architecture is either understood here or refused by name, and so is a value that asks
for something else than the family does. What the metadata do not say, such as the scale of Gemma's
scores, is as llama.cpp has it (src/llama-model.cpp); config.json then goes the way of every
checkpoint's (`hf_config`), so that both forms of a model mean the same.
"""

import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.checkpoint.checkpoint import EMBEDDING, LM_HEAD

ROPE_FACTORS = "rope_freqs.weight"

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Keys of every architecture. "finetuned" and the sizes of vocabularies change nothing.
_KEYS = frozenset({
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.causal",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scale_linear", "expert_count", "expert_used_count",
})  # fmt: skip
_WINDOW_KEYS = frozenset({
    "attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping",
})  # fmt: skip

# Those of which only one value is what the families compute.
_ONLY = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


@dataclass(frozen=True)
class GGUFArchitecture:
    """How an architecture of GGUF files corresponds to a family.

    Attributes:
        family: The family's name in `architectures` of config.json.
        model_type: What goes with it there.
        layer_names: The family's names of a layer's tensors, by those in the file.
        keys: Keys that it has beyond those of all.
        has_pairs: Rows of q and k are in the file such that those rotated together are neighbours.
        norms_have_one: Norms are in the file as what they scale by; the family's weights are one
            less.
    """

    family: str
    model_type: str
    layer_names: Mapping[str, str]
    keys: frozenset[str] = frozenset()
    has_pairs: bool = False
    norms_have_one: bool = False

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a tensor; one without is kept, to be refused by its own name."""
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{suffix}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in self.layer_names:
            return f"model.layers.{parts[1]}.{self.layer_names[parts[2]]}.{suffix}"
        return name


_ARCHITECTURES = {
    "llama": GGUFArchitecture("LlamaForCausalLM", "llama", _LAYER_NAMES, has_pairs=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", _LAYER_NAMES),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", _LAYER_NAMES | _QK_NORM_NAMES),
    "gemma2": GGUFArchitecture(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA_NAMES,
        keys=_WINDOW_KEYS | {"attn_logit_softcapping"},
        norms_have_one=True,
    ),
    "gemma3": GGUFArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _GEMMA_NAMES | _QK_NORM_NAMES,
        keys=_WINDOW_KEYS | {"rope.freq_base_swa"},
        norms_have_one=True,
    ),
}
# Of these sizes, the largest that there are, the scale of scores follows from the width and not
# from the heads; the files do not say it.
_LAYERS_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


def find_architecture(metadata: Mapping[str, Any]) -> GGUFArchitecture:
    """The architecture of a file.

    Raises:
        ValueError: Naming it, if it is not supported.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {reprlib.repr(name)}; supported in GGUF files: "
            + ", ".join(map(repr, _ARCHITECTURES))
        )
    return _ARCHITECTURES[name]


def read_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
) -> dict[str, Any]:
    """Builds config.json, without the ids of special tokens.

    Args:
        metadata: Of the file; its architecture is one that `find_architecture` finds.
        shapes: Of its tensors, by Hugging Face name.
        rope_factors: The tensor `ROPE_FACTORS`, where there is one.

    Raises:
        ValueError: Naming the key and its value.
    """
    architecture = find_architecture(metadata)
    name = metadata["general.architecture"]
    reader = _Reader(metadata, name)
    for key, value in metadata.items():
        own = key.removeprefix(f"{name}.")
        if own != key and own not in _KEYS | architecture.keys:
            raise ValueError(
                f"{key} is {reprlib.repr(value)}; jpaged does not know this key, so it may change "
                "the result. Use the model's Hugging Face checkpoint"
            )
        if own != key and own in _ONLY and value != _ONLY[own]:
            raise ValueError(
                f"{key} is {reprlib.repr(value)}; jpaged supports only {_ONLY[own]!r}. Use the "
                "model's Hugging Face checkpoint"
            )
    if metadata.get("split.count", 1) not in (0, 1):
        raise ValueError(
            f"split.count is {metadata['split.count']}; files in several parts are not supported. "
            "Join them with llama.cpp's llama-gguf-split --merge"
        )
    if EMBEDDING not in shapes:
        raise ValueError("tensor 'token_embd.weight' is missing. Use a complete file of this model")
    num_heads = reader.whole("attention.head_count")
    head_dim = reader.whole(
        "attention.key_length",
        reader.whole("rope.dimension_count", reader.whole("embedding_length") // num_heads),
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        if reader.get(key, head_dim) != head_dim:
            raise ValueError(
                f"{name}.{key} is {reader.get(key)}; it must equal the head size, which is "
                f"{head_dim}"
            )
    config = {
        "architectures": [architecture.family],
        "model_type": architecture.model_type,
        "hidden_size": reader.whole("embedding_length"),
        "intermediate_size": reader.whole("feed_forward_length"),
        "num_hidden_layers": reader.whole("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.whole("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": reader.whole("context_length"),
        "rope_theta": reader.number("rope.freq_base", None if name == "gemma3" else 10000.0),
        "rope_scaling": _read_rope_scaling(reader, rope_factors, head_dim),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": shapes[EMBEDDING][0],
        "tie_word_embeddings": LM_HEAD not in shapes,
        "dtype": "float32",
    }
    if name != "qwen2":  # which always has some
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
    if name == "llama":
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in shapes
    if name in _LAYERS_SCALED_BY_WIDTH:
        config |= _read_gemma(reader, config)
    return config


class _Reader:
    """The metadata of one architecture, by their keys without its name."""

    def __init__(self, metadata: Mapping[str, Any], name: str):
        self.name = name
        self._metadata = metadata

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is."""
        return self._metadata.get(f"{self.name}.{key}", default)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 up."""
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "a whole number from 1 up, the same for every layer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._require(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # NaN is in no range.
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self.error(key, "a finite number above 0")
        with np.errstate(over="ignore"):
            stored = np.float32(value)
        # The shortest decimal number that is stored so: it was made from that.
        return float(str(stored)) if stored == value else float(value)

    def error(self, key: str, wanted: str) -> ValueError:
        """Says what a value must be."""
        found = reprlib.repr(self.get(key))
        return ValueError(f"{self.name}.{key} is {found}; it must be {wanted}")

    def _require(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ValueError(
                f"{self.name}.{key} is missing; a model of architecture {self.name!r} needs it"
            )
        return value


def _read_rope_scaling(
    reader: _Reader, factors: np.ndarray | None, head_dim: int
) -> dict[str, Any] | None:
    """`rope_scaling` of config.json."""
    # The second is what the first was called once.
    scale_key = next(
        (key for key in ("rope.scaling.factor", "rope.scale_linear") if reader.get(key)), None
    )
    kind = reader.get("rope.scaling.type", "none" if scale_key is None else "linear")
    is_scaled = kind != "none" and scale_key is not None
    if factors is not None:
        if is_scaled or reader.name != "llama":
            raise ValueError(
                f"tensor {ROPE_FACTORS!r} is supported in llama models without other rope scaling "
                "only. Use the model's Hugging Face checkpoint"
            )
        if factors.shape != (head_dim // 2,) or not np.all(np.isfinite(factors) & (factors > 0)):
            raise ValueError(
                f"tensor {ROPE_FACTORS!r} must hold {head_dim // 2} numbers above 0, one for each "
                "pair of rotated dimensions. Fetch the file again"
            )
        # Each frequency is divided by its factor, which is what "longrope" means. They were
        # computed from Llama 3's own parameters, which the file does not keep.
        values = factors.astype(np.float64).tolist()
        return {
            "rope_type": "longrope",
            "short_factor": values,
            "long_factor": values,
            "attention_factor": 1.0,
        }
    kinds = ("none", "linear") if reader.name == "gemma3" else ("none", "linear", "yarn")
    if kind not in kinds:
        raise ValueError(
            f"{reader.name}.rope.scaling.type is {reprlib.repr(kind)}; supported: "
            f"{', '.join(map(repr, kinds))}. Use the model's Hugging Face checkpoint"
        )
    if not is_scaled or scale_key is None:
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": reader.number(scale_key)}
    if kind == "yarn":
        original = "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = reader.whole(
            original, reader.whole("context_length")
        )
        for name in ("beta_fast", "beta_slow"):
            if reader.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = reader.number(f"rope.scaling.yarn_{name}")
    return scaling


def _read_gemma(reader: _Reader, config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma has besides."""
    num_layers = config["num_hidden_layers"]
    scale_base = config["head_dim"]
    if num_layers == _LAYERS_SCALED_BY_WIDTH[reader.name]:
        scale_base = config["hidden_size"] // config["num_attention_heads"]
    is_gemma2 = reader.name == "gemma2"
    window = reader.get("attention.sliding_window", 4096 if is_gemma2 else None)
    if window == 0:
        window = None
    elif window is not None:
        window = reader.whole("attention.sliding_window", window)
    has_window = [False] * num_layers
    if window is not None:
        has_window = _read_pattern(reader, num_layers, 2 if is_gemma2 else 6)
    fields = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale_base,
        "sliding_window": window,
        "layer_types": [
            "sliding_attention" if has else "full_attention" for has in has_window
        ],
        "final_logit_softcapping": _read_softcap(
            reader, "final_logit_softcapping", 30.0 if is_gemma2 else 0.0
        ),
    }  # fmt: skip
    if is_gemma2:
        fields["attn_logit_softcapping"] = _read_softcap(reader, "attn_logit_softcapping", 50.0)
    else:
        fields["rope_local_base_freq"] = reader.number("rope.freq_base_swa", 10000.0)
    return fields


def _read_softcap(reader: _Reader, key: str, default: float) -> float | None:
    return reader.number(key, default) if reader.get(key, default) else None


def _read_pattern(reader: _Reader, num_layers: int, default: int) -> Sequence[bool]:
    """Which layers have a window: said for each, or all but every so manieth."""
    key = "attention.sliding_window_pattern"
    pattern = reader.get(key, default)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(has, bool) for has in pattern):
            raise reader.error(key, f"a number or a list of {num_layers} truth values")
        return pattern
    period = reader.whole(key, default)
    return [layer % period < period - 1 for layer in range(num_layers)]
