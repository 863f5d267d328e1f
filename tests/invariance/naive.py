"""The oracle of the whole engine: recompute everything for every token, one request at a time.

A second implementation of the Llama family in NumPy and float64, written from the papers and from
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


class Llama:
    """One request at a time, whole prompt in one pass, nothing kept."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]):
        self.config = config
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits `[T, V]` of the token after each of `token_ids`."""
        config, tensors = self.config, self.tensors
        x = tensors["model.embed_tokens.weight"][list(token_ids)]
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            x = x + self._attention(f"{layer}.self_attn", self._norm(f"{layer}.input_layernorm", x))
            h = self._norm(f"{layer}.post_attention_layernorm", x)
            gate = self._linear(f"{layer}.mlp.gate_proj", h)
            up = self._linear(f"{layer}.mlp.up_proj", h)
            x = x + self._linear(f"{layer}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        return self._norm("model.norm", x) @ tensors[f"{head}.weight"].T

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        weight = self.tensors[f"{name}.weight"]
        return weight * x / np.sqrt(mean_square + self.config["rms_norm_eps"])

    def _attention(self, name: str, x: np.ndarray) -> np.ndarray:
        config = self.config
        num_tokens, head_dim = len(x), config["head_dim"]
        q, k, v = (
            self._linear(f"{name}.{p}_proj", x).reshape(num_tokens, -1, head_dim) for p in "qkv"
        )
        q, k = self._rotate(q), self._rotate(k)
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        is_visible = np.tril(np.ones((num_tokens, num_tokens), bool))
        heads = []
        for head in range(config["num_attention_heads"]):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(head_dim)
            weights = softmax(np.where(is_visible, scores, -np.inf))
            heads.append(weights @ v[:, head // group])
        return self._linear(f"{name}.o_proj", np.concatenate(heads, axis=-1))

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """Turns each pair of dimensions (d, d + head_dim / 2), a complex number, by its angle."""
        half = x.shape[-1] // 2
        frequencies = [self._frequency(pair) for pair in range(half)]
        turns = np.exp(1j * np.outer(np.arange(len(x)), frequencies))[:, None]
        turned = (x[..., :half] + 1j * x[..., half:]) * turns
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def _frequency(self, pair: int) -> float:
        frequency = self.config["rope_theta"] ** (-2 * pair / self.config["head_dim"])
        return llama3_frequency(frequency, self.config["rope_scaling"] or {})


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
def tiny_llama(variant: str) -> Llama:
    """The oracle's own copy of a tiny model."""
    return Llama(tiny_models.tiny_config(variant), tiny_models.tiny_weights(variant))


@functools.cache
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
    model: Llama,
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
