"""Times what the host does per step, with a model that costs nothing.

    python -m benchmarks.host_overhead

Schedule, build and update as the engine runs them, on 256 decoding requests with contexts of
256 to 1,280 tokens; then the same with 16 to 4,096 requests waiting behind them, which must not
cost more; then with the seven KV groups of Gemma 3 27B. The goal is 1 ms per step on two CPU
cores. Prints one line of JSON, last.
"""

import argparse
import json
import random
import statistics
import time

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.scheduler import Scheduler
from jpaged.request import Request
from jpaged.runner.step_inputs import BucketTable, StepInputsBuilder, StepLayout
from jpaged.sampling_params import SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
NUM_RUNNING = 256


def measure(num_waiting: int, num_steps: int, windows: tuple[int | None, ...] = (None,)) -> float:
    """Median microseconds per step with that many requests waiting.

    Args:
        num_waiting: Requests behind those that run.
        num_steps: To take the median of.
        windows: Of each KV group.
    """
    rng = random.Random(0)
    manager = KVCacheManager(
        num_blocks=len(windows) * NUM_RUNNING * MAX_MODEL_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=NUM_RUNNING,
        max_model_len=MAX_MODEL_LEN,
        windows=windows,
    )
    buckets = BucketTable(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=2048)
    scheduler = Scheduler(
        manager,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
        token_buckets=buckets.mixed_tokens,
    )
    builder = StepInputsBuilder(
        layout=StepLayout(-(-MAX_MODEL_LEN // BLOCK_SIZE), windows=windows),
        buckets=buckets,
        block_size=BLOCK_SIZE,
        max_num_seqs=NUM_RUNNING,
        vocab_size=50_000,
    )
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for i in range(NUM_RUNNING + num_waiting):
        prompt = [rng.randrange(50_000) for _ in range(rng.randrange(256, 1280))]
        scheduler.add(
            Request(
                request_id=str(i), prompt_token_ids=prompt, params=params, max_tokens=MAX_MODEL_LEN
            )
        )

    def step() -> tuple[float, bool]:
        started = time.perf_counter()
        output = scheduler.schedule()
        builder.build(output.scheduled, manager.block_tables)
        built = time.perf_counter()
        token_ids = [rng.randrange(50_000) for _ in output.scheduled]
        logprobs = [None] * len(token_ids)
        called = time.perf_counter()
        scheduler.update(output, token_ids, logprobs)
        seconds = built - started + time.perf_counter() - called
        return seconds, output.num_tokens == len(output.scheduled) == NUM_RUNNING

    while not step()[1]:
        pass
    times = []
    for _ in range(num_steps):
        seconds, is_full_decode = step()
        assert is_full_decode, "a request ended or waited during the measurement"
        times.append(seconds)
    return statistics.median(times) * 1e6


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="steps per point")
    args = parser.parse_args()
    by_waiting = {n: round(measure(n, args.steps), 1) for n in (0, 16, 256, 1024, 4096)}
    seven_groups = round(measure(0, args.steps, (None, *(512,) * 6)), 1)
    print(
        json.dumps(
            {
                "running": NUM_RUNNING,
                "host_us_per_step": by_waiting[0],
                "host_us_per_step_by_waiting": by_waiting,
                "host_us_per_step_of_seven_kv_groups": seven_groups,
            }
        )
    )


if __name__ == "__main__":
    main()
