import jax
import numpy as np
import pytest
from flax import nnx

import jpaged
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.invariance.engines import LIMITS, assert_naive
from tests.oracle import assert_same_answer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(tiny_model("gqa"), **LIMITS) as llm:
        yield llm


@pytest.fixture
def module(llm) -> nnx.Module:
    return llm.engine.runner.model()


def answers_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_of_every_kind_are_answered_in_their_order(llm):
    chat_ids = llm.tokenizer.encode_chat(CHAT)
    outputs = llm.generate(
        ["Hello", [72, 101, 108, 108, 111], CHAT, {"prompt": "Hello"}, {"prompt_token_ids": [72]}],
        GREEDY,
    )
    hello = list(b"Hello")
    prompts = [output.prompt_token_ids for output in outputs]
    assert prompts == [hello, hello, chat_ids, hello, [72]]
    texts = [output.prompt for output in outputs]
    assert texts == ["Hello", None, llm.tokenizer.render_chat(CHAT), "Hello", None]
    answers = answers_of(outputs)
    assert answers[0] == answers[1] == answers[3] != answers[4]
    assert answers_of(llm.chat(CHAT, GREEDY)) == [answers[2]]
    assert answers_of(llm.chat([CHAT, CHAT], GREEDY)) == [answers[2]] * 2


@pytest.mark.parametrize("prompt", ["Hello", list(b"Hello"), tuple(b"Hello"), CHAT])
def test_one_prompt_need_not_be_put_in_a_list(llm, prompt):
    assert answers_of(llm.generate(prompt, GREEDY)) == answers_of(llm.generate([prompt], GREEDY))


def test_no_prompts_give_no_answers(llm):
    assert llm.generate([]) == []


def test_output_holds_ids_text_and_log_probabilities(llm, goldens):
    golden = goldens("tiny-gqa")["answers"][3]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    [output] = llm.generate([golden["prompt_token_ids"]], params)
    [completion] = output.outputs
    assert_same_answer(golden, completion.token_ids, completion.token_logprobs)
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert completion.cumulative_logprob == pytest.approx(sum(completion.token_logprobs))
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert output.finished and completion.index == 0
    [quiet] = llm.generate([[72]], SamplingParams(max_tokens=2))
    assert quiet.outputs[0].logprobs is None and quiet.outputs[0].cumulative_logprob is None


def test_each_prompt_can_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(answer) for answer in answers_of(outputs)] == [3, 1, 5]
    with pytest.raises(ValueError, match="sampling_params has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], params)


def test_end_of_sequence_is_in_the_ids_but_not_in_the_text(llm, goldens):
    golden = goldens("tiny-gqa")["answers"][1]
    end = golden["token_ids"].index(tiny_models.EOS_TOKEN_ID) + 1
    for skips in (True, False):
        params = SamplingParams(temperature=0.0, max_tokens=24, skip_special_tokens=skips)
        [output] = llm.generate([golden["prompt_token_ids"]], params)
        [completion] = output.outputs
        assert completion.token_ids == golden["token_ids"][:end]
        assert completion.text == llm.tokenizer.decode(golden["token_ids"][: end - 1])
        assert completion.finish_reason == "stop"


def test_stop_string_cuts_the_text_and_ends_the_answer(llm):
    [whole] = llm.generate(["Hello"], GREEDY)
    text, token_ids = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = next(c for c in text[1:] if c != "\ufffd")
    for includes in (False, True):
        params = SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop],
            include_stop_str_in_output=includes,
        )  # fmt: skip
        [output] = llm.generate(["Hello"], params)
        [completion] = output.outputs
        end = text.index(stop) + (len(stop) if includes else 0)
        assert completion.text == text[:end]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) < len(token_ids)
    assert not llm.engine.has_unfinished_requests


def test_streamed_text_joins_to_the_final_text(llm):
    prompts = ["Hello", CHAT, [72], "another", "and one more"]
    texts, finals = [""] * len(prompts), {}
    for index, _, delta, output in llm.stream(prompts, [GREEDY] * len(prompts)):
        assert index not in finals
        texts[index] += delta
        if output is not None:
            finals[index] = output
    assert sorted(finals) == list(range(len(prompts)))
    assert texts == [finals[index].outputs[0].text for index in range(len(prompts))]
    assert answers_of(finals[i] for i in range(5)) == answers_of(llm.generate(prompts, GREEDY))


def test_leaving_a_stream_ends_its_requests(llm):
    stream = llm.stream(["Hello", "another"], [GREEDY] * 2)
    next(stream)
    assert llm.engine.has_unfinished_requests
    stream.close()
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.kv_cache_manager.pool.num_blocks_in_use == 0


def test_stream_told_to_stop_ends_every_answer_as_it_is(llm):
    texts, finals = [""] * 2, {}
    stream = llm.stream(["Hello", "another"], [GREEDY] * 2, should_stop=lambda: len(texts[0]) >= 2)
    for index, _, delta, output in stream:
        texts[index] += delta
        if output is not None:
            finals[index] = output.outputs[0]
    full = [output.outputs[0] for output in llm.generate(["Hello", "another"], GREEDY)]
    for index, (text, whole) in enumerate(zip(texts, full, strict=True)):
        assert finals[index].finish_reason == "abort" and finals[index].text == text
        assert 0 < len(finals[index].token_ids) < len(whole.token_ids)
        assert whole.token_ids[: len(finals[index].token_ids)] == finals[index].token_ids
    assert llm.engine.kv_cache_manager.pool.num_blocks_in_use == 0


def test_answer_that_is_aborted_through_the_engine_is_not_lost(llm):
    stream = llm.stream(["Hello", "another"], [GREEDY] * 2)
    index, *_ = next(stream)
    [*_, other] = llm.engine.scheduler.requests
    llm.engine.abort(other)
    finals = {i: output for i, _, _, output in stream if output is not None}
    assert {i: output.outputs[0].finish_reason for i, output in finals.items()} == {
        index: "length", 1 - index: "abort"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt_token_ids is empty"),
        ([3, 999], "holds 999"),
        ([1] * 400, "has 400 tokens"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "'prompt' or 'prompt_token_ids'"),
        ({"promt": "a"}, "promt"),
    ],
)
def test_prompt_that_cannot_run_is_refused_before_anything_runs(llm, prompt, message):
    steps = llm.engine.stats.steps
    with pytest.raises(ValueError, match=message):
        llm.generate(["fine", prompt], GREEDY)
    assert llm.engine.stats.steps == steps
    assert not llm.engine.has_unfinished_requests


def test_option_that_there_is_not_is_refused_by_name(tiny_model):
    with pytest.raises(ValueError, match="no option 'max_num_sequences'.*max_num_seqs"):
        LLM(tiny_model("gqa"), max_num_sequences=3)
    with pytest.raises(ValueError, match="EngineConfig.block_size is 0"):
        LLM(tiny_model("gqa"), block_size=0)


def test_nothing_is_compiled_while_answers_are_generated(llm):
    prompts = [[1] * n for n in (1, 30, 64, 5, 9)]
    llm.generate(prompts, GREEDY)
    compiled = llm.engine.compilations_after_warm_up
    llm.generate(prompts, GREEDY)
    assert compiled == llm.engine.compilations_after_warm_up == 0


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (70,), (3, 50, 60, 2, 2), (1,) * 9])
def test_programs_that_the_prompts_need_are_compiled_before_the_first_step(tiny_model, lengths):
    """The small pool preempts, so that answers are computed again as prompts."""
    options = LIMITS | {"num_blocks": 14, "max_model_len": 200, "decode_buckets": (1, 3)}
    with LLM(tiny_model("gqa"), **options) as llm:
        prompts = [[i] * n for i, n in enumerate(lengths)]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        assert llm.engine.compilations_after_warm_up == 0
        assert [len(answer) for answer in answers_of(outputs)] == [40] * len(lengths)


class TestModule:
    """A module that is in memory already."""

    def test_its_arrays_are_used_without_a_copy_and_outlive_the_llm(self, llm, module):
        arrays = jax.tree.leaves(nnx.state(module))
        pointers = [array.unsafe_buffer_pointer() for array in arrays]
        with LLM(module, tokenizer=llm.tokenizer, **LIMITS) as other:
            leaves = other.engine.runner.leaves
            assert [leaf.unsafe_buffer_pointer() for leaf in leaves] == pointers
            assert answers_of(other.generate(["Hello"], GREEDY)) == answers_of(
                llm.generate(["Hello"], GREEDY)
            )
        assert not any(array.is_deleted() for array in arrays)

    def test_without_a_tokenizer_it_takes_and_gives_ids_only(self, module):
        with LLM(module, **LIMITS) as llm:
            [output] = llm.generate([[72, 101]], GREEDY)
            assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].text == ""
            for prompt in ("Hello", CHAT):
                with pytest.raises(ValueError, match="no tokenizer; give token ids"):
                    llm.generate([prompt], GREEDY)

    def test_stop_string_without_a_tokenizer_is_refused_and_leaves_nothing(self, module):
        with LLM(module, **LIMITS) as llm:
            with pytest.raises(ValueError, match="stop.*needs a tokenizer"):
                llm.generate([[72], [73]], SamplingParams(stop="x"))
            assert not llm.engine.has_unfinished_requests

    def test_it_has_no_revisions(self, module):
        with pytest.raises(ValueError, match="revision is 'main'"):
            LLM(module, revision="main")

    def test_generate_takes_it_too(self, llm, module):
        outputs = jpaged.generate(module, [[72, 101]], GREEDY, **LIMITS)
        assert answers_of(outputs) == answers_of(llm.generate([[72, 101]], GREEDY))

    def test_new_weights_change_the_answers_and_forget_the_cache(self, llm, module):
        prompt = list(range(40))
        with LLM(module, **LIMITS) as ours:
            before, again = (ours.generate([prompt], GREEDY)[0] for _ in range(2))
            assert again.num_cached_tokens == 32
            state = jax.tree.map(lambda array: array * 0.5, nnx.state(module))
            ours.update_weights(nnx.merge(nnx.graphdef(module), state))
            [after] = ours.generate([prompt], GREEDY)
            assert after.num_cached_tokens == 0
            assert after.outputs[0].logprobs != before.outputs[0].logprobs
            ours.update_weights(module)
            [back] = ours.generate([prompt], GREEDY)
            assert back.num_cached_tokens == 0
            assert answers_of([back]) == answers_of([before])


def test_generate_opens_a_model_answers_and_closes_it(tiny_model, monkeypatch):
    closed = []
    close = LLM.close
    monkeypatch.setattr(LLM, "close", lambda llm: closed.append(llm) or close(llm))
    [output] = jpaged.generate(tiny_model("gqa"), "Hello", GREEDY, **LIMITS)
    assert len(output.outputs[0].token_ids) == 12
    assert [llm.engine.runner.kv_cache for llm in closed] == [()]


def test_closing_frees_the_memory_and_a_closed_llm_says_so(tiny_model):
    llm = LLM(tiny_model("gqa"), **LIMITS)
    layers, leaves = llm.engine.runner.kv_cache, llm.engine.runner.leaves
    llm.close()
    assert all(layer.is_deleted() for layer in layers)
    assert llm.engine.runner.leaves == () and len(leaves) > 0
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(["Hello"], GREEDY)


def test_answers_of_an_llm_are_naive(llm):
    """The road over `LLM` adds nothing to and takes nothing from the engine's answers."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 256, length).tolist() for length in (1, 17, 64, 70)]
    params = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in range(4)]
    requests = []
    add = llm.engine.add_request
    llm.engine.add_request = lambda *args, **kw: requests.append(add(*args, **kw)) or requests[-1]
    try:
        outputs = llm.generate(prompts, params)
    finally:
        del llm.engine.add_request
    assert_naive(requests)
    assert answers_of(outputs) == [request.output_token_ids for request in requests]


@pytest.fixture(scope="module")
def smollm2():
    """The real model, fetched as the demo model, in the engine's default limits."""
    with LLM("smollm2") as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.optimized
def test_answers_of_the_real_model_are_those_of_transformers(smollm2, goldens):
    answers = goldens("smollm2-answers")["answers"]
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=len(answer["token_ids"]), ignore_eos=True, logprobs=0
        )
        for answer in answers
    ]
    prompts = [answer.get("prompt", answer.get("messages")) for answer in answers]
    for output, golden in zip(smollm2.generate(prompts, params), answers, strict=True):
        [completion] = output.outputs
        assert output.prompt_token_ids == golden["prompt_token_ids"]
        assert_same_answer(golden, completion.token_ids, completion.token_logprobs)
        if completion.token_ids == golden["token_ids"]:
            assert completion.text == golden["text"]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", ["A", "B"])
def test_workload_of_a_full_batch_gives_what_each_request_gets_alone(smollm2, name, goldens):
    answers = goldens(f"smollm2-workload-{name}")["answers"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(answer["token_ids"]), ignore_eos=True)
        for answer in answers
    ]
    prompts = [answer["prompt_token_ids"] for answer in answers]
    for output, golden in zip(smollm2.generate(prompts, params), answers, strict=True):
        assert_same_answer(golden, output.outputs[0].token_ids)
    assert smollm2.engine.compilations_after_warm_up == 0
