import cmath

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import RopeConfig
from jpaged.layers.rotary import apply_rotary, inverse_frequencies, rotary_tables
from tests.invariance.naive import llama3_frequency

SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("scaling", [{}, SCALING, SCALING | {"factor": 32.0}])
def test_frequencies_follow_the_published_formula(head_dim, scaling):
    theta = 500000.0
    expected = [
        llama3_frequency(theta ** (-2 * pair / head_dim), scaling) for pair in range(head_dim // 2)
    ]
    kind = "llama3" if scaling else "default"
    ours = inverse_frequencies(head_dim, RopeConfig(theta=theta, rope_type=kind, **scaling))
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, rtol=2e-6)
    if scaling:
        plain = inverse_frequencies(head_dim, RopeConfig(theta=theta))
        ratio = plain / ours
        # Short wavelengths are kept, long ones divided by the factor, and some lie between.
        assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(scaling["factor"])
        assert ((ratio > 1.01) & (ratio < scaling["factor"] - 0.01)).any()


def test_a_head_is_turned_pair_by_pair_like_complex_numbers():
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 2, 8), np.float32)
    positions = np.array([0, 1, 1000], np.int32)
    inv_freq = inverse_frequencies(8, RopeConfig())
    out = np.asarray(apply_rotary(jnp.asarray(x), *rotary_tables(jnp.asarray(positions), inv_freq)))
    np.testing.assert_array_equal(out[0], x[0])
    for token, head, pair in np.ndindex(3, 2, 4):
        angle = float(positions[token]) * float(inv_freq[pair])
        turned = complex(x[token, head, pair], x[token, head, pair + 4]) * cmath.exp(1j * angle)
        assert out[token, head, pair] == pytest.approx(turned.real, abs=1e-3)
        assert out[token, head, pair + 4] == pytest.approx(turned.imag, abs=1e-3)


def test_bfloat16_heads_are_turned_by_angles_of_full_precision():
    x = np.random.default_rng(0).standard_normal((1, 1, 64), np.float32)
    tables = rotary_tables(jnp.array([4001], jnp.int32), inverse_frequencies(64, RopeConfig()))
    exact = np.asarray(apply_rotary(jnp.asarray(x), *tables))
    out = apply_rotary(jnp.asarray(x, jnp.bfloat16), *tables)
    assert out.dtype == jnp.bfloat16
    # Two roundings to 8 bits; an angle rounded to bfloat16 would be off by up to 16 radians.
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=0.04)
