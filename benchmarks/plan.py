"""Host time of planning one step's attention for the GPU kernels; needs no GPU.

    python -m benchmarks.plan

An 8B Llama's heads on a chip of 132 SMs; best and median microseconds of `fill_plan`.
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np

from pallas_kernels.paged_attention.plan import (
    NUM_TOKENS,
    Tiling,
    cut_arrays,
    fill_plan,
    plan_sizes,
)

TILING = Tiling(num_kv_heads=8, group=4, block_size=16, num_sms=132)


def time_plan(
    name: str, seq_lens: Sequence[int], counts: Sequence[int], *, group_size: int = 0
) -> None:
    """Times one step, in which each `group_size` rows share 2,048 tokens."""
    lens = np.array(seq_lens, np.int32)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    num_blocks = -(-int(lens.max()) // TILING.block_size)
    tables = 1 + np.arange(len(lens) * num_blocks, dtype=np.int32).reshape(len(lens), -1)
    if group_size:
        leaders = np.arange(len(lens)) // group_size * group_size
        num_shared = 2048 // TILING.block_size
        tables[:, :num_shared] = tables[leaders, :num_shared]
    sizes = plan_sizes(TILING, num_tokens=int(starts[-1]), num_rows=len(lens))
    arrays = cut_arrays(np.zeros(sizes.num_ints, np.int32), sizes)
    times = []
    for _ in range(300):
        started = time.perf_counter()
        fill_plan(arrays, TILING, query_start_loc=starts, seq_lens=lens, block_tables=tables)
        times.append((time.perf_counter() - started) * 1e6)
    used = [int(np.sum(items[:, NUM_TOKENS] > 0)) for items in arrays[:2]]
    print(
        f"{name:34} {min(times):5.0f} best {statistics.median(times):5.0f} median us; "
        f"{used[0]} decode and {used[1]} prefill items"
    )


def main() -> None:
    """Prints a line per kind of step."""
    random = np.random.default_rng(0)
    ones = [1] * 256
    time_plan("256 rows of 100 to 4,000 tokens", random.integers(100, 4000, 256).tolist(), ones)
    time_plan(
        "256 rows, 8 shared prefixes", random.integers(2100, 4700, 256).tolist(), ones,
        group_size=32,
    )  # fmt: skip
    time_plan("64 rows of 2,048", [2048] * 64, [1] * 64)
    time_plan("40 rows of 2,048, split", [2048] * 40, [1] * 40)
    time_plan("one of 32k and 63 of 512, split", [32768] + [512] * 63, [1] * 64)
    time_plan("2,048 tokens: 2 chunks, 62 rows", [4000, 600] + [2000] * 62, [1500, 486] + [1] * 62)


if __name__ == "__main__":
    main()
