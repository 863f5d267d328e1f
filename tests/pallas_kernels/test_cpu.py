"""The CPU's own kernel with windows and soft caps."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.cpu import paged_attention_cpu
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.shapes import ModelShape
from tests.pallas_kernels.attention_batches import decode_batches, mixed_batches

pytestmark = pytest.mark.one_jax

SHAPE = ModelShape(6, 2, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 17, 40, 10_000])
def test_windows_and_soft_caps(window, softcap, dtype):
    for batch in [*mixed_batches(shape=SHAPE), *decode_batches(shape=SHAPE)]:
        q, kv = batch.q.astype(dtype), batch.kv_cache_layer.astype(dtype)
        options = {"scale": 0.25, "window": window, "softcap": softcap}
        ours = paged_attention_cpu(q, kv, batch.inputs, **options)
        expected = paged_attention_reference(q, kv, batch.inputs, **options)
        atol = 2e-6 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(expected, np.float32), atol=atol
        )


def test_blocks_behind_a_window_are_not_read():
    window, block_size = 20, None
    for batch in [*mixed_batches(shape=SHAPE), *decode_batches(shape=SHAPE)]:
        kv = np.array(batch.kv_cache_layer)
        block_size = kv.shape[3]
        starts, lens, tables = (
            np.asarray(array)
            for array in (
                batch.inputs.query_start_loc, batch.inputs.seq_lens, batch.inputs.block_tables
            )
        )  # fmt: skip
        seen: set[int] = set()
        behind: set[int] = set()
        for row, length in enumerate(lens):
            first = length - (starts[row + 1] - starts[row])
            begin = max(0, first - window + 1) // block_size
            behind |= set(tables[row, :begin].tolist())
            seen |= set(tables[row, begin : -(-length // block_size)].tolist())
        kv[sorted(behind - seen)] = np.nan
        options = {"scale": 0.25, "window": window}
        ours = paged_attention_cpu(batch.q, jnp.asarray(kv), batch.inputs, **options)
        expected = paged_attention_reference(batch.q, batch.kv_cache_layer, batch.inputs, **options)
        np.testing.assert_allclose(ours, expected, atol=2e-6)
    assert block_size is not None
