"""What the kernels use of Pallas that is not public, or that differs between versions of JAX.

Both JAX 0.11.2 and 0.12 run the kernels from one source, for they use only what both have: stores
by assignment (`plgpu.store` came with 0.12), references turned by their `transpose` method
(`plgpu.transpose_ref` is deprecated in 0.12), and Triton loads without `cache_modifier` (which
0.11.2 cannot lower). CI runs both.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.core import WGMMAAccumulatorRef
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled_smem(shape: tuple[int, ...], dtype) -> Any:
    """Shared memory in the layout that tensor cores and the copies of whole blocks read.

    Rows are cut into pieces of at most 128 bytes, which are swizzled in groups of eight rows.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * itemsize)
    # Callable, whatever their types say.
    tiling, swizzling = cast(Any, plgpu.TilingTransform), cast(Any, plgpu.SwizzleTransform)
    transforms = (tiling((8, swizzle // itemsize)), swizzling(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def wgmma(accumulated, left, right_ref):
    """`accumulated + left @ right`, by one warpgroup, awaited; `left` is in registers."""

    def run(ref):
        plgpu.wgmma(ref, left, right_ref)

    return pl.run_state(run)(WGMMAAccumulatorRef.init(accumulated))


def interpreter() -> Any:
    """Runs Mosaic kernels on the CPU and looks for races; see `races`."""
    return plgpu.InterpretGPUParams(detect_races=True)


def races(run: Callable[[], Any]) -> bool:
    """Whether threads race in the Mosaic kernels that `run` interprets; prints or says where.

    JAX 0.12 raises at the first race, 0.11.2 takes a note of it.
    """
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        if "RACE DETECTED" not in str(error):
            raise
        return True
    return interpret_pallas_call.get_races().races_found
