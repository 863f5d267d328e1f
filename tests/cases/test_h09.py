import dataclasses

import numpy as np

from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import Job, add_job, answer, assert_naive, finish, shared_engine

SEEDED = SamplingParams(temperature=0.9, seed=42, max_tokens=32, ignore_eos=True, logprobs=0)
UNSEEDED = dataclasses.replace(SEEDED, seed=None, logprobs=None)


def neighbours(count: int, max_tokens: int = 32) -> list[Job]:
    """Requests without a seed, of other prompts."""
    random = np.random.default_rng(count)
    params = dataclasses.replace(UNSEEDED, max_tokens=max_tokens)
    return [Job(random.integers(0, 256, 5 + i).tolist(), params) for i in range(count)]


def test_h09_a_seed_holds_whatever_the_neighbours_do(tiny_model):
    """H-09: alone, among unseeded neighbours in any row, twice in a batch, after 100 others."""
    engine = shared_engine(tiny_model("gqa"))
    job = Job(np.random.default_rng(9).integers(0, 256, 20).tolist(), SEEDED)
    [alone] = answer(engine, [job])
    assert_naive([alone])
    others = neighbours(7)
    batches = [
        [job, *neighbours(1)],
        [job, *others],
        [*others[:3], job, *others[3:]],
        [*others, job],
        [job, *others[:6], job],
        [*neighbours(100, max_tokens=2), job],
        [*neighbours(3, max_tokens=16), job],  # neighbours that end halfway
    ]
    for batch in batches:
        requests = answer(engine, batch)
        seeded = [request for request in requests if request.params.seed == 42]
        assert len(seeded) == batch.count(job)
        for request in seeded:
            assert request.output_token_ids == alone.output_token_ids
    # A neighbour that leaves halfway.
    add_job(engine, "leaves", others[0])
    stays = add_job(engine, "stays", job)
    for _ in range(10):
        engine.step()
    engine.abort("leaves")
    finish(engine)
    assert stays.output_token_ids == alone.output_token_ids
