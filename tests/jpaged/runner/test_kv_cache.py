"""Blocks that leave the pool and come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.runner.kv_cache import swap_in, swap_out


@pytest.mark.optimized
def test_blocks_go_to_the_host_and_come_back_elsewhere_in_place():
    random = np.random.default_rng(0)
    before = [random.standard_normal((9, 2, 2, 4, 8), np.float32) for _ in range(3)]
    cache = tuple(map(jnp.asarray, before))
    host, device = (
        jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        for kind in ("pinned_host", "device")
    )
    ids = jnp.array([5, 2, 7, 0])  # 0: padding
    staged = jax.jit(swap_out, out_shardings=host)(cache, ids)
    assert staged.shape == (4, 3, 2, 2, 4, 8) and staged.sharding.memory_kind == "pinned_host"
    back = jax.device_put(staged, device)
    program = jax.jit(swap_in, donate_argnums=0).lower(cache, ids, back).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == sum(layer.nbytes for layer in before)
    cache = program(cache, jnp.array([1, 8, 3, 0]), back)
    for old, new in zip(before, cache, strict=True):
        expected = old.copy()
        expected[[1, 8, 3]] = old[[5, 2, 7]]
        np.testing.assert_array_equal(new, expected)
