"""How several models share a device's memory."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jpaged.checkpoint import open_checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import resolve_dtype
from jpaged.runner.memory_plan import device_memory_bytes
from server.messages import ModelSpec


def share_memory(specs: Sequence[ModelSpec]) -> Iterator[EngineConfig]:
    """Each model's limits; to be asked for when the one before has been loaded.

    A model alone has what it was given. Of several, each has its weights and its share of what all
    weights leave; a size of the KV cache that was given in bytes is that of all together.
    """
    if len(specs) == 1:
        yield specs[0].config
        return
    weights = [_weight_bytes(spec) for spec in specs]
    utilization = specs[0].config.memory_utilization
    left = device_memory_bytes() * utilization - sum(weights)
    if left <= 0:
        raise ValueError(
            f"the weights of {', '.join(spec.name for spec in specs)} take "
            f"{sum(weights) >> 20} MiB, more than memory_utilization {utilization} leaves them"
        )
    for spec, weight_bytes in zip(specs, weights, strict=True):
        asked = spec.config.kv_cache_memory_bytes
        if asked is not None:
            share = max(1, int(asked * spec.memory_share))
            yield replace(spec.config, kv_cache_memory_bytes=share)
        elif spec.config.num_blocks is not None:
            yield spec.config
        else:
            # On a CPU what is available shrinks as models are loaded; on a GPU it stays.
            budget = weight_bytes + left * spec.memory_share
            share = min(1.0, max(0.01, budget / device_memory_bytes()))
            yield replace(spec.config, memory_utilization=share)


def _weight_bytes(spec: ModelSpec) -> int:
    with open_checkpoint(spec.path, revision=spec.revision) as checkpoint:
        dtype = resolve_dtype(spec.config.dtype, checkpoint.model_config.dtype)
        return sum(math.prod(shape) for shape in checkpoint.shapes.values()) * dtype.itemsize
