"""Rotary position embeddings (https://arxiv.org/abs/2104.09864), in the half-split form."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.config import Llama3RopeScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Llama3RopeScaling | None = None
) -> Float[np.ndarray, " F"]:
    """Angle per position of each pair of dimensions, float32 `[head_dim / 2]`.

    Llama 3's scaling keeps short wavelengths, divides long ones by `factor` and blends between
    (as published with Llama 3.1's reference code).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    if scaling is None:
        return inv_freq
    wavelength = 2 * math.pi / inv_freq
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * inv_freq / scaling.factor + blend * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / scaling.factor, inv_freq)
    is_medium = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(is_medium, smooth, scaled).astype(np.float32)


def rotary_tables(
    positions: Int[Array, " T"], inv_freq: Float[np.ndarray, " F"]
) -> tuple[Float[Array, "T F"], Float[Array, "T F"]]:
    """Cosine and sine of every position's angles, in float32.

    Angles stay in float32: in bfloat16, positions above 256 would already be rounded.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq)[None]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(
    x: Float[Array, "T N H"], cos: Float[Array, "T F"], sin: Float[Array, "T F"]
) -> Float[Array, "T N H"]:
    """Rotates the first half of each head against the second."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
