"""The oracle of the whole engine: recompute everything for every token, one request at a time.

A second implementation of every family in NumPy and float64, written from the papers and from
the checkpoint's own names. It has no cache, no blocks, no batch, no scheduler and no line in
common with jpaged, except for the random bits of a sampled token, which are defined to be
`jax.random`'s for (seed, position).
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.random import threefry_2x32

from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.jpaged.runner import sampling_oracle
from tests.oracle import NEAR_TIE


class Draw(NamedTuple):
    """One token that a distribution and random numbers choose.

    Attributes:
        token_id: The token.
        margin: How clear the choice is, in the unit of `tests.oracle.NEAR_TIE`: the distance of
            the two best logits, or of the two best in a race.
    """

    token_id: int
    margin: float


class Naive:
    """A model, by its config.json and its tensors as they stand in a checkpoint.

    Args:
        config: With every key that matters here.
        tensors: By their Hugging Face names.
        max_model_len: Longest request, for rotary embeddings that depend on it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, np.ndarray],
        max_model_len: int | None = None,
    ):
        self.config = config
        self.kind: str = config["model_type"]
        self.is_gemma = self.kind.startswith("gemma")
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self.max_model_len = max_model_len or config["max_position_embeddings"]

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits `[T, V]` of the token after each of `token_ids`."""
        config, tensors = self.config, self.tensors
        x = tensors["model.embed_tokens.weight"][list(token_ids)]
        if self.is_gemma:
            x = x * math.sqrt(config["hidden_size"])
        x = x * config.get("embedding_multiplier", 1.0)
        share = config.get("residual_multiplier", 1.0)
        before, after, mlp_before, mlp_after = _NORMS.get(self.kind, _LLAMA_NORMS)
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            out = self._attention(index, self._norm(before and f"{layer}.{before}", x))
            x = x + share * self._norm(after and f"{layer}.{after}", out)
            out = self._mlp(f"{layer}.mlp", self._norm(mlp_before and f"{layer}.{mlp_before}", x))
            x = x + share * self._norm(mlp_after and f"{layer}.{mlp_after}", out)
        head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        logits = self._norm("model.norm", x) @ tensors[f"{head}.weight"].T
        logits = logits / config.get("logits_scaling", 1.0)
        return _softcap(logits, config.get("final_logit_softcapping"))

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        if not name:
            return x
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        weight = self.tensors[f"{name}.weight"] + (1.0 if self.is_gemma else 0.0)
        return weight * x / np.sqrt(mean_square + self.config["rms_norm_eps"])

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        if f"{name}.gate_up_proj.weight" in self.tensors:
            gate, up = np.split(self._linear(f"{name}.gate_up_proj", x), 2, axis=-1)
        else:
            gate, up = (self._linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        if self.is_gemma:
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            gate = 0.5 * gate * (1 + np.tanh(inner))
        else:
            gate = gate / (1 + np.exp(-gate))
        return self._linear(f"{name}.down_proj", gate * up)

    def _attention(self, index: int, x: np.ndarray) -> np.ndarray:
        config, name = self.config, f"model.layers.{index}.self_attn"
        num_tokens, head_dim = len(x), config["head_dim"]
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        if f"{name}.qkv_proj.weight" in self.tensors:
            ends = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
            q, k, v = np.split(self._linear(f"{name}.qkv_proj", x), ends, axis=-1)
        else:
            q, k, v = (self._linear(f"{name}.{p}_proj", x) for p in "qkv")
        if self.kind == "olmo2":  # over all heads at once
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        q, k, v = (w.reshape(num_tokens, -1, head_dim) for w in (q, k, v))
        if self.kind in ("qwen3", "gemma3_text"):
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        window = self._window(index)
        q, k = self._rotate(q, window), self._rotate(k, window)
        scale = 1 / math.sqrt(config.get("query_pre_attn_scalar", head_dim))
        scale = config.get("attention_multiplier", scale)
        distance = np.subtract.outer(np.arange(num_tokens), np.arange(num_tokens))
        is_visible = (distance >= 0) & (distance < (window or num_tokens))
        heads = []
        for head in range(num_heads):
            group = head // (num_heads // num_kv_heads)
            scores = _softcap(
                scale * q[:, head] @ k[:, group].T, config.get("attn_logit_softcapping")
            )
            weights = softmax(np.where(is_visible, scores, -np.inf))
            heads.append(weights @ v[:, group])
        return self._linear(f"{name}.o_proj", np.concatenate(heads, axis=-1))

    def _window(self, index: int) -> int | None:
        """How far a layer's tokens see, themselves included."""
        window = self.config.get("sliding_window")
        match self.kind:
            case "gemma2":
                return window if index % 2 == 0 else None
            case "gemma3_text":
                return window if (index + 1) % self.config["sliding_window_pattern"] else None
            case "qwen2":
                is_on = self.config.get("use_sliding_window")
                return window if is_on and index >= self.config["max_window_layers"] else None
            case _:
                return window

    def _rotate(self, x: np.ndarray, window: int | None) -> np.ndarray:
        """Turns pairs of dimensions, complex numbers, by their angles; the others stay."""
        config = self.config
        size = int(x.shape[-1] * config.get("partial_rotary_factor", 1.0))
        scaling, theta = config["rope_scaling"] or {}, config["rope_theta"]
        if self.kind == "gemma3_text" and window is not None:
            scaling, theta = {}, config["rope_local_base_freq"]
        frequencies, length = self._frequencies(theta, size, scaling)
        turns = length * np.exp(1j * np.outer(np.arange(len(x)), frequencies))[:, None]
        if self.kind == "glm4":  # neighbours are pairs
            turned = (x[..., :size:2] + 1j * x[..., 1:size:2]) * turns
            pairs = np.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], size)
        else:
            turned = (x[..., : size // 2] + 1j * x[..., size // 2 : size]) * turns
            pairs = np.concatenate([turned.real, turned.imag], axis=-1)
        return np.concatenate([pairs, x[..., size:]], axis=-1)

    def _frequencies(
        self, theta: float, size: int, scaling: Mapping[str, Any]
    ) -> tuple[list[float], float]:
        """The angle per position of each pair, and how long a pair becomes."""
        config, pairs = self.config, range(size // 2)
        longest = config["max_position_embeddings"]
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "dynamic":
            ratio = max(self.max_model_len, longest) / longest
            theta *= (scaling["factor"] * ratio - scaling["factor"] + 1) ** (size / (size - 2))
        plain = [theta ** (-2 * pair / size) for pair in pairs]
        match kind:
            case "linear":
                return [frequency / scaling["factor"] for frequency in plain], 1.0
            case "llama3":
                return [llama3_frequency(frequency, scaling) for frequency in plain], 1.0
            case "yarn":
                mixed = [yarn_frequency(f, pair, plain, scaling) for pair, f in enumerate(plain)]
                return mixed, 0.1 * math.log(scaling["factor"]) + 1
            case "longrope":
                original = config["original_max_position_embeddings"]
                name = "long_factor" if self.max_model_len > original else "short_factor"
                length = math.sqrt(1 + math.log(longest / original) / math.log(original))
                return [f / by for f, by in zip(plain, scaling[name], strict=True)], length
            case _:
                return plain, 1.0


# In front of attention, behind it, in front of the MLP, behind it.
_LLAMA_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)  # fmt: skip
_NORMS = {
    "gemma2": _GEMMA_NORMS,
    "gemma3_text": _GEMMA_NORMS,
    "glm4": (
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    "olmo2": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
}  # fmt: skip


def _softcap(scores: np.ndarray, cap: float | None) -> np.ndarray:
    return scores if cap is None else cap * np.tanh(scores / cap)


def yarn_frequency(
    frequency: float, pair: int, plain: Sequence[float], scaling: Mapping[str, Any]
) -> float:
    """YaRN's: kept where it turns 32 times in the original length, divided where once at most.

    Between the pairs at which that is so, rounded outwards, it is blended in proportion.
    """
    original, size = scaling["original_max_position_embeddings"], 2 * len(plain)
    step = math.log(plain[0] / plain[1])  # by which a pair is slower than the one before
    first, last = (
        math.log(original * plain[0] / (turns * 2 * math.pi)) / step for turns in (32, 1)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
    share = min(max((pair - first) / ((last - first) or 0.001), 0), 1)
    return frequency * (1 - share) + frequency / scaling["factor"] * share


def llama3_frequency(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Llama 3.1's rescaling of one rotary frequency; unchanged if `scaling` is empty."""
    if not scaling:
        return frequency
    wavelength = 2 * math.pi / frequency
    turns = scaling["original_max_position_embeddings"] / wavelength
    if turns < scaling["low_freq_factor"]:
        return frequency / scaling["factor"]
    if turns > scaling["high_freq_factor"]:
        return frequency
    share = (turns - scaling["low_freq_factor"]) / (
        scaling["high_freq_factor"] - scaling["low_freq_factor"]
    )
    return (1 - share) * frequency / scaling["factor"] + share * frequency


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@functools.cache
def tiny_model(variant: str, max_model_len: int | None = None) -> Naive:
    """The oracle's own copy of a tiny model."""
    config, tensors = tiny_models.tiny_config(variant), tiny_models.tiny_weights(variant)
    return Naive(config, tensors, max_model_len)


@functools.cache
def exponentials(seed: int, position: int, first: int, count: int) -> np.ndarray:
    """Random numbers of a token's race, by their own numbers; float64."""
    key = jax.random.wrap_key_data(
        np.array([seed % 2**32, seed >> 32], np.uint32), impl="threefry2x32"
    )
    key = jax.random.key_data(jax.random.fold_in(key, position))
    numbers = np.arange(first, first + count, dtype=np.uint32)
    bits = threefry_2x32(key, np.concatenate([np.zeros_like(numbers), numbers]))
    return -np.log1p(-(np.asarray(bits[:count], np.float64) + 0.5) / 2**32)


def draw(logits: np.ndarray, params: SamplingParams, seed: int, position: int) -> Draw:
    """Chooses among all of `logits` `[V]`, edited already, by the definition of each parameter."""
    order = np.argsort(-logits, kind="stable")
    if params.is_greedy:
        return Draw(int(order[0]), float(logits[order[0]] - logits[order[1]]))
    probs = softmax(logits / params.temperature)
    if params.min_p > 0.0:
        probs = np.where(probs >= params.min_p * probs.max(), probs, 0.0)
    if params.top_k > 0:
        kth = probs[order[min(params.top_k, len(order)) - 1]]
        probs = np.where(probs >= kth, probs, 0.0)
    if params.top_p < 1.0:
        probs /= probs.sum()
        last = order[np.searchsorted(np.cumsum(probs[order]), params.top_p)]
        probs = np.where(probs >= probs[last], probs, 0.0)
    chunks = [probs[start : start + 256] for start in range(0, len(probs), 256)]
    masses = np.array([chunk.sum() for chunk in chunks])
    chunk, margin = _race(masses, exponentials(seed, position, 2**31, len(chunks)))
    first, inside = 256 * chunk, chunks[chunk]
    place, other = _race(inside, exponentials(seed, position, first, len(inside)))
    return Draw(first + place, min(margin, other))


def _race(weights: np.ndarray, numbers: np.ndarray) -> tuple[int, float]:
    """The winner, and how much likelier the second would have to be to win."""
    with np.errstate(divide="ignore"):
        scores = np.log(weights) - np.log(numbers)
    second, best = np.append(np.sort(scores), scores.max())[-3:-1] if len(scores) > 1 else (
        -np.inf, scores[0]
    )  # fmt: skip
    return int(np.argmax(scores)), float(best - second)


def assert_answer(
    model: Naive,
    prompt: Sequence[int],
    params: SamplingParams,
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    bad_words: Sequence[Sequence[int]] = (),
    end_token_ids: Iterable[int] = (),
    num_tokens_known: int = tiny_models.NUM_TOKENS_KNOWN,
) -> None:
    """Asserts that an answer is the one that naive decoding gives, up to near-ties.

    Each token must be what the oracle chooses after the prompt and the tokens before it; by
    induction the answer is then the oracle's own. After a near-tie, where both choices are right,
    the rest is held against what was chosen.

    Args:
        model: The oracle.
        prompt: Its ids.
        params: What was asked; a sampled answer needs a seed.
        token_ids: The answer.
        logprobs: If given, of each id, to agree within 1e-3.
        bad_words: Ids of each of `params.bad_words`.
        end_token_ids: What `params.min_tokens` excludes.
        num_tokens_known: Ids from here on cannot be chosen.
    """
    logits = model.logits([*prompt, *token_ids])[len(prompt) - 1 : -1, :num_tokens_known]
    for step, (token_id, row) in enumerate(zip(token_ids, logits, strict=True)):
        assert 0 <= token_id < num_tokens_known, f"step {step}: token {token_id} is not known"
        position = len(prompt) + step
        asked = sampling_oracle.Row(
            prompt_token_ids=prompt,
            output_token_ids=token_ids[:step],
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=bad_words,
            min_tokens=params.min_tokens,
            end_token_ids=tuple(end_token_ids),
        )
        edited = sampling_oracle.edited_logits(row, asked)
        expected, margin = draw(edited, params, (params.seed or 0) % 2**64, position)
        assert token_id == expected or margin < NEAR_TIE, (
            f"step {step}: token {token_id}, expected {expected} by {margin}; "
            f"prompt {list(prompt)}, tokens {list(token_ids)}"
        )
        if logprobs is not None:
            expected_logprob = float(np.log(softmax(row)[token_id]))
            assert abs(logprobs[step] - expected_logprob) <= 1e-3, (
                f"step {step}: log-probability {logprobs[step]}, expected {expected_logprob}"
            )
