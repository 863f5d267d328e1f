"""Which kernels run: one table per chip and shape family, with the measurement of each entry."""

import os
import re
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.inputs import Kernels
from pallas_kernels.paged_attention.plan import Tiling
from pallas_kernels.paged_attention.triton import UNITS

BACKENDS = ("auto", "xla", "triton", "mosaic")


class Shape(NamedTuple):
    """What a model's attention looks like on one device.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Numbers per head.
        block_size: Tokens per block.
        dtype: Of queries.
        cache_dtype: Of the cache; `None`: as `dtype`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    cache_dtype: str | None = None


class Entry(NamedTuple):
    """A line of the table: from this compute capability on, this backend.

    Attributes:
        min_capability: Of the chip.
        backend: Its name.
        evidence: The measurement that the choice rests on.
    """

    min_capability: tuple[int, int]
    backend: str
    evidence: str


# The first line that fits a chip and whose backend takes the shape. Where nothing was measured,
# Triton, which is the simpler: its compiler schedules, and one source serves every chip.
TABLE = (
    Entry((8, 0), "triton", "not measured"),
    Entry((9, 0), "mosaic", "not measured"),
)


class Choice(NamedTuple):
    """What was chosen.

    Attributes:
        kernels: For `AttentionPlan`; `None`: what XLA has for the platform.
        reason: One line for the log.
    """

    kernels: Kernels | None
    reason: str


def choose(
    shape: Shape,
    device: Any,
    *,
    backend: str = "auto",
    fixed_split: int = 0,
    share_prefixes: bool = True,
) -> Choice:
    """Chooses the kernels of one model on one device; made once, when an engine starts.

    Args:
        shape: Of the model's attention on the device.
        device: A `jax.Device`, where steps run. GPU kernels that are asked for on a CPU are
            interpreted.
        backend: A name from `BACKENDS`.
        fixed_split: As `Tiling.fixed_split`.
        share_prefixes: As `Tiling.share_prefixes`.

    Raises:
        ValueError: If `backend` is no name, or cannot run this shape or on this device, or the
            shape is none.
    """
    _check_shape(shape)
    if fixed_split < 0:
        raise ValueError(f"fixed_split is {fixed_split}; it must be 0 or a number of tokens")
    if backend not in BACKENDS:
        raise ValueError(
            f"attention_backend is {backend!r}; it must be one of {', '.join(BACKENDS)}"
        )
    is_gpu = device.platform == "gpu"
    if backend in ("triton", "mosaic") and device.platform not in ("gpu", "cpu"):
        raise ValueError(
            f"attention_backend is {backend!r}, which is for GPUs and interpreted on CPUs; "
            f"{device.device_kind} is neither: give 'auto' or 'xla'"
        )
    capability = _capability(device)
    if backend == "xla":
        return Choice(Kernels("xla"), f"attention: xla on {device.device_kind}, as asked")
    if backend == "auto" and not is_gpu:
        own = "the CPU's own kernel" if device.platform == "cpu" else "xla"
        return Choice(None, f"attention: {own} on {device.device_kind}")
    refused: list[str] = []
    for entry in TABLE:
        if backend not in ("auto", entry.backend):
            continue
        problem = _why_not_on(device, entry) if is_gpu else None
        if problem is None and is_gpu and not _has_large_smem(capability):
            problem = _why_not_in_small_smem(device, entry, shape)
        problem = problem or why_not(entry.backend, shape, interpret=not is_gpu)
        if problem is not None:
            refused.append(problem)
            continue
        tiling = make_tiling(
            shape,
            # The interpreters take their time for every item, empty ones too.
            num_sms=device.core_count if is_gpu else 1,
            capability=capability,
            fixed_split=fixed_split,
            share_prefixes=share_prefixes,
        )
        origin = entry.evidence if backend == "auto" else "as asked"
        if not is_gpu:
            origin += ", interpreted"
        reason = f"attention: {entry.backend} on {device.device_kind} ({origin})"
        if refused:
            reason += f"; {'; '.join(refused)}"
        kernels = Kernels(entry.backend, tiling, interpret=not is_gpu)
        if entry.backend == "mosaic":
            problem = why_no_mosaic_prefill(shape, capability if is_gpu else (9, 0))
            if problem is not None:
                kernels = replace(kernels, prefill_backend="triton")
                reason += f"; prefill: triton, since {problem}"
        return Choice(kernels, reason)
    if backend != "auto":
        raise ValueError(
            f"attention_backend is {backend!r}, which cannot run here: {'; '.join(refused)}; "
            "give 'auto' for what can"
        )
    return Choice(None, f"attention: xla on {device.device_kind}; {'; '.join(refused)}")


def _check_shape(shape: Shape) -> None:
    for name in ("num_heads", "num_kv_heads", "head_dim", "block_size"):
        value = getattr(shape, name)
        if value < 1:
            raise ValueError(f"Shape.{name} is {value}; it must be at least 1")
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"Shape.num_heads is {shape.num_heads}; it must be a multiple of num_kv_heads, "
            f"{shape.num_kv_heads}"
        )
    for name in ("dtype", "cache_dtype"):
        value = getattr(shape, name)
        try:
            jnp.dtype(value or shape.dtype)
        except TypeError:
            raise ValueError(f"Shape.{name} is {value!r}, no dtype; give e.g. 'bfloat16'") from None


def make_tiling(
    shape: Shape, *, num_sms: int, capability: tuple[int, int], **options: Any
) -> Tiling:
    """How work of a shape is cut on a chip; `options` are the fields of `Tiling` that users set."""
    row_bytes = shape.head_dim * jnp.dtype(shape.dtype).itemsize
    is_large = _has_large_smem(capability) and row_bytes <= 512
    return Tiling(
        num_kv_heads=shape.num_kv_heads,
        group=shape.num_heads // shape.num_kv_heads,
        block_size=shape.block_size,
        num_sms=num_sms,
        # What a prefill item keeps in registers and shared memory grows with rows and their size.
        tile_rows=128 if row_bytes <= 256 else 64,
        # The address of a tile comes out of the table, and each link of such a chain takes two of
        # Triton's stages: with 5, two tiles of keys and values are on their way, with 3 one.
        # Chips of 100 KiB per SM hold two thread blocks only with 3.
        num_stages=5 if is_large else 3,
        **options,
    )


def why_not(backend: str, shape: Shape, *, interpret: bool = False) -> str | None:
    """Why a backend cannot take a shape; `None` if it can.

    Args:
        backend: "triton" or "mosaic".
        shape: Of the model's attention on one device.
        interpret: Whether the kernels are interpreted, with products that are not the GPU's.
    """
    group = shape.num_heads // shape.num_kv_heads
    if group > 16:
        return f"{backend} takes up to 16 query heads per KV head, here are {group}"
    dtype = jnp.dtype(shape.dtype).name
    cache = jnp.dtype(shape.cache_dtype or shape.dtype).name
    if cache != dtype and not (backend == "triton" and cache in UNITS):
        return f"{backend} cannot read a cache of {cache}"
    if cache in UNITS and shape.head_dim % 2:
        return f"{backend} takes an even head_dim in a cache of {cache}, here is {shape.head_dim}"
    if backend == "mosaic":
        return _why_not_mosaic(shape, interpret=interpret)
    if shape.head_dim > 256:
        return f"{backend} takes head_dim up to 256, here is {shape.head_dim}"
    if dtype not in ("float16", "bfloat16", "float32"):
        return f"{backend} takes float16, bfloat16 and float32, here is {shape.dtype}"
    return None


def _why_not_mosaic(shape: Shape, *, interpret: bool) -> str | None:
    if shape.head_dim not in (64, 128, 256):
        return f"mosaic takes head_dim 64, 128 and 256, here is {shape.head_dim}"
    if shape.block_size not in (16, 32, 64, 128):
        return f"mosaic takes blocks of 16, 32, 64 and 128 tokens, here are {shape.block_size}"
    dtypes = ("float16", "bfloat16", "float32") if interpret else ("float16", "bfloat16")
    if jnp.dtype(shape.dtype).name not in dtypes:
        return f"mosaic takes {' and '.join(dtypes)}, here is {shape.dtype}"
    # XLA's threads run the interpreter's, of which three wait for each other.
    if interpret and max(os.cpu_count() or 1, len(jax.devices("cpu"))) < 4:
        return (
            "mosaic's interpreter needs 4 threads of XLA, which has one per CPU or per CPU device "
            "of JAX: set JAX_NUM_CPU_DEVICES=4"
        )
    return None


def why_no_mosaic_prefill(shape: Shape, capability: tuple[int, int]) -> str | None:
    """Why the prefill kernel of Mosaic is not for this chip and shape; `None` if it is."""
    if capability != (9, 0):
        return "mosaic's needs the wgmma of compute capability 9.0"
    if shape.head_dim > 128:
        return f"mosaic's spills registers with head_dim {shape.head_dim}"
    return None


def _capability(device: Any) -> tuple[int, int]:
    """Of an NVIDIA GPU; (0, 0) for what else there is."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _has_large_smem(capability: tuple[int, int]) -> bool:
    """Whether a thread block may have 160 KiB of shared memory or more; others have 99."""
    return capability in ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


def _why_not_on(device: Any, entry: Entry) -> str | None:
    capability = _capability(device)
    if capability >= entry.min_capability:
        return None
    return (
        f"{entry.backend} needs compute capability {_dotted(entry.min_capability)}, "
        f"{device.device_kind} has {_dotted(capability) if capability > (0, 0) else 'none'}"
    )


def _why_not_in_small_smem(device: Any, entry: Entry, shape: Shape) -> str | None:
    row_bytes = shape.head_dim * jnp.dtype(shape.dtype).itemsize
    if entry.backend != "mosaic" and row_bytes <= 512:
        return None
    return (
        f"{entry.backend} needs more than 99 KiB of shared memory per thread block for "
        f"{shape.dtype} and head_dim {shape.head_dim}, {device.device_kind} has no more"
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
