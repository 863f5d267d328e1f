"""Rotary position embeddings (https://arxiv.org/abs/2104.09864), in the half-split form."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.config import RopeConfig


def inverse_frequencies(
    head_dim: int, rope: RopeConfig, *, max_model_len: int = 0
) -> Float[np.ndarray, " F"]:
    """Angle per position of each pair of rotated dimensions, in float32.

    Longer contexts than the model was trained on are reached by smaller angles: all of them
    ("linear"), those of a larger base ("dynamic", NTK-aware), or the slow ones more than the fast
    ones ("yarn", https://arxiv.org/abs/2309.00071; "llama3", as published with Llama 3.1's
    reference code; "longrope", https://arxiv.org/abs/2402.13753).

    Args:
        head_dim: Width of a head.
        rope: What is rotated, and how fast.
        max_model_len: The longest request. "dynamic" and "longrope" depend on lengths; that of each
            request would change its cached keys and what others share of them, so they are chosen
            once (docs/decisions/020).
    """
    dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    original = rope.original_max_position_embeddings or 0
    theta = rope.theta
    if rope.rope_type == "dynamic" and max_model_len > original:
        stretch = rope.factor * max_model_len / original - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    wavelengths = np.power(np.float32(theta), exponents).astype(np.float32)
    inv_freq = (1 / wavelengths).astype(np.float32)
    match rope.rope_type:
        case "linear":
            return inv_freq / np.float32(rope.factor)
        case "llama3":
            return _stretch_like_llama3(inv_freq, rope, original)
        case "yarn":
            return _stretch_like_yarn(inv_freq, rope, original)
        case "longrope":
            factors = rope.long_factor if max_model_len > original else rope.short_factor
            return (1 / (np.array(factors, np.float32) * wavelengths)).astype(np.float32)
        case _:
            return inv_freq


def _stretch_like_llama3(
    inv_freq: Float[np.ndarray, " F"], rope: RopeConfig, original: int
) -> Float[np.ndarray, " F"]:
    """Keeps short wavelengths, divides the angles of long ones, and blends between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / rope.factor, inv_freq)
    is_medium = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(is_medium, smooth, scaled).astype(np.float32)


def _stretch_like_yarn(
    inv_freq: Float[np.ndarray, " F"], rope: RopeConfig, original: int
) -> Float[np.ndarray, " F"]:
    """Keeps what turns often enough within the original length, divides what hardly turns."""
    dim = 2 * len(inv_freq)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(len(inv_freq), dtype=np.float32) - low) / span, 0, 1)
    return (inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)).astype(np.float32)


def rotary_tables(
    positions: Int[Array, " T"], inv_freq: Float[np.ndarray, " F"], *, scale: float = 1.0
) -> tuple[Float[Array, "T F"], Float[Array, "T F"]]:
    """Cosine and sine of every position's angles, times `scale`, in float32.

    Angles stay in float32: in bfloat16, positions above 256 would already be rounded.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq)[None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def apply_rotary(
    x: Float[Array, "T N H"], cos: Float[Array, "T F"], sin: Float[Array, "T F"]
) -> Float[Array, "T N H"]:
    """Rotates the first `F` dimensions of each head against the next `F`; the rest stay."""
    size = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), [size, 2 * size], axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
