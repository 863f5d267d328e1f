"""The adapter for lm-eval against the naive oracle, on tasks that are written here."""

import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from jpaged import lm_eval_adapter
from jpaged.llm import LLM
from jpaged.lm_eval_adapter import JpagedLM
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from tests import tiny_models
from tests.invariance import naive
from tests.invariance.engines import LIMITS
from tests.oracle import NEAR_TIE

BOS = tiny_models.BOS_TOKEN_ID
MAX_LENGTH: int = LIMITS["max_model_len"]
MULTIPLE_CHOICE = [
    {"question": "Where is the river?", "choices": ["north", "in the south"], "answer": 0},
    {"question": "Who came first?", "choices": ["Ann", "Bob", "nobody at all"], "answer": 1},
    {"question": "How many were there? ", "choices": ["3", "30"], "answer": 0},
    {"question": "Why so late?", "choices": ["rain", "🙂"], "answer": 1},
    {"question": "é?", "choices": ["a", "b"], "answer": 0},
]
# The tiny model answers "1a..." to the first.
LOGLIKELIHOOD = [
    {"text": "Where is the river?", "target": "1a"},
    {"text": "Where is the river?", "target": "1b"},
    {"text": "", "target": "Once"},
]
ROLLING = [{"text": "short"}, {"text": "".join(f"line {n}: {n**3}\n" for n in range(70))}]
# The tiny model's answer to the first holds a "<" and to the second a "t".
GENERATE = [
    {"text": "Where is the river?", "answer": "1a"},
    {"text": "Who came first?", "answer": "Ann"},
    {"text": "Hello", "answer": "Hello"},
]
UNTIL = ["<", "t"]
NUM_ANSWER_TOKENS = 12


def oracle_score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log-probability of the continuation, and whether greedy decoding would give it."""
    logits = naive.tiny_model("gqa").logits([*context, *continuation])[len(context) - 1 : -1]
    logprobs = np.log(naive.softmax(logits))[np.arange(len(continuation)), continuation]
    return float(logprobs.sum()), bool((logits.argmax(axis=-1) == continuation).all())


def oracle_answer(prompt: list[int], num_tokens: int = NUM_ANSWER_TOKENS) -> list[int]:
    """Greedy ids after a prompt."""
    token_ids: list[int] = []
    for _ in range(num_tokens):
        logits = naive.tiny_model("gqa").logits([*prompt, *token_ids])[-1]
        token_id, margin = naive.draw(logits, SamplingParams(temperature=0.0), 0, 0)
        assert margin > NEAR_TIE, "choose another prompt"
        token_ids.append(token_id)
    return token_ids


def request(kind: Any, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def write_task(directory: Path, documents: list[dict[str, Any]], **config: Any) -> str:
    """Writes a task and its documents, and returns its name."""
    name = config["output_type"]
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    files = {"data_files": {"test": str(data)}, "cache_dir": str(directory / "cache")}
    config |= {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    (directory / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML, too
    return name


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    write_task(
        directory,
        MULTIPLE_CHOICE,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    write_task(
        directory,
        LOGLIKELIHOOD,
        output_type="loglikelihood",
        doc_to_text="{{text}}",
        doc_to_target="{{target}}",
        target_delimiter="",
        metric_list=[{"metric": "acc"}, {"metric": "perplexity"}],
    )
    write_task(
        directory,
        ROLLING,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )
    write_task(
        directory,
        GENERATE,
        output_type="generate_until",
        doc_to_text="{{text}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": UNTIL, "max_gen_toks": NUM_ANSWER_TOKENS, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )
    return directory


@pytest.fixture(scope="module")
def evaluate(tasks) -> Callable[..., dict[str, Any]]:
    def run(names: list[str], **arguments: Any) -> dict[str, Any]:
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        return lm_eval.simple_evaluate(
            tasks=names, task_manager=manager, bootstrap_iters=0, **arguments
        )  # type: ignore[return-value]

    return run


@pytest.fixture(scope="module")
def results(tiny_model, evaluate) -> dict[str, Any]:
    """All tasks in one run, with all that lm-eval's command line sends by default."""
    return evaluate(
        ["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"],
        model="jpaged",
        model_args={"pretrained": str(tiny_model("gqa")), **LIMITS},
        batch_size=1,
        device="cuda:0",
    )


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(tiny_model("gqa"), **LIMITS) as llm:
        yield llm


@pytest.fixture
def model(llm) -> JpagedLM:
    return JpagedLM(llm)


def test_multiple_choice_is_decided_by_the_log_probability_of_each_choice(results):
    is_right, is_right_per_byte = [], []
    samples = results["samples"]["multiple_choice"]
    for document, sample in zip(MULTIPLE_CHOICE, samples, strict=True):
        question = document["question"]
        context = question.rstrip().encode()
        sums = []
        for choice, [answer] in zip(document["choices"], sample["resps"], strict=True):
            continuation = f"{question} {choice}".encode()[len(context) :]
            total, is_greedy = oracle_score(list(context), list(continuation))
            assert answer == (pytest.approx(total, abs=1e-3), is_greedy)
            sums.append(total)
        is_right.append(np.argmax(sums) == document["answer"])
        per_byte = [s / len(c.encode()) for s, c in zip(sums, document["choices"], strict=True)]
        is_right_per_byte.append(np.argmax(per_byte) == document["answer"])
    scores = results["results"]["multiple_choice"]
    assert 0 < np.mean(is_right_per_byte) < np.mean(is_right) < 1
    assert scores["acc,none"] == pytest.approx(np.mean(is_right))
    assert scores["acc_norm,none"] == pytest.approx(np.mean(is_right_per_byte))


def test_continuation_is_greedy_if_every_token_is_the_best_one(results):
    expected = [
        oracle_score(list(document["text"].encode()) or [BOS], list(document["target"].encode()))
        for document in LOGLIKELIHOOD
    ]
    assert [is_greedy for _, is_greedy in expected] == [True, False, False]
    scores = results["results"]["loglikelihood"]
    assert scores["acc,none"] == pytest.approx(1 / 3)
    mean = np.mean([total for total, _ in expected])
    assert math.log(scores["perplexity,none"]) == pytest.approx(-mean, abs=1e-3)


def test_long_text_is_scored_in_windows_and_each_token_once(results):
    totals, num_bytes = [], 0
    for document in ROLLING:
        text = list(document["text"].encode())
        size = MAX_LENGTH - 1  # tokens scored by a full window, after one token of context
        total = 0.0
        for start in range(0, len(text), size):
            end = min(start + size, len(text))
            # The last window has fewer tokens to score, and so more of the text before them.
            before = [BOS] if start == 0 else text[end - MAX_LENGTH : start]
            total += oracle_score(before, text[start:end])[0]
        totals.append(total)
        num_bytes += len(text)
    assert len(text) > 2 * size and len(text) % size
    samples = results["samples"]["loglikelihood_rolling"]
    for sample, total in zip(samples, totals, strict=True):
        assert sample["resps"] == [[pytest.approx(total, rel=1e-5)]]
    score = results["results"]["loglikelihood_rolling"]["bits_per_byte,none"]
    assert score == pytest.approx(-sum(totals) / math.log(2) / num_bytes, rel=1e-5)


def test_answer_ends_before_a_stop_string_or_at_its_greatest_length(results, llm):
    samples = results["samples"]["generate_until"]
    num_cut = 0
    for document, sample in zip(GENERATE, samples, strict=True):
        whole = llm.tokenizer.decode(oracle_answer(list(document["text"].encode())))
        cut = min((whole.find(stop) for stop in UNTIL if stop in whole), default=len(whole))
        num_cut += cut < len(whole)
        assert sample["resps"] == [[whole[:cut]]]
    assert num_cut == 2
    assert results["results"]["generate_until"]["exact_match,none"] == 0.0


def test_llm_loglikelihood_is_what_the_adapter_reports(model):
    pairs = [("Hello", " there"), ("", "there"), ("Hello ", "there"), ("Hello", "")]
    answers = model.loglikelihood([request("loglikelihood", *pair) for pair in pairs[:3]])
    assert model.llm.loglikelihood(pairs[:3]) == answers
    with pytest.raises(ValueError, match="no tokens.*'Hello', ''"):
        model.loglikelihood([request("loglikelihood", *pairs[3])])


def test_context_that_is_too_long_is_cut_from_the_left_with_a_warning(model, caplog):
    context, continuation = "abcdefg " * 60 + "z", " and so on"
    room = MAX_LENGTH - len(continuation)
    with caplog.at_level(logging.WARNING, logger=lm_eval_adapter.__name__):
        [(total, _)] = model.loglikelihood([request("loglikelihood", context, continuation)])
    assert f"a context of {len(context)} tokens is cut to its last {room}" in caplog.text
    expected, _ = oracle_score(list(context.encode()[-room:]), list(continuation.encode()))
    assert total == pytest.approx(expected, abs=1e-3)

    [text] = model.generate_until([request("generate_until", context, {"max_gen_toks": 3})])
    prompt = list(context.encode()[-(MAX_LENGTH - 3) :])
    assert text == model.tokenizer.decode(oracle_answer(prompt, num_tokens=3))


def test_what_leaves_no_room_for_a_context_is_refused(model):
    with pytest.raises(ValueError, match=f"{MAX_LENGTH} tokens .* max_model_len is {MAX_LENGTH}"):
        model.loglikelihood([request("loglikelihood", "a", "b" * MAX_LENGTH)])
    with pytest.raises(ValueError, match="500 tokens .*max_gen_toks"):
        model.generate_until([request("generate_until", "a", {"max_gen_toks": 500})])


def test_generation_is_greedy_unless_sampling_is_asked_for(model):
    length = {"max_new_tokens": NUM_ANSWER_TOKENS}
    sampled = {"temperature": 1.5, "top_k": 50, "seed": 3}
    kwargs = [{}, {"do_sample": False, **sampled}, {"do_sample": True, **sampled}, sampled]
    texts = model.generate_until(
        [request("generate_until", "Hello", length | some) for some in kwargs]
    )
    greedy = model.tokenizer.decode(oracle_answer(list(b"Hello")))
    params = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, skip_special_tokens=False, **sampled)
    [output] = model.llm.generate("Hello", params)
    assert output.outputs[0].text != greedy
    assert texts == [greedy] * 2 + [output.outputs[0].text] * 2


@pytest.mark.parametrize("name", ["num_beams", "typical_p", "n", "stop", "ignore_eos"])
def test_generation_argument_that_means_nothing_here_is_refused_by_name(model, name):
    with pytest.raises(ValueError, match=f"holds {name}; jpaged takes until, max_gen_toks"):
        model.generate_until([request("generate_until", "Hello", {name: 1})])


def test_text_of_a_special_token_stops_an_answer(model):
    kwargs = {"max_gen_toks": 4, "allowed_token_ids": [tiny_models.IM_START_TOKEN_ID]}
    texts = model.generate_until(
        [
            request("generate_until", "Hello", kwargs),
            request("generate_until", "Hello", kwargs | {"until": "<|im_start|>"}),
        ]
    )
    assert texts == ["<|im_start|>" * 4, ""]


def test_end_of_sequence_token_ends_an_answer_and_is_not_in_its_text(model):
    kwargs = {"max_gen_toks": 4, "allowed_token_ids": [tiny_models.EOS_TOKEN_ID]}
    assert model.generate_until([request("generate_until", "Hello", kwargs)]) == [""]


def test_chat_template_renders_the_prompts(model, evaluate):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    results = evaluate(
        ["generate_until"],
        model=model,
        apply_chat_template=True,
        system_instruction="Be brief.",
        samples={"generate_until": [2]},
    )
    [sample] = results["samples"]["generate_until"]
    [(prompt, _)] = sample["arguments"]
    assert prompt == model.tokenizer.render_chat(messages)
    assert model.chat_template(True) == model.tokenizer.chat_template


def test_chat_that_ends_with_the_assistant_is_continued(model):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well,"}]
    text = model.apply_chat_template(chat, add_generation_prompt=False)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nWell,"


def write_tokenizer(directory: Path, chat_template: str) -> Tokenizer:
    """A tokenizer that adds BOS to every text, as Llama's do, with a template that writes one."""
    tiny_models.write_tiny_model(directory, "gqa")
    for name, entry in (
        ("tokenizer_config", {"chat_template": chat_template}),
        (
            "tokenizer",
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                    "special_tokens": {
                        "<|bos|>": {"id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"]}
                    },
                }
            },
        ),
    ):
        path = directory / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entry))
    return Tokenizer.from_directory(directory)


def test_prompt_never_begins_twice(model, monkeypatch, tmp_path):
    template = "<|bos|>{{ messages[0]['content'] }}"
    monkeypatch.setattr(model, "tokenizer", write_tokenizer(tmp_path, template))
    prompt = model.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == "<|bos|>Hi"
    assert model.tok_encode(prompt) == model.tok_encode("Hi") == [BOS, *b"Hi"]
    assert model.tok_encode("Hi", add_special_tokens=False) == list(b"Hi")

    # The first window brings the only BOS, which is not scored.
    [total] = model.loglikelihood_rolling([request("loglikelihood_rolling", "Hi")])
    assert total == pytest.approx(oracle_score([BOS], list(b"Hi"))[0], abs=1e-3)


def test_system_message_is_left_out_if_the_template_refuses_it(
    model, monkeypatch, tmp_path, caplog
):
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[0]['role'] }}{{ mood }}"
    )
    monkeypatch.setattr(model, "tokenizer", write_tokenizer(tmp_path, template))
    monkeypatch.setattr(model, "_chat_template_args", {"mood": "!"})
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
    assert model.apply_chat_template([system, user]) == "user!"
    assert "leaving out the system message: chat_template refuses these" in caplog.text
    with pytest.raises(ValueError, match="no system"):
        model.apply_chat_template([system])


def test_chat_templates_have_different_names_in_the_cache_of_requests(llm):
    names = [
        JpagedLM(llm, chat_template_args=args).tokenizer_name
        for args in (None, {}, {"mood": True}, {"mood": False}, '{"mood": false}')
    ]
    assert names[0] == names[1] and names[3] == names[4] and len(set(names)) == 3


def test_interrupted_run_goes_on_with_the_answers_it_has(model, evaluate, monkeypatch, tmp_path):
    monkeypatch.setattr(lm_eval_adapter, "_NUM_PAIRS", 2)
    score, calls = model.llm.score, []

    def score_until_interrupted(prompts, completions, **options):
        calls.append(len(prompts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(prompts, completions, **options)

    monkeypatch.setattr(model.llm, "score", score_until_interrupted)
    arguments = {"model": model, "use_cache": str(tmp_path / "answers")}
    with pytest.raises(KeyboardInterrupt):
        evaluate(["loglikelihood"], **arguments)
    results = evaluate(["loglikelihood"], **arguments)
    assert calls == [2, 1, 1]
    assert results["results"]["loglikelihood"]["acc,none"] == pytest.approx(1 / 3)


def test_text_without_context_stands_after_the_beginning_or_else_the_end_token(model, monkeypatch):
    for name, token_id in (("bos_token_id", BOS), ("eos_token_id", tiny_models.EOS_TOKEN_ID)):
        assert model.prefix_token_id == token_id
        [(total, _)] = model.loglikelihood([request("loglikelihood", "", "Once")])
        assert total == pytest.approx(oracle_score([token_id], list(b"Once"))[0], abs=1e-3)
        monkeypatch.setattr(model.tokenizer, name, None)
    with pytest.raises(ValueError, match="neither a bos_token nor an eos_token"):
        model.loglikelihood([request("loglikelihood", "", "Once")])


def test_options_are_checked_by_name(llm, tiny_model):
    with pytest.raises(ValueError, match="max_num_seqs, dtype: give these to the LLM"):
        JpagedLM(llm, max_num_seqs=4, dtype="float32")
    with pytest.raises(ValueError, match="no option 'max_batch_size'"):
        JpagedLM(str(tiny_model("gqa")), max_batch_size=4)
    with LLM(llm.engine.runner.model(), **LIMITS) as bare, pytest.raises(ValueError, match="token"):
        JpagedLM(bare)


def test_module_runs_the_command_line_of_lm_eval_with_the_model_registered():
    script = (
        "import runpy, sys, lm_eval.__main__ as main\n"
        "from lm_eval.api.registry import get_model\n"
        "main.cli_evaluate = lambda: print(get_model('jpaged').__name__)\n"
        "runpy.run_module('jpaged.lm_eval_adapter', run_name='__main__')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("JpagedLM\n", 0), run.stderr
