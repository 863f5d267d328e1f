"""Engines over tiny models that tests share, since what costs time is compiling their programs.

All of them have the limits below unless a test asks otherwise, so that most engines run the same
few programs: one for decode steps, one for mixed steps.
"""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jpaged.checkpoint import open_checkpoint
from jpaged.config import EngineConfig
from jpaged.core.kv_cache_manager import most_blocks
from jpaged.engine import Engine
from jpaged.request import FinishReason, Request
from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.invariance import naive

LIMITS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "decode_buckets": (8,),
    "mixed_buckets": (64,),
    "num_blocks": 96,
    "max_model_len": 400,
}
# A pool that a few requests fill: they preempt each other.
SMALL_POOL: dict[str, Any] = {"num_blocks": 14, "max_model_len": 200}


def small_pool(directory: Path) -> dict[str, Any]:
    """`SMALL_POOL` for a model of several KV groups: hardly more blocks than one request needs."""
    max_model_len = SMALL_POOL["max_model_len"]
    with open_checkpoint(directory) as checkpoint:
        config = dataclasses.replace(checkpoint.model_config, max_model_len=max_model_len)
    needed = most_blocks(
        max_model_len,
        [group.window for group in config.kv_groups],
        block_size=16,
        max_step_tokens=LIMITS["max_num_batched_tokens"],
    )
    return SMALL_POOL | {"num_blocks": needed + 1}


class Job(NamedTuple):
    """What one caller asks."""

    prompt: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()


def open_engine(directory: Path, **options: Any) -> Engine:
    """A new engine over a tiny model."""
    with open_checkpoint(directory) as checkpoint:
        return Engine.from_checkpoint(
            checkpoint,
            EngineConfig(**LIMITS | options),
            num_tokens_known=tiny_models.NUM_TOKENS_KNOWN,
        )


@functools.cache
def _open_once(directory: Path, options: tuple[tuple[str, Any], ...]) -> Engine:
    return open_engine(directory, **dict(options))


def shared_engine(directory: Path, **options: Any) -> Engine:
    """The engine of these options, idle and without cached prefixes."""
    engine = _open_once(directory, tuple(sorted(options.items())))
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)  # of a test that failed
    engine.reset_prefix_cache()
    return engine


def add_job(engine: Engine, request_id: str, job: Job) -> Request:
    """Queues one job."""
    return engine.add_request(request_id, job.prompt, job.params, bad_words=job.bad_words)


def add(engine: Engine, jobs: Iterable[Job], name: str = "job") -> list[Request]:
    """Queues jobs in their order."""
    return [add_job(engine, f"{name} {index}", job) for index, job in enumerate(jobs)]


def finish(engine: Engine) -> None:
    """Steps until nothing is left, with every invariant checked between the steps."""
    while engine.has_unfinished_requests:
        engine.step()
        engine.scheduler.check()
    assert engine.kv_cache_manager.pool.num_blocks_in_use == 0


def answer(engine: Engine, jobs: Iterable[Job]) -> list[Request]:
    """All jobs at once."""
    requests = add(engine, jobs)
    finish(engine)
    return requests


def assert_naive(
    requests: Iterable[Request], variant: str = "gqa", *, max_model_len: int | None = None
) -> None:
    """Asserts that each finished answer, whole or cut short, is the naive one."""
    for request in requests:
        assert request.finish_reason is not FinishReason.ERROR, request.stop_reason
        naive.assert_answer(
            naive.tiny_model(variant, max_model_len),
            request.prompt_token_ids,
            dataclasses.replace(request.params, seed=request.seed),
            request.output_token_ids,
            request.token_logprobs if request.params.logprobs is not None else None,
            bad_words=request.bad_words,
            end_token_ids=request.end_token_ids,
        )
