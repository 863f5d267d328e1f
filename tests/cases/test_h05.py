import numpy as np

from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import SMALL_POOL, Job, add, assert_naive, shared_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, logprobs=0)
JOBS = [Job(np.random.default_rng(seed).integers(0, 256, 40).tolist(), PARAMS) for seed in range(3)]


def test_h05_preemption_is_invisible_except_in_time(tiny_model):
    """H-05: three streams that need 30 blocks, in pools of 14 and of 96."""
    answers = []
    for options in (SMALL_POOL, {}):
        engine = shared_engine(tiny_model("gqa"), **options)
        num_preemptions = engine.scheduler.num_preemptions
        requests = add(engine, JOBS)
        streams: dict[str, list[int]] = {request.request_id: [] for request in requests}
        while engine.has_unfinished_requests:
            for request, token_ids, _ in engine.step():
                streams[request.request_id] += token_ids
            engine.scheduler.check()
        assert (engine.scheduler.num_preemptions > num_preemptions) == bool(options)
        assert_naive(requests)
        for request in requests:
            assert streams[request.request_id] == request.output_token_ids
            assert request.num_output_tokens == 120
        answers.append([request.output_token_ids for request in requests])
    assert answers[0] == answers[1]
