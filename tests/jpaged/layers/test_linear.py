import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpaged.layers.linear import Linear, matmul
from jpaged.layers.norm import RMSNorm


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_product_is_rows_times_the_transposed_weight(num_rows, dtype, tolerance):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((num_rows, 48)), dtype)
    w = jnp.asarray(random.standard_normal((20, 48)) / 7, dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    y = matmul(x, w)
    assert y.dtype == x.dtype and y.shape == (num_rows, 20)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_comes_out_the_same_alone_and_among_others(dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((8, 48)), dtype)
    w = jnp.asarray(random.standard_normal((20, 48)), dtype)
    together = np.asarray(matmul(x, w), np.float64)
    alone = np.concatenate([np.asarray(matmul(x[i : i + 1], w), np.float64) for i in range(8)])
    # Only rounding may differ: the order of a sum, and for bfloat16 the last of 8 bits.
    tolerance = 1e-5 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(together, alone, rtol=tolerance, atol=tolerance)


def test_several_output_axes_are_one_product_and_the_bias_has_their_shape():
    random = np.random.default_rng(0)
    spec = PartitionSpec("tensor", None, None)
    linear = Linear((2, 3), 5, spec=spec, bias=True, dtype=jnp.dtype("float32"))
    w, b = random.standard_normal((2, 3, 5), np.float32), random.standard_normal((2, 3), np.float32)
    linear.weight[...], linear.bias[...] = w, b
    x = random.standard_normal((4, 5), np.float32)
    expected = np.einsum("td,abd->tab", x, w) + b
    np.testing.assert_allclose(linear(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_is_taken_in_float32_whatever_the_dtype(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 64)) * 300, dtype)
    norm = RMSNorm(64, eps=1e-5, dtype=jnp.dtype(dtype))
    norm.weight[...] = jnp.full((64,), 2.0, dtype)
    y = norm(x)
    assert y.dtype == x.dtype
    exact = np.asarray(x, np.float64)
    exact = 2 * exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-5)
    rounding = 1e-6 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=rounding)
