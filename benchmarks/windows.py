"""What it brings to give back KV blocks behind windows; needs no model and no weights.

    python -m benchmarks.windows

The scheduler runs requests to their ends over a cache of a given size, once with the KV groups of
a model (`jpaged.kv_groups`) and once with all layers in one group that keeps everything, as if no
layer had a window. Prints, as Markdown, how many requests ran at the same time on average while
others waited, and how many steps it took until all had ended.
"""

import argparse
from collections.abc import Sequence

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.scheduler import Scheduler
from jpaged.kv_groups import KVGroup, group_layers
from jpaged.request import Request

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_STEP_TOKENS = 2048


def every_sixth_full(num_layers: int, window: int) -> tuple[int | None, ...]:
    """As in Gemma 3."""
    return tuple(None if layer % 6 == 5 else window for layer in range(num_layers))


# Name: (window of each layer, bytes that a token takes in a layer in bfloat16, GiB of KV cache).
MODELS: dict[str, tuple[tuple[int | None, ...], int, float]] = {
    "Gemma 3 1B": (every_sixth_full(26, 512), 2 * 1 * 256 * 2, 4),
    "Gemma 3 27B": (every_sixth_full(62, 1024), 2 * 16 * 128 * 2, 20),
    "Gemma 2 9B": ((4096, None) * 21, 2 * 8 * 256 * 2, 20),
    "Mistral 7B v0.1": ((4096,) * 32, 2 * 8 * 128 * 2, 20),
}


def simulate(
    groups: Sequence[KVGroup], num_blocks: int, num_prompt_tokens: int, num_answer_tokens: int
) -> tuple[float, int]:
    """Mean number of requests that run while others wait, and steps until all have ended."""
    max_model_len = num_prompt_tokens + num_answer_tokens
    manager = KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=max_model_len,
        windows=[group.window for group in groups],
        max_step_tokens=MAX_STEP_TOKENS,
    )
    scheduler = Scheduler(
        manager,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        max_model_len=max_model_len,
    )
    for number in range(MAX_NUM_SEQS):
        prompt = [number] * num_prompt_tokens
        scheduler.add(
            Request(request_id=str(number), prompt_token_ids=prompt, max_tokens=num_answer_tokens)
        )
    num_running: list[int] = []
    num_steps = 0
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        if scheduler.num_waiting:
            num_running.append(scheduler.num_running)
        count = len(output.scheduled)
        scheduler.update(output, [0] * count, [None] * count)
        num_steps += 1
    return sum(num_running) / max(1, len(num_running)), num_steps


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", type=int, default=7168, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=1024, help="tokens of an answer")
    args = parser.parse_args()
    print(f"{MAX_NUM_SEQS} requests of {args.prompt} + {args.answer} tokens\n")
    print("| model | KV cache | groups x layers | running | without groups | steps | without |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for name, (windows, token_bytes, gib) in MODELS.items():
        groups = group_layers(windows)
        size = max(len(group.layers) for group in groups)
        block_bytes = BLOCK_SIZE * token_bytes
        num_blocks = int(gib * 2**30) // block_bytes
        running, steps = simulate(groups, num_blocks // size, args.prompt, args.answer)
        whole = [KVGroup(None, tuple(range(len(windows))))]
        plain = simulate(whole, num_blocks // len(windows), args.prompt, args.answer)
        print(
            f"| {name} | {gib} GiB | {len(groups)} x {size} | {running:.1f} | {plain[0]:.1f} | "
            f"{steps:,} | {plain[1]:,} |"
        )


if __name__ == "__main__":
    main()
