import contextlib
import dataclasses

import jax
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from jpaged.checkpoint import open_checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import Engine, EngineStats
from jpaged.models.transformer import Transformer
from jpaged.request import FinishReason
from jpaged.runner import kv_cache, model_runner
from jpaged.runner.sampling_state import IN_PROMPT
from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.invariance.engines import (
    LIMITS,
    SMALL_POOL,
    Job,
    answer,
    assert_naive,
    finish,
    open_engine,
    shared_engine,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(40))


@pytest.fixture
def engine(tiny_model):
    return shared_engine(tiny_model("gqa"))


def test_engine_with_nothing_to_do_steps_to_nothing(engine):
    assert not engine.has_unfinished_requests
    assert engine.step() == []


def test_steps_bring_one_token_each_once_the_prompt_is_computed(engine):
    prompt = list(range(100))  # more than the 64 tokens of a step
    request = engine.add_request("a", prompt, SamplingParams(max_tokens=3, logprobs=0, seed=1))
    assert engine.step() == []
    brought = [engine.step() for _ in range(3)]
    assert [len(outputs) for outputs in brought] == [1, 1, 1]
    assert [new[0] for [(_, new, _)] in brought] == request.output_token_ids
    assert [new[0] for [(_, _, new)] in brought] == request.logprobs
    assert request.is_finished and request.finish_reason is FinishReason.LENGTH
    assert not engine.has_unfinished_requests


def test_log_probabilities_come_only_where_asked_for(engine):
    asks, other = answer(
        engine, [Job(PROMPT, dataclasses.replace(GREEDY, logprobs=0)), Job(PROMPT[:9], GREEDY)]
    )
    assert len(asks.logprobs) == 8 and all(value < 0 for value in asks.token_logprobs)
    assert other.logprobs == []


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "prompt_token_ids is empty"),
        ([3, -1], "holds -1"),
        ([3, tiny_models.NUM_TOKENS_KNOWN], f"holds {tiny_models.NUM_TOKENS_KNOWN}.*0 to"),
        ([3] * LIMITS["max_model_len"], f"has {LIMITS['max_model_len']} tokens"),
    ],
)
def test_prompt_that_cannot_run_is_refused_and_leaves_nothing(engine, token_ids, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", token_ids)
    assert not engine.has_unfinished_requests
    assert len(answer(engine, [Job(PROMPT, GREEDY)])[0].output_token_ids) == 8


def test_id_in_use_is_refused_and_a_finished_one_can_be_used_again(engine):
    engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="'a'"):
        engine.add_request("a", PROMPT, GREEDY)
    finish(engine)
    engine.add_request("a", PROMPT, GREEDY)
    finish(engine)


def test_without_max_tokens_the_answer_goes_on_to_the_models_end(tiny_model):
    engine = shared_engine(tiny_model("gqa"), num_blocks=14, max_model_len=200)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    long, short = answer(
        engine, [Job([1] * 150, params), Job([1] * 190, SamplingParams(max_tokens=50, seed=0))]
    )
    assert long.num_tokens == 200 and long.finish_reason is FinishReason.LENGTH
    assert short.num_tokens <= 200


def test_end_of_sequence_ends_an_answer_unless_ignored(engine, goldens):
    golden = goldens("tiny-gqa")["answers"][1]
    eos = golden["token_ids"].index(tiny_models.EOS_TOKEN_ID)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    ends, goes_on = answer(
        engine,
        [
            Job(golden["prompt_token_ids"], params),
            Job(golden["prompt_token_ids"], dataclasses.replace(params, ignore_eos=True)),
        ],
    )
    assert ends.output_token_ids == golden["token_ids"][: eos + 1]
    assert ends.finish_reason is FinishReason.STOP and ends.stop_reason is None
    assert goes_on.output_token_ids == golden["token_ids"]


def test_stop_token_ends_an_answer_and_is_named(engine):
    [whole] = answer(engine, [Job(PROMPT, GREEDY)])
    stop = whole.output_token_ids[3]
    [cut] = answer(engine, [Job(PROMPT, dataclasses.replace(GREEDY, stop_token_ids=[stop]))])
    end = whole.output_token_ids.index(stop) + 1
    assert cut.output_token_ids == whole.output_token_ids[:end]
    assert cut.finish_reason is FinishReason.STOP and cut.stop_reason == stop


def test_abort_and_finish_end_a_request_at_once_and_free_its_blocks(engine):
    aborted = engine.add_request("a", PROMPT, GREEDY)
    stopped = engine.add_request("b", PROMPT[::-1], GREEDY)
    engine.step()
    engine.abort("a")
    engine.abort("nobody")
    engine.finish("b", "a stop string")
    assert aborted.finish_reason is FinishReason.ABORT
    assert stopped.finish_reason is FinishReason.STOP and stopped.stop_reason == "a stop string"
    assert engine.kv_cache_manager.pool.num_blocks_in_use == 0
    assert not engine.has_unfinished_requests and engine.step() == []


@pytest.mark.parametrize("top_p", [1e-40, 1e-60])
def test_top_p_that_float32_cannot_hold_keeps_the_best_token(engine, top_p):
    params = SamplingParams(max_tokens=8, ignore_eos=True, top_p=top_p, seed=1)
    sampled, greedy = answer(engine, [Job(PROMPT, params), Job(PROMPT, GREEDY)])
    assert sampled.output_token_ids == greedy.output_token_ids


def test_request_without_a_seed_draws_one_from_the_engines(tiny_model):
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.5)

    def answers(seed: int) -> list[list[int]]:
        engine = open_engine(tiny_model("gqa"), seed=seed)
        return [request.output_token_ids for request in answer(engine, [Job(PROMPT, params)] * 3)]

    first = answers(1)
    assert len({tuple(token_ids) for token_ids in first}) == 3
    assert answers(1) == first
    assert answers(2) != first


def test_salts_keep_equal_prompts_apart(engine):
    for number, salt in enumerate(["", "x", "x", "y", ""]):
        engine.add_request(str(number), PROMPT, GREEDY, cache_salt=salt)
        [request] = engine.scheduler.requests.values()
        finish(engine)
        assert request.num_cached_tokens == (32 if number in (2, 4) else 0)


def test_resetting_the_prefix_cache_forgets_it(engine):
    answer(engine, [Job(PROMPT, GREEDY)])
    assert answer(engine, [Job(PROMPT, GREEDY)])[0].num_cached_tokens == 32
    engine.reset_prefix_cache()
    assert answer(engine, [Job(PROMPT, GREEDY)])[0].num_cached_tokens == 0


def test_pool_is_sized_by_the_bytes_that_are_given(tiny_model):
    limits = {"num_blocks": None, "max_model_len": None}
    block = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, dimensions, bytes
    engine = open_engine(tiny_model("gqa"), kv_cache_memory_bytes=7 * block + 5, **limits)
    assert engine.num_blocks == 7 and engine.max_model_len == 7 * 16
    per_block = kv_cache.block_bytes(engine.model_config, block_size=16, dtype=engine.dtype)
    assert per_block == block
    with pytest.raises(ValueError, match=f"kv_cache_memory_bytes is 9; one block takes {block}"):
        open_engine(tiny_model("gqa"), kv_cache_memory_bytes=9, **limits)


def test_pool_holds_every_request_at_full_length_where_memory_allows(tiny_model):
    engine = open_engine(tiny_model("gqa"), num_blocks=None, max_model_len=None, max_num_seqs=3)
    assert engine.max_model_len == 512
    assert engine.num_blocks == 3 * 512 // 16


def test_model_that_does_not_fit_into_memory_is_refused_with_the_sums(tiny_model, monkeypatch):
    monkeypatch.setattr("jpaged.runner.memory_plan._available_host_bytes", lambda: 1 << 20)
    with pytest.raises(ValueError, match="does not fit.*memory_utilization 0.01"):
        open_engine(tiny_model("gqa"), num_blocks=None, max_model_len=None, memory_utilization=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 513}, "max_model_len is 513.*positions end at 512"),
        ({"num_blocks": 3, "max_model_len": 49}, "max_model_len is 49.*holds 48 tokens"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(options, message, tiny_model):
    with pytest.raises(ValueError, match=message):
        open_engine(tiny_model("gqa"), **options)


def test_step_that_fails_is_raised_and_the_engine_refuses_to_go_on(tiny_model, monkeypatch):
    engine = open_engine(tiny_model("gqa"))
    engine.add_request("a", PROMPT, GREEDY)

    def fail(*_):
        for layer in engine.runner.kv_cache:  # as after a donation
            layer.delete()
        raise FloatingPointError("the device is gone")

    monkeypatch.setattr(engine.runner, "execute", fail)
    with pytest.raises(FloatingPointError, match="the device is gone"):
        engine.step()
    with pytest.raises(RuntimeError, match="failed earlier") as error:
        engine.step()
    assert "the device is gone" in str(error.value.__cause__)


def test_step_that_is_interrupted_before_the_cache_is_given_away_can_be_repeated(
    tiny_model, monkeypatch
):
    engine = open_engine(tiny_model("gqa"))
    expected = answer(engine, [Job(PROMPT, GREEDY)])[0].output_token_ids
    request = engine.add_request("a", PROMPT, GREEDY)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_unfinished_requests:
        engine.step()
    assert request.output_token_ids == expected


def test_module_that_the_engine_cannot_run_is_refused_by_name(tiny_model):
    model = open_engine(tiny_model("gqa")).runner.model()
    with pytest.raises(ValueError, match="dtype is 'bfloat16'.*arrays are float32"):
        Engine(model, EngineConfig(dtype="bfloat16"))
    with pytest.raises(ValueError, match="model is a Linear; give a module of jpaged.models"):
        Engine(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    host = nnx.merge(*nnx.split(model))
    nnx.update(host, jax.tree.map(np.asarray, nnx.state(host)))
    with pytest.raises(ValueError, match="leaf .* is a ndarray; put the module's weights on"):
        Engine(host)


@pytest.mark.parametrize("variant", ["gqa", "gemma3"])
def test_waste_counts_the_slots_of_all_groups(variant, tiny_model):
    """In whole blocks no slot is wasted, whatever lies behind windows."""
    engine = shared_engine(tiny_model(variant))
    engine.stats = EngineStats()
    engine.add_request("whole blocks", [5] * 192, SamplingParams(max_tokens=1))
    for number in range(1, 4):
        engine.step()
        assert engine.stats.steps == number and engine.stats.kv_waste == pytest.approx(0.0)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("name", ["num_blocks", "kv_cache_memory_bytes"])
def test_cache_beyond_memory_is_refused_before_it_is_allocated(name, tiny_model):
    with pytest.raises(ValueError, match=rf"EngineConfig.{name} is {10**15}.*lower it"):
        open_engine(tiny_model("gqa"), **{"num_blocks": None, name: 10**15})


def test_closing_frees_the_cache_ends_all_requests_and_is_final(tiny_model):
    engine = open_engine(tiny_model("gqa"))
    request = engine.add_request("a", PROMPT, GREEDY)
    layers = engine.runner.kv_cache
    engine.close()
    assert all(layer.is_deleted() for layer in layers)
    assert request.finish_reason is FinishReason.ABORT
    with pytest.raises(RuntimeError):
        engine.step()
    engine.close()  # again does nothing


def test_totals_add_up(tiny_model):
    engine = open_engine(tiny_model("gqa"))
    answer(engine, [Job(PROMPT, GREEDY), Job(PROMPT[:7], GREEDY)])
    stats = engine.stats
    # 47 prompt tokens in one mixed step of 64, then seven steps of two tokens in eight.
    assert (stats.steps, stats.num_tokens, stats.num_padded_tokens) == (8, 61, 120)
    assert stats.padding_share == pytest.approx(1 - 61 / 120)
    assert 0 < stats.host_s < stats.step_s
    # Both hold between 1 and 15 slots too many.
    assert 0 < stats.kv_waste < 30 / 64


class TestUpdateWeights:
    """Swapping in another module of the same shape."""

    @pytest.fixture
    def engine(self, tiny_model):
        return open_engine(tiny_model("gqa"))

    @pytest.fixture
    def other(self, tiny_model):
        """The same shape with other weights."""
        engine = open_engine(tiny_model("gqa"))
        engine.warm_up([])  # waits for what compiles in the background
        module = engine.runner.model()
        for leaf in jax.tree.leaves(module, is_leaf=lambda x: isinstance(x, nnx.Param)):
            leaf[...] = leaf[...][::-1]
        return module

    def test_arrays_are_taken_over_without_a_copy_and_answers_follow(self, engine, other):
        [before] = answer(engine, [Job(PROMPT, GREEDY)])
        engine.update_weights(other)
        arrays = jax.tree.leaves(nnx.state(other))
        for ours, theirs in zip(engine.runner.leaves, arrays, strict=True):
            assert ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
        [after] = answer(engine, [Job(PROMPT, GREEDY)])
        assert after.num_cached_tokens == 0  # K and V of the old weights are forgotten
        [expected] = answer(Engine(other, EngineConfig(**LIMITS)), [Job(PROMPT, GREEDY)])
        assert before.output_token_ids != after.output_token_ids == expected.output_token_ids

    def test_nothing_is_compiled_again(self, engine, other):
        answer(engine, [Job(PROMPT, GREEDY)])
        engine.warm_up([])
        engine.update_weights(other)
        answer(engine, [Job(PROMPT, GREEDY)])
        assert engine.compilations_after_warm_up == 0

    def test_unfinished_requests_keep_the_weights(self, engine, other):
        engine.add_request("a", PROMPT, GREEDY)
        with pytest.raises(ValueError, match="1 requests are unfinished"):
            engine.update_weights(other)

    def test_module_of_another_shape_or_dtype_is_refused(self, engine, other):
        config = engine.model_config
        leaves = engine.runner.leaves
        deeper = dataclasses.replace(config, num_layers=3)
        with pytest.raises(ValueError, match="structure differs"):
            engine.update_weights(Transformer(deeper, dtype=np.dtype("float32")))
        other.norm.weight = nnx.Param(jax.numpy.ones((65,)), **other.norm.weight.get_metadata())
        with pytest.raises(ValueError, match=r"norm.*float32\[65\].*must be float32\[64\]"):
            engine.update_weights(other)
        assert engine.runner.leaves is leaves


@pytest.mark.parametrize("where", ["schedule", "update", "finish"])
def test_interrupted_change_of_the_scheduler_ends_the_engine_and_frees_its_memory(
    where, tiny_model, monkeypatch
):
    engine = open_engine(tiny_model("gqa"))
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.scheduler, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.abort("a") if where == "finish" else engine.step()
    with pytest.raises(RuntimeError, match="failed earlier"):
        engine.step()
    engine.abort("a")  # says nothing: there is nothing left to end
    engine.close()
    assert engine.runner.kv_cache == ()


class TestSamplerState:
    """What the sampler remembers is what requests hold, whatever becomes of steps and answers."""

    PENALIZED = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, seed=1, max_tokens=30,
        ignore_eos=True,
    )  # fmt: skip

    def counts(self, engine, request):
        line = np.asarray(engine.runner.sampling_state.counts)[request.row]
        return line & (IN_PROMPT - 1), line & IN_PROMPT != 0

    def assert_counts(self, engine, request):
        counts, in_prompt = self.counts(engine, request)
        expected = np.bincount(request.output_token_ids, minlength=len(counts))
        np.testing.assert_array_equal(counts, expected)
        assert set(np.flatnonzero(in_prompt)) == set(request.prompt_token_ids)

    def test_step_whose_result_nobody_got_is_not_counted(self, engine, monkeypatch):
        [expected] = answer(engine, [Job(PROMPT, self.PENALIZED)])
        request = engine.add_request("a", PROMPT, self.PENALIZED)
        read = model_runner._unpack_logprobs
        for step in range(8):
            if step % 2:

                def fail(*args):
                    raise KeyboardInterrupt

                monkeypatch.setattr(model_runner, "_unpack_logprobs", fail)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
                monkeypatch.setattr(model_runner, "_unpack_logprobs", read)
            engine.step()
            self.assert_counts(engine, request)
        finish(engine)
        assert request.output_token_ids == expected.output_token_ids

    def test_rows_that_change_hands_count_their_owners_tokens(self, tiny_model):
        engine = shared_engine(tiny_model("gqa"), **SMALL_POOL)
        random = np.random.default_rng(0)
        for wave in range(6):
            for index in range(6):
                prompt = random.integers(0, 256, int(random.integers(5, 60))).tolist()
                engine.add_request(f"{wave}-{index}", prompt, self.PENALIZED)
            for _ in range(25):
                scheduled = [entry.request for entry in self.step(engine).scheduled]
                for request in scheduled:
                    if request.row >= 0 and request.num_tokens == request.num_computed_tokens + 1:
                        self.assert_counts(engine, request)
        assert engine.scheduler.num_preemptions > 0
        finish(engine)

    def step(self, engine):
        outputs = []
        schedule = engine.scheduler.schedule
        engine.scheduler.schedule = lambda: outputs.append(schedule()) or outputs[-1]
        try:
            engine.step()
        finally:
            del engine.scheduler.schedule
        return outputs[-1]


class TestPromptLogprobsOfGroups:
    PARAMS = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True, prompt_logprobs=0)

    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    def test_next_answer_scores_what_one_that_left_had_not(self, engine, num_steps):
        prompt = (PROMPT * 4)[:150]  # three steps
        [whole] = answer(engine, [Job(prompt, self.PARAMS)])
        request = engine.add_request("a", prompt, self.PARAMS)
        for _ in range(num_steps):
            engine.step()
        engine.abort("a")
        finish(engine)
        np.testing.assert_allclose(
            [entry.logprob for entry in request.forks[1].prompt_logprobs],
            [entry.logprob for entry in whole.prompt_logprobs],
            atol=1e-4,
        )
        assert len(request.prompt_logprobs) == 149

    def test_answers_that_wait_for_a_row_read_the_prompt_from_the_cache(self, tiny_model):
        engine = shared_engine(tiny_model("gqa"), max_num_seqs=2)
        params = dataclasses.replace(self.PARAMS, n=6)
        before = engine.stats.num_tokens
        answer(engine, [Job(PROMPT, params)])
        # 40 once; of the others the first shares 39, four find 32 cached; 3 tokens of each answer.
        assert engine.stats.num_tokens - before == 40 + 1 + 4 * 8 + 6 * 3

    def test_id_that_is_used_again_does_not_inherit_what_was_asked(self, engine):
        engine.add_request("a", PROMPT, self.PARAMS)
        engine.finish("a", "x")
        engine.abort("a/1")
        engine.abort("a/2")
        request = engine.add_request("a", PROMPT, dataclasses.replace(GREEDY))
        finish(engine)
        assert request.prompt_logprobs == []


def test_preempted_request_reads_its_own_answer_back_from_the_cache(tiny_model):
    engine = shared_engine(tiny_model("gqa"), **SMALL_POOL)
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    num_hits = []
    find = engine.kv_cache_manager.find_cached_prefix

    def spy(request):
        prefix = find(request)
        if request.num_preemptions:
            num_hits.append(prefix.num_tokens)
        return prefix

    engine.kv_cache_manager.find_cached_prefix = spy
    try:
        answer(engine, [Job([index] * 16, params) for index in range(4)])
    finally:
        del engine.kv_cache_manager.find_cached_prefix
    assert max(num_hits) > 16


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([1.9, 2.0], "prompt_token_ids holds 1.9; each entry must be a whole number"),
        ([True], "holds True"),
        (["7"], "holds '7'"),
        ("123", "prompt_token_ids is '123'; it must be a list of token ids"),
        (b"ab", "is b'ab'"),
        (None, "is None"),
    ],
)
def test_what_is_no_list_of_ids_is_refused_by_name(engine, token_ids, message):
    with no_type_checks(), pytest.raises(ValueError, match=message):
        engine.add_request("a", token_ids)
    with no_type_checks(), pytest.raises(ValueError, match="bad_words"):
        engine.add_request("a", PROMPT, SamplingParams(bad_words=["x"]), bad_words=[token_ids])
    with no_type_checks(), pytest.raises(ValueError, match="params is a dict; give SamplingParams"):
        engine.add_request("a", PROMPT, {"max_tokens": 3})
    assert not engine.has_unfinished_requests


@contextlib.contextmanager
def no_type_checks():
    """As in production."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("variant", ["phi3-longrope", "dynamic-rope"])
def test_module_and_directory_know_the_longest_request(variant, tiny_model):
    """Embeddings that grow are those of `max_model_len`, wherever the weights come from."""
    job = Job([5, 6, 7] * 6, SamplingParams(temperature=0.0, max_tokens=8, logprobs=0))
    with open_checkpoint(tiny_model(variant)) as checkpoint:
        whole = Engine.from_checkpoint(checkpoint, EngineConfig(**LIMITS | {"max_model_len": None}))
    module = whole.runner.model()
    limits = LIMITS | {"max_model_len": 60}
    engine = Engine(module, EngineConfig(**limits))
    assert engine.max_model_len == 60
    assert_naive(answer(engine, [job]), variant, max_model_len=60)
    # Weights are weights, whatever their module was asked for.
    engine.update_weights(module)
    assert_naive(answer(engine, [job]), variant, max_model_len=60)
    whole.update_weights(engine.runner.model())
