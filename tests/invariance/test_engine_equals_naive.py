"""The contract of the whole system: an answer does not depend on how it came about.

Every answer is held against naive decoding (`tests.invariance.naive`), whatever the batch, its
order, block size, budget, buckets, prefix cache, preemption, and what becomes of neighbours.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import (
    SMALL_POOL,
    Job,
    add,
    add_job,
    answer,
    assert_naive,
    finish,
    shared_engine,
    small_pool,
)

ANSWER_LENGTH = 20


# Sequences that greedy and sampled answers would hold otherwise; set so that bans really bite.
BAD_WORDS = ((7,), (9, 10), *((first, second) for first in range(0, 256, 2) for second in (1, 3)))


def params(kind: int, **changes) -> SamplingParams:
    """Greedy and sampled requests in turn, with and without edits, each with log-probabilities."""
    asked = (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1000 + kind},
        {"temperature": 1.5, "top_k": 12, "seed": 2**63 + kind},
        {"temperature": 0.9, "top_p": 0.8, "seed": -2 - kind},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.6, "min_p": 0.05,
         "repetition_penalty": 0.8, "seed": kind},
        {"temperature": 1.2, "allowed_token_ids": [*range(0, 200, 2)], "logit_bias": {4: 3, 6: -5},
         "frequency_penalty": 2.0, "seed": kind},
        {"temperature": 0.0, "bad_words": ["words"], "min_tokens": 10},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "presence_penalty": -1.5,
         "bad_words": ["words"], "min_tokens": ANSWER_LENGTH, "seed": kind},
    )[kind % 9]  # fmt: skip
    asked = {"max_tokens": ANSWER_LENGTH, "ignore_eos": True, "logprobs": 0} | asked | changes
    asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
    if asked["temperature"] == 0.0:
        asked["n"] = 1
    return SamplingParams(**asked)


def make_job(prompt: list[int], kind: int, **changes) -> Job:
    """What `params` says, with the ids of the bad words it names."""
    asked = params(kind, **changes)
    return Job(prompt, asked, BAD_WORDS if asked.bad_words else ())


def make_jobs() -> list[Job]:
    """Prompts around the borders of blocks, and some that share what they begin with."""
    random = np.random.default_rng(0)
    lengths = (1, 15, 16, 17, 31, 33, 64, 65)
    prompts = [random.integers(0, 256, length).tolist() for length in lengths]
    shared = random.integers(0, 256, 40).tolist()
    prompts += [shared, shared[:32], shared + [1, 2, 3], shared, shared[:39] + [9]]
    return [make_job(prompt, kind) for kind, prompt in enumerate(prompts)]


JOBS = make_jobs()

ARRANGEMENTS = {
    "one call": {},
    "without prefix cache": {"enable_prefix_caching": False},
    "blocks of 8": {"block_size": 8, "num_blocks": 192},
    "blocks of 32": {"block_size": 32, "num_blocks": 48},
    "16 tokens a step": {"max_num_batched_tokens": 16},
    "33 tokens a step": {"max_num_batched_tokens": 33},
    "GPU kernels, interpreted": {"attention_backend": "triton"},
    "attention by XLA": {"attention_backend": "xla"},
    "7 tokens of a prompt a step": {"long_prefill_token_threshold": 7},
    "one request at a time": {"max_num_seqs": 1},
    "other buckets": {"decode_buckets": (1, 3), "mixed_buckets": (9, 40)},
    "by priority": {"scheduling_policy": "priority"},
    "small pool": SMALL_POOL,
    "small pool without prefix cache": SMALL_POOL | {"enable_prefix_caching": False},
}


OPTIMIZED = ("one call", "small pool", "attention by XLA")


@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param(name, marks=pytest.mark.optimized if name in OPTIMIZED else ())
        for name in ARRANGEMENTS
    ],
)
def test_answers_are_naive_in_every_arrangement(arrangement, tiny_model):
    options = ARRANGEMENTS[arrangement]
    engine = shared_engine(tiny_model("gqa"), **options)
    num_preemptions = engine.scheduler.num_preemptions
    num_hits = engine.kv_cache_manager.prefix_cache_hits
    requests = answer(engine, JOBS)
    assert_naive(requests)
    assert {request.num_output_tokens for request in requests} == {ANSWER_LENGTH}
    # The arrangement does what its name says.
    is_small = "num_blocks" in options and options["num_blocks"] == SMALL_POOL["num_blocks"]
    assert (engine.scheduler.num_preemptions > num_preemptions) == is_small
    has_cache = options.get("enable_prefix_caching", True)
    assert (engine.kv_cache_manager.prefix_cache_hits > num_hits) == has_cache


@pytest.mark.parametrize("variant", ["biases", "llama3-rope", "padded-vocab", "tied"])
def test_answers_of_other_models_are_naive(variant, tiny_model):
    engine = shared_engine(tiny_model(variant))
    assert_naive(answer(engine, JOBS), variant)


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_answers_of_gpu_kernels_are_naive(backend, tiny_model):
    """What a GPU runs, interpreted: prompts in chunks, a shared prefix, a dozen steps.

    Few, since Mosaic's interpreter takes seconds for a step. All arrangements above are Triton's.
    """
    model = tiny_model("heads-of-64")
    engine = shared_engine(
        model,
        attention_backend=backend,
        max_num_seqs=2,
        max_num_batched_tokens=24,
        decode_buckets=(2,),
        mixed_buckets=(24,),
    )
    random = np.random.default_rng(0)
    prompt = random.integers(0, 256, 37).tolist()
    jobs = [make_job(prompt[:length], kind, max_tokens=11) for kind, length in enumerate((37, 20))]
    requests = add(engine, jobs)
    num_steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        num_steps += 1
    assert_naive(requests, "heads-of-64")
    assert num_steps >= 12


def test_answers_do_not_depend_on_order_or_company(tiny_model):
    engine = shared_engine(tiny_model("gqa"))
    expected = [request.output_token_ids for request in answer(engine, JOBS)]
    in_reverse = answer(engine, JOBS[::-1])[::-1]
    engine.reset_prefix_cache()
    alone = [answer(engine, [job])[0] for job in JOBS]
    for requests in (in_reverse, alone):
        assert_naive(requests)
        assert [request.output_token_ids for request in requests] == expected


def test_answers_do_not_depend_on_when_requests_arrive(tiny_model):
    engine = shared_engine(tiny_model("gqa"))
    requests = []
    for index, job in enumerate(JOBS):
        requests.append(add_job(engine, str(index), job))
        for _ in range(index % 4):
            engine.step()
            engine.scheduler.check()
    finish(engine)
    assert_naive(requests)


def test_answers_do_not_change_when_neighbours_are_aborted(tiny_model):
    engine = shared_engine(tiny_model("gqa"), **SMALL_POOL)
    requests = add(engine, JOBS)
    for step in itertools.count():
        if not engine.has_unfinished_requests:
            break
        if step % 3 == 2 and step // 3 < 6:
            engine.abort(requests[2 * (step // 3)].request_id)
        engine.step()
        engine.scheduler.check()
    lengths = [request.num_output_tokens for request in requests]
    assert min(lengths) < ANSWER_LENGTH == max(lengths)
    assert_naive(requests)


@pytest.mark.parametrize("variant", ["gqa", "gemma3", "mistral-window"])
@pytest.mark.parametrize("is_small", [False, True], ids=["roomy pool", "small pool"])
def test_what_nobody_has_written_is_never_read(is_small, variant, tiny_model):
    """Every slot is NaN at first, those of block 0 too; one of them in any sum would spread."""
    options = small_pool(tiny_model(variant)) if is_small else {}
    engine = shared_engine(tiny_model(variant), **options)
    runner = engine.runner
    runner.kv_cache = tuple(jnp.full_like(layer, jnp.nan) for layer in runner.kv_cache)
    try:
        assert_naive(answer(engine, JOBS), variant, max_model_len=engine.max_model_len)
    finally:
        runner.allocate(engine.num_blocks)


def test_weights_that_reach_nan_slots_would_be_noticed(tiny_model):
    """The test above can fail: NaN in a block that a request does read changes its answer."""
    engine = shared_engine(tiny_model("gqa"))
    [request] = add(engine, [Job([5] * 20, params(0))])
    engine.step()
    runner = engine.runner
    runner.kv_cache = tuple(jnp.full_like(layer, jnp.nan) for layer in runner.kv_cache)
    try:
        finish(engine)
        with pytest.raises(AssertionError):
            assert_naive([request])
    finally:
        runner.allocate(engine.num_blocks)


@pytest.mark.parametrize(
    ("seed", "variant"),
    [(0, "gqa"), (1, "gqa"), (2, "gqa"), (3, "gemma3"), (4, "mistral-window"), (5, "gemma2")],
)
def test_random_traffic_gives_naive_answers(seed, variant, tiny_model):
    """Arrivals, aborts and cache resets between steps of a pool that is too small for all."""
    engine = shared_engine(tiny_model(variant), **small_pool(tiny_model(variant)))
    random = np.random.default_rng(seed)
    stems = [random.integers(0, 256, 50).tolist() for _ in range(3)]
    requests = []
    while len(requests) < 60 or engine.has_unfinished_requests:
        action = random.random()
        if action < 0.35 and len(requests) < 60:
            stem = stems[int(random.integers(3))][: int(random.integers(0, 51))]
            prompt = stem + random.integers(0, 256, int(random.integers(1, 30))).tolist()
            max_tokens, n = int(random.integers(1, 50)), int(random.choice([1, 1, 2, 4]))
            job = make_job(prompt, len(requests), max_tokens=max_tokens, n=n)
            request = add_job(engine, f"{seed}-{len(requests)}", job)
            requests += [request, *request.forks]
        elif action < 0.40 and requests:
            engine.abort(requests[int(random.integers(len(requests)))].request_id)
        elif action < 0.42:
            engine.reset_prefix_cache()
        else:
            engine.step()
        engine.scheduler.check()
    assert engine.kv_cache_manager.pool.num_blocks_in_use == 0
    assert sum(request.num_preemptions for request in requests) > 0
    assert_naive(requests, variant, max_model_len=engine.max_model_len)


@pytest.mark.parametrize("arrangement", ["one call", "small pool", "without prefix cache"])
def test_answer_of_a_group_is_the_answer_to_its_seed_alone(arrangement, tiny_model):
    """Child i of n is the request with seed + i, in a crowd, preempted, cached or not."""
    options = ARRANGEMENTS[arrangement]
    engine = shared_engine(tiny_model("gqa"), **options)
    prompt = np.random.default_rng(4).integers(0, 256, 37).tolist()
    for kind in (1, 5, 6, 8):
        job = make_job(prompt, kind, n=4)
        [request] = answer(engine, [job])
        [*_, beside] = answer(engine, [make_job(prompt[::-1], 3), make_job(prompt, 2), job])
        for index, (entry, other) in enumerate(
            zip([request, *request.forks], [beside, *beside.forks], strict=True)
        ):
            seed = (job.params.seed + index) % 2**64
            [alone] = answer(engine, [make_job(prompt, kind, seed=seed)])
            assert entry.output_token_ids == alone.output_token_ids == other.output_token_ids
        assert_naive([request, *request.forks])
