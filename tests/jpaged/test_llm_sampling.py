"""What one request may ask, over `LLM`: several answers, log-probabilities, bans, chats, scores."""

import dataclasses
import json

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import jpaged
from jpaged.llm import LLM
from jpaged.runner.logits_processor import LogitsProcessor
from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.invariance import naive
from tests.invariance.engines import LIMITS, SMALL_POOL

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)
PROMPT = np.random.default_rng(30).integers(0, 256, 40).tolist()


def keep_only(logits, arguments, context):
    """Excludes all but one id and, after some tokens, what the answer or prompt holds already."""
    token_id, num_tokens = arguments.astype(jnp.int32)
    ids = jnp.arange(logits.shape[0])
    is_held = (context.counts > 0) | context.in_prompt
    is_excluded = jnp.where(context.num_output_tokens < num_tokens, ids != token_id, is_held)
    return jnp.where(is_excluded, -jnp.inf, logits)


def sharpen(logits, arguments, context):
    """A temperature of its own."""
    return logits * arguments[0]


PROCESSORS = (
    LogitsProcessor(name="keep_only", function=keep_only, num_arguments=2),
    LogitsProcessor(name="sharpen", function=sharpen),
)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(tiny_model("gqa"), logits_processors=PROCESSORS, **LIMITS) as llm:
        yield llm


def ids_of(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def naive_logprobs(prompt, token_ids) -> np.ndarray:
    """The model's own distribution before each of `token_ids`."""
    logits = naive.tiny_model("gqa").logits([*prompt, *token_ids])[len(prompt) - 1 : -1]
    return np.log(naive.softmax(logits[:, : tiny_models.NUM_TOKENS_KNOWN]))


def test_several_answers_come_in_the_order_of_their_seeds(llm):
    params = dataclasses.replace(SAMPLED, n=3, logprobs=0)
    [output, other] = llm.generate([PROMPT, [7]], [params, SAMPLED])
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for index, completion in enumerate(output.outputs):
        asked = dataclasses.replace(SAMPLED, seed=5 + index, logprobs=0)
        [alone] = llm.generate([PROMPT], asked)
        assert completion.token_ids == alone.outputs[0].token_ids
        assert completion.text == alone.outputs[0].text
        np.testing.assert_allclose(
            completion.token_logprobs, alone.outputs[0].token_logprobs, atol=1e-4
        )
        assert completion.finish_reason == "length"
    assert ids_of(other) == ids_of(llm.generate([[7]], SAMPLED)[0])
    assert len({tuple(ids) for ids in ids_of(output)}) == 3


def test_each_answer_has_its_own_end(llm):
    """Stop strings, stop ids and lengths of the answers of one prompt are independent."""
    params = dataclasses.replace(SAMPLED, n=8, max_tokens=40)
    [free] = llm.generate([PROMPT], params)
    stop_id = free.outputs[2].token_ids[3]
    [output] = llm.generate([PROMPT], dataclasses.replace(params, stop_token_ids=[stop_id]))
    for completion, whole in zip(output.outputs, free.outputs, strict=True):
        is_stopped = stop_id in whole.token_ids
        assert completion.finish_reason == ("stop" if is_stopped else "length")
        end = whole.token_ids.index(stop_id) + 1 if is_stopped else 40
        assert completion.token_ids == whole.token_ids[:end]
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "length"}
    stop = next(c for c in free.outputs[4].text[2:] if c != "\ufffd")
    [output] = llm.generate([PROMPT], dataclasses.replace(params, stop=[stop]))
    for completion, whole in zip(output.outputs, free.outputs, strict=True):
        assert completion.text == whole.text.split(stop)[0]
        assert completion.stop_reason == (stop if stop in whole.text else None)
    assert llm.engine.kv_cache_manager.pool.num_blocks_in_use == 0


def test_best_of_returns_the_likeliest_answers_best_first(llm):
    params = dataclasses.replace(SAMPLED, n=6, logprobs=0)
    [every] = llm.generate([PROMPT], params)
    expected = sorted(every.outputs, key=lambda completion: -completion.cumulative_logprob)[:2]
    [output] = llm.generate([PROMPT], dataclasses.replace(SAMPLED, n=2, best_of=6))
    assert ids_of(output) == [completion.token_ids for completion in expected]
    assert [completion.index for completion in output.outputs] == [0, 1]
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob == pytest.approx(expected[0].cumulative_logprob)
    assert expected[0].index != 0 or expected[1].index != 1  # the order of seeds is another one


def test_streams_of_several_answers_join_to_their_texts_and_best_of_comes_at_the_end(llm):
    several = dataclasses.replace(SAMPLED, n=3)
    chosen = dataclasses.replace(SAMPLED, n=1, best_of=3)
    texts, finals = {}, {}
    for prompt_index, answer_index, text, output in llm.stream(
        [PROMPT, [7, 8], PROMPT], [several, several, chosen]
    ):
        assert prompt_index not in finals
        key = prompt_index, answer_index
        texts[key] = texts.get(key, "") + text
        if output is not None:
            finals[prompt_index] = output
    for prompt_index in (0, 1):
        for completion in finals[prompt_index].outputs:
            assert texts[prompt_index, completion.index] == completion.text
    assert len(finals[0].outputs) == 3 and len(finals[2].outputs) == 1
    assert all(not text for (prompt_index, _), text in texts.items() if prompt_index == 2)


@pytest.mark.slow
@pytest.mark.optimized
def test_prompt_of_several_answers_is_computed_once():
    """n = 4 on 512 tokens: blocks and computed tokens at most 1.1 times those of n = 1."""
    prompt = np.random.default_rng(31).integers(0, 40000, 512).tolist()
    work = {}
    with LLM("smollm2", num_blocks=200, enable_prefix_caching=False) as llm:
        pool = llm.engine.kv_cache_manager.pool
        for n in (1, 4):
            num_tokens, most_blocks = llm.engine.stats.num_tokens, 0
            params = dataclasses.replace(SAMPLED, n=n, max_tokens=32)
            for _ in llm.stream([prompt], [params], should_stop=lambda: False):
                most_blocks = max(most_blocks, pool.num_blocks_in_use)
            # An answer's own: 2 blocks, and all of its 32 tokens but the last are computed.
            num_tokens = llm.engine.stats.num_tokens - num_tokens - n * 31
            work[n] = num_tokens, most_blocks - n * 2
    assert work[1] == (512, 32)
    assert work[4][0] <= 1.1 * 512 and work[4][1] <= 1.1 * 32


def test_log_probabilities_carry_ranks_texts_and_bytes(llm):
    params = dataclasses.replace(SAMPLED, temperature=1.9, logprobs=3, prompt_logprobs=2)
    [output] = llm.generate([PROMPT], params)
    [completion] = output.outputs
    expected = naive_logprobs(PROMPT, completion.token_ids)
    for row, token_id, entries in zip(
        expected, completion.token_ids, completion.logprobs, strict=True
    ):
        best = np.argsort(-row, kind="stable")[:3].tolist()
        assert list(entries) == list(dict.fromkeys([token_id, *best]))
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(row[other], abs=1e-3)
            assert entry.rank == 1 + int((row > row[other]).sum())
            assert entry.decoded_token == llm.tokenizer.token_text(other)
            assert entry.token_bytes == llm.tokenizer.token_bytes(other)
    assert len({len(entries) for entries in completion.logprobs}) == 2  # 3 and 4
    assert completion.cumulative_logprob == pytest.approx(sum(completion.token_logprobs))
    first, *others = output.prompt_logprobs
    assert first is None and len(others) == 39
    for row, token_id, entries in zip(
        naive_logprobs(PROMPT[:1], PROMPT[1:]), PROMPT[1:], others, strict=True
    ):
        assert entries[token_id].logprob == pytest.approx(row[token_id], abs=1e-3)
        assert 2 <= len(entries) <= 3
    [plain] = llm.generate([PROMPT], SAMPLED)
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is None


def test_bytes_of_log_probabilities_join_to_the_text(llm):
    [output] = llm.generate(
        ["Hello"],
        dataclasses.replace(SAMPLED, logprobs=0, max_tokens=60, skip_special_tokens=False),
    )
    [completion] = output.outputs
    pieces = [
        entries[token_id].token_bytes
        for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    assert b"".join(pieces).decode(errors="replace") == completion.text


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_other_modes_report_what_they_say(mode, tiny_model):
    params = SamplingParams(
        max_tokens=4, temperature=0.5, top_k=5, logit_bias={3: 4.0}, logprobs=20, seed=1,
        ignore_eos=True,
    )  # fmt: skip
    with LLM(tiny_model("gqa"), logprobs_mode=mode, **LIMITS) as llm:
        [output] = llm.generate([PROMPT], params)
        if mode.endswith("logits"):
            with pytest.raises(ValueError, match="best_of is 2; .*logprobs_mode is"):
                llm.generate([PROMPT], SamplingParams(best_of=2))
    [completion] = output.outputs
    raw = naive.tiny_model("gqa").logits([*PROMPT, *completion.token_ids])[39:-1]
    edited = raw + 4.0 * (np.arange(raw.shape[1]) == 3)
    kth = np.sort(edited, axis=-1)[:, [-5]]
    processed = np.where(edited >= kth, edited / 0.5, -np.inf)
    with np.errstate(divide="ignore"):
        expected = {
            "raw_logits": raw,
            "processed_logits": processed,
            "processed_logprobs": np.log(naive.softmax(processed)),
        }[mode]
    for row, entries in zip(expected, completion.logprobs, strict=True):
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token_id], abs=2e-3)


def test_bans_allowed_ids_and_least_lengths_hold(llm):
    [plain] = llm.generate(["Hello"], GREEDY)
    text = plain.outputs[0].text
    word = next(c for c in text if c.isascii() and c.isprintable() and c != " ")
    [output] = llm.generate(["Hello"], dataclasses.replace(GREEDY, bad_words=[word]))
    assert word not in output.outputs[0].text
    allowed = [65, 66, 67]
    [output] = llm.generate(["Hello"], dataclasses.replace(SAMPLED, allowed_token_ids=allowed))
    assert set(output.outputs[0].token_ids) <= set(allowed)
    # An end-of-sequence id that comes first of all may not come before min_tokens.
    eos = tiny_models.EOS_TOKEN_ID
    params = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={eos: 100})
    assert ids_of(llm.generate(["Hello"], params)[0]) == [[eos]]
    params = dataclasses.replace(params, min_tokens=7)
    [ids] = ids_of(llm.generate(["Hello"], params)[0])
    assert len(ids) == 8 and ids[-1] == eos and eos not in ids[:-1]


def test_bad_word_over_several_ids_is_banned_only_at_its_end(llm):
    params = dataclasses.replace(GREEDY, allowed_token_ids=list(range(65, 91)))
    [plain] = llm.generate(["Hello"], params)
    ids = plain.outputs[0].token_ids
    first, second = ids[4:6]
    params = dataclasses.replace(params, bad_words=[chr(first) + chr(second)])
    [output] = llm.generate(["Hello"], params)
    [changed] = ids_of(output)
    assert (first, second) not in set(zip(changed, changed[1:], strict=False))
    assert changed[: ids.index(first) + 1] == ids[: ids.index(first) + 1]


def test_what_leaves_no_token_is_refused_or_ends_the_answer_with_the_reason(llm):
    params = dataclasses.replace(GREEDY, allowed_token_ids=[65], bad_words=["A"])
    with pytest.raises(ValueError, match="allowed_token_ids is .*exclude all of them"):
        llm.generate(["Hello"], params)
    # A ban that comes into force on the way.
    params = dataclasses.replace(GREEDY, allowed_token_ids=[65], bad_words=["AA"])
    [output, other] = llm.generate(["Hello", "Hello"], [params, GREEDY])
    [completion] = output.outputs
    assert completion.token_ids == [65] and completion.text == "A"
    assert completion.finish_reason == "error" and "no token" in completion.stop_reason
    assert other.outputs[0].finish_reason == "length"
    # Of several answers, such a one is never better than one that is whole.
    params = dataclasses.replace(
        SAMPLED, best_of=8, allowed_token_ids=[65, 66], bad_words=["AA", "AB"]
    )
    [output] = llm.generate(["Hello"], params)
    [completion] = output.outputs
    assert completion.finish_reason == "length" and completion.token_ids[:11] == [66] * 11


def test_answer_without_text_is_asked_for_by_detokenize(llm):
    [output] = llm.generate(["Hello"], dataclasses.replace(GREEDY, detokenize=False))
    assert output.outputs[0].text == ""
    assert ids_of(output) == ids_of(llm.generate(["Hello"], GREEDY)[0])


def test_prefix_cache_is_not_read_where_that_is_asked(llm):
    llm.engine.reset_prefix_cache()
    skips = dataclasses.replace(GREEDY, skip_reading_prefix_cache=True)
    counts = [llm.generate([PROMPT], params)[0].num_cached_tokens for params in (GREEDY, skips)]
    assert counts == [0, 0]
    assert llm.generate([PROMPT], GREEDY)[0].num_cached_tokens == 32


class TestLogitsProcessors:
    def test_runs_for_those_who_name_it_with_their_arguments(self, llm):
        asked = [
            dataclasses.replace(GREEDY, extra_args={"keep_only": (65, 3)}),
            dataclasses.replace(GREEDY, extra_args={"keep_only": (66, 5)}),
            GREEDY,
        ]
        prompt = list(b"Hello")
        outputs = llm.generate([prompt] * 3, asked)
        for output, token_id, count in zip(outputs, (65, 66), (3, 5), strict=False):
            [ids] = ids_of(output)
            assert ids[:count] == [token_id] * count
            assert len({*ids[count:], token_id}) == 12 - count + 1  # nothing comes twice
            assert not set(ids) & set(prompt)
        assert ids_of(outputs[2]) == ids_of(llm.generate([prompt], GREEDY)[0])

    def test_comes_before_the_temperature_and_after_the_others(self, llm):
        sharp = dataclasses.replace(SAMPLED, temperature=2.0, extra_args={"sharpen": 2.0})
        [output] = llm.generate([PROMPT], sharp)
        assert ids_of(output) == ids_of(llm.generate([PROMPT], SAMPLED)[0])

    @pytest.mark.parametrize(
        ("extra_args", "message"),
        [
            ({"other": 1.0}, r"extra_args names 'other'; .*\['keep_only', 'sharpen'\]"),
            ({"keep_only": 1.0}, "holds 1 numbers for 'keep_only'; .*takes 2"),
            ({"sharpen": ()}, "holds 0 numbers for 'sharpen'; .*takes 1"),
        ],
    )
    def test_unknown_name_or_wrong_number_of_arguments_is_refused(self, llm, extra_args, message):
        with pytest.raises(ValueError, match=message):
            llm.generate([PROMPT], dataclasses.replace(GREEDY, extra_args=extra_args))

    def test_two_of_a_name_or_a_bare_function_are_refused(self, tiny_model):
        with pytest.raises(ValueError, match="two of the name 'sharpen'"):
            LLM(tiny_model("gqa"), logits_processors=[PROCESSORS[1]] * 2, **LIMITS)

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (lambda logits, arguments, context: logits[:1], r"returns float32\[1\]"),
            (lambda logits, arguments, context: logits.astype(jnp.float16), r"float16\[260\]"),
            (lambda logits, arguments, context: logits > 0, r"returns bool\[260\]"),
            (lambda logits, arguments, context: None, "returns None"),
            (lambda logits, arguments, context: (logits, logits), r"float32\[260\], float32"),
        ],
    )
    def test_wrong_result_is_refused_when_the_engine_is_made(self, tiny_model, function, message):
        processor = LogitsProcessor(name="wrong", function=function)
        with pytest.raises(ValueError, match=f"logits processor 'wrong' .*{message}"):
            LLM(tiny_model("gqa"), logits_processors=[processor], **LIMITS)


class TestScore:
    def test_is_what_generation_reported(self, llm):
        params = dataclasses.replace(SAMPLED, n=3, logprobs=0)
        [output, other] = llm.generate([PROMPT, [9] * 20], params)
        completions = ids_of(output) + ids_of(other)
        prompts = [PROMPT] * 3 + [[9] * 20] * 3
        scored = llm.score(prompts, completions)
        for score, completion in zip(scored, [*output.outputs, *other.outputs], strict=True):
            assert score.token_ids == completion.token_ids
            np.testing.assert_allclose(score.logprobs, completion.token_logprobs, atol=1e-4)
            assert score.sum == pytest.approx(completion.cumulative_logprob, abs=1e-3)
            ranks = [entries[i].rank for i, entries in zip(
                completion.token_ids, completion.logprobs, strict=True
            )]  # fmt: skip
            assert score.ranks == ranks and score.is_greedy == (set(ranks) == {1})

    def test_reads_the_prompt_from_the_cache_and_equals_a_score_that_does_not(self, llm):
        llm.engine.reset_prefix_cache()
        completion = list(range(100, 120))
        [cold] = llm.score(PROMPT, completion)
        [warm] = llm.score(PROMPT, completion)
        # Row 39 predicts the completion's first token and must be computed: 2 blocks before it.
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
        np.testing.assert_allclose(warm.logprobs, cold.logprobs, atol=1e-5)
        expected = naive_logprobs(PROMPT, completion)[np.arange(20), completion]
        np.testing.assert_allclose(warm.logprobs, expected, atol=1e-3)

    def test_greedy_answer_is_greedy(self, llm):
        [output] = llm.generate([PROMPT], GREEDY)
        [ids] = ids_of(output)
        [score] = llm.score(PROMPT, ids)
        assert score.is_greedy and score.ranks == [1] * 12
        [score] = llm.score(PROMPT, [*ids[:-1], (ids[-1] + 1) % 256])
        assert not score.is_greedy

    def test_one_prompt_serves_all_completions_and_text_is_divided_as_a_whole(self, llm):
        scored = llm.score("Hello", [" world", "", " there"])
        assert [bytes(score.token_ids) for score in scored] == [b" world", b"", b" there"]
        assert [bytes(score.prompt_token_ids) for score in scored] == [b"Hello"] * 3
        assert scored[1].logprobs == [] and scored[1].sum == 0.0 and scored[1].is_greedy
        with_ids = llm.score(list(b"Hello"), [list(b" world")])
        np.testing.assert_allclose(scored[0].logprobs, with_ids[0].logprobs, atol=1e-5)

    def test_loglikelihood_is_the_sum_and_whether_greedy_gives_it(self, llm):
        pairs = [("Hello", " world"), ("Hel", "lo")]
        expected = [(score.sum, score.is_greedy) for pair in pairs for score in llm.score(*pair)]
        got = llm.loglikelihood(pairs)
        assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
        np.testing.assert_allclose([s for s, _ in got], [s for s, _ in expected], atol=1e-4)

    @pytest.mark.parametrize("pair", ["ab", ("a",), (1, 2), None, ["a", None]])
    def test_what_is_no_pair_of_texts_is_refused(self, llm, pair):
        jaxtyping.config.update("jaxtyping_disable", True)  # as in production
        try:
            with pytest.raises(ValueError, match="pairs holds .*each entry must be two texts"):
                llm.loglikelihood([("a", "b"), pair])
        finally:
            jaxtyping.config.update("jaxtyping_disable", False)

    def test_mistakes_are_named_before_anything_runs(self, llm):
        steps = llm.engine.stats.steps
        with pytest.raises(ValueError, match="2 prompts and 3 completions"):
            llm.score(["a", "b"], ["c", "d", "e"])
        with pytest.raises(ValueError, match="a prompt has no tokens"):
            llm.score([[]], [[1, 2]])
        with pytest.raises(ValueError, match="has 401 tokens"):
            llm.score([PROMPT, [1]], [[1], [2] * 400])
        assert llm.engine.stats.steps == steps and not llm.engine.has_unfinished_requests

    def test_fills_the_context_to_its_end(self, llm):
        [score] = llm.score([[1]], [[2] * (LIMITS["max_model_len"] - 1)])
        assert len(score.logprobs) == LIMITS["max_model_len"] - 1

    def test_is_the_same_when_preempted(self, llm, tiny_model):
        pairs = [([i] * 30, list(range(i, i + 60))) for i in range(6)]
        expected = llm.score(*zip(*pairs, strict=True))
        options = LIMITS | SMALL_POOL | {"enable_prefix_caching": False}
        with LLM(tiny_model("gqa"), **options) as small:
            # Beside answers that grow, so that scores are preempted with a part done.
            for index in range(4):
                small.engine.add_request(f"grows {index}", [index] * 20, dataclasses.replace(
                    GREEDY, max_tokens=100))  # fmt: skip
            scored = small.score(*zip(*pairs, strict=True))
        for score, other in zip(scored, expected, strict=True):
            np.testing.assert_allclose(score.logprobs, other.logprobs, atol=1e-4)

    def test_function_scores_with_a_module(self, llm):
        [score] = jpaged.score(llm.engine.runner.model(), [PROMPT], [[1, 2, 3]], **LIMITS)
        np.testing.assert_allclose(
            score.logprobs, llm.score(PROMPT, [1, 2, 3])[0].logprobs, atol=1e-5
        )


TEMPLATE = "{{ mood }}:{% for m in messages %}{{ m.content }}|{% endfor %}{{ tools }}"


class TestChat:
    MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]

    def test_final_message_is_continued(self, llm):
        [output] = llm.chat(
            self.MESSAGES, GREEDY, add_generation_prompt=False, continue_final_message=True
        )
        assert output.prompt.endswith("Hel")
        assert output.prompt_token_ids == llm.tokenizer.encode(
            output.prompt, add_special_tokens=False
        )
        with pytest.raises(ValueError, match="continue_final_message"):
            llm.chat(self.MESSAGES, GREEDY, continue_final_message=True)

    def test_template_and_its_arguments_can_be_given(self, llm):
        [output] = llm.chat(
            self.MESSAGES,
            GREEDY,
            chat_template=TEMPLATE,
            chat_template_kwargs={"mood": "glad"},
            tools=[{"name": "x"}],
        )
        assert output.prompt.startswith("glad:Hi|Hel|") and "x" in output.prompt

    def test_parts_and_strings_give_the_same_prompt(self, llm):
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        [output] = llm.chat(parts, GREEDY)
        [other] = llm.chat(self.MESSAGES[:1], GREEDY)
        assert output.prompt_token_ids == other.prompt_token_ids


class TestDefaults:
    @pytest.fixture
    def directory(self, tiny_model, tmp_path):
        for file in tiny_model("gqa").iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        path = tmp_path / "generation_config.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(config | {"temperature": 0.5, "top_k": 7, "max_new_tokens": 5}))
        return tmp_path

    def test_come_from_the_model_unless_told_otherwise(self, directory):
        expected = SamplingParams(temperature=0.5, top_k=7, max_tokens=5)
        with LLM(directory, **LIMITS) as llm:
            assert llm.default_params == llm.get_default_sampling_params() == expected
            [output] = llm.generate([PROMPT])
            [given] = llm.generate([PROMPT], SamplingParams(ignore_eos=True))
        assert len(output.outputs[0].token_ids) <= 5 and len(given.outputs[0].token_ids) == 16
        with LLM(directory, override_generation_config={"top_k": 9}, **LIMITS) as llm:
            assert llm.default_params == dataclasses.replace(expected, top_k=9)
        with LLM(directory, generation_config="vllm", **LIMITS) as llm:
            assert llm.default_params == SamplingParams()

    def test_bad_values_are_refused_by_name(self, directory):
        (directory / "generation_config.json").write_text('{"temperature": -1.0}')
        with pytest.raises(ValueError, match="generation_config.json: .*temperature is -1.0"):
            LLM(directory, **LIMITS)
        with pytest.raises(ValueError, match="generation_config is 'x'"):
            LLM(directory, generation_config="x", **LIMITS)


def test_priorities_are_handed_to_the_scheduler(tiny_model):
    options = LIMITS | {"max_num_seqs": 1, "scheduling_policy": "priority"}
    with LLM(tiny_model("gqa"), **options) as llm:
        order = []
        for delta in llm.stream([[1], [2], [3]], [GREEDY] * 3, priority=[5, 1, 3]):
            if delta.output is not None:
                order.append(delta.prompt_index)
        with pytest.raises(ValueError, match="priority has 2 entries for 3 prompts"):
            llm.generate([[1], [2], [3]], GREEDY, priority=[1, 2])
    assert order == [1, 2, 0]
