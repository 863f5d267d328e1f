"""The line that says every 10 s how the engines are doing; its words are vLLM's."""

import asyncio
import logging

from server.engine_client import EngineClient
from server.metrics import Metrics

logger = logging.getLogger("server.stats")


async def log_stats(client: EngineClient, metrics: Metrics, interval_s: float) -> None:
    """Logs a line for each model and interval in which something happened; runs for ever."""

    def count(index: int) -> tuple[float, float, int, int]:
        stats = client.states[index].stats
        return *metrics.token_counts(index), stats.cache_queries, stats.cache_hits

    before = [count(index) for index in range(len(client.states))]
    while True:
        await asyncio.sleep(interval_s)
        for index, state in enumerate(client.states):
            stats = state.stats
            now = count(index)
            computed, generated, num_queries, num_hits = (
                new - old for new, old in zip(now, before[index], strict=True)
            )
            before[index] = now
            hit_rate = num_hits / num_queries if num_queries else 0.0
            num_blocks = stats.blocks_in_use + stats.blocks_free
            is_idle = not generated and not stats.num_running
            logger.log(
                logging.DEBUG if is_idle else logging.INFO,
                "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: "
                "%.1f tokens/s, Running: %d reqs, Waiting: %d reqs, GPU KV cache usage: %.1f%%, "
                "Prefix cache hit rate: %.1f%%",
                index,
                computed / interval_s,
                generated / interval_s,
                stats.num_running,
                stats.num_waiting,
                100 * stats.blocks_in_use / max(1, num_blocks),
                100 * hit_rate,
            )
