"""How much memory the KV cache gets."""

import os

import jax
import jax.numpy as jnp

from jpaged.config import EngineConfig, ModelConfig
from jpaged.runner import kv_cache
from jpaged.runner.model_runner import ModelRunner

_DEFAULT_CPU_CACHE_BYTES = 1 << 30


def plan_num_blocks(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: jnp.dtype,
    *,
    weight_bytes: int,
    state_bytes: int,
    weights_are_loaded: bool,
    most_blocks: int,
    runner: ModelRunner,
) -> int:
    """How many KV blocks to allocate: weights + compiled workspace + pool = budget.

    Memory is planned from what the compiler says of the largest program, never probed by
    running something and looking at what is left.

    Args:
        config: What is asked for.
        model_config: The model's shape.
        dtype: Of the cache.
        weight_bytes: What the weights take.
        state_bytes: What the sampler keeps of each request.
        weights_are_loaded: Whether weights take their memory already.
        most_blocks: Of all requests together: more would never be used.
        runner: Compiles the largest program where it must be known what that needs.

    Raises:
        ValueError: If what is asked for, or one block, does not fit.
    """
    block_bytes = kv_cache.block_bytes(model_config, block_size=config.block_size, dtype=dtype)
    is_cpu = jax.default_backend() == "cpu"
    memory = device_memory_bytes()
    if is_cpu and weights_are_loaded:
        memory += weight_bytes  # they no longer count as available
    fixed_bytes = weight_bytes + state_bytes
    for name, asked in (
        ("num_blocks", (config.num_blocks or 0) * block_bytes),
        ("kv_cache_memory_bytes", config.kv_cache_memory_bytes or 0),
    ):
        if asked + fixed_bytes > memory:
            raise ValueError(
                f"EngineConfig.{name} is {getattr(config, name)}, which takes {asked >> 20} MiB; "
                f"of {memory >> 20} MiB, weights take {weight_bytes >> 20} MiB and the sampler's "
                f"state {state_bytes >> 20} MiB: lower it"
            )
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
        if num_blocks < 1:
            raise ValueError(
                f"EngineConfig.kv_cache_memory_bytes is {config.kv_cache_memory_bytes}; one block "
                f"takes {block_bytes}, and a request needs {len(model_config.kv_groups)} at least: "
                "raise it"
            )
        return num_blocks
    budget = int(memory * config.memory_utilization)
    wanted = most_blocks * block_bytes
    if is_cpu:
        # Memory is shared with everything else that runs there: take what is asked for, not all.
        wanted = min(wanted, _DEFAULT_CPU_CACHE_BYTES)
        if 2 * (fixed_bytes + wanted) <= budget:
            return max(1, wanted // block_bytes)  # no need to compile first to know that it fits
    largest = max(runner.buckets, key=lambda bucket: bucket.num_tokens)
    runner.plan_programs(num_blocks=1)
    runner.compile([largest])
    pool = budget - fixed_bytes - runner.workspace_bytes()
    num_blocks = (min(pool, wanted) if is_cpu else pool) // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"the model does not fit: {memory >> 20} MiB of memory times memory_utilization "
            f"{config.memory_utilization} is {budget >> 20} MiB, weights take "
            f"{weight_bytes >> 20} MiB, the sampler's state {state_bytes >> 20} MiB and steps "
            f"{runner.workspace_bytes() >> 20} MiB, which leaves less than one KV block "
            f"({block_bytes >> 10} KiB): lower max_num_batched_tokens or max_num_seqs, or raise "
            "memory_utilization"
        )
    return num_blocks


def device_memory_bytes() -> int:
    """Memory that programs may have: of a GPU all that JAX may take, of a CPU what is available."""
    return _available_host_bytes() if jax.default_backend() == "cpu" else _device_bytes()


def _available_host_bytes() -> int:
    """Memory that the system could give to this process."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ValueError(
            "this device does not tell its memory; give EngineConfig.kv_cache_memory_bytes"
        )
    return stats["bytes_limit"]
