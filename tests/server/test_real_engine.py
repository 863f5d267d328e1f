"""The server over a real engine: HTTP changes nothing of what an answer is."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import jpaged
from jpaged.config import EngineConfig
from tests.invariance.engines import LIMITS
from tests.server.running import RunningServer, metric

REAL = "server.engine_process:make_engines"
PROMPTS = ["a", "hello there", "once upon a time, " * 5, "\u00e9\u4e2d\U0001f600"]


@pytest.fixture(scope="module")
def real(tiny_model):
    with RunningServer(tiny_model("gqa"), factory=REAL, config=EngineConfig(**LIMITS)) as server:
        yield server


@pytest.fixture(scope="module")
def llm(tiny_model):
    with jpaged.LLM(str(tiny_model("gqa")), **LIMITS) as llm:
        yield llm


def test_answers_are_those_of_the_library(real, llm):
    params = jpaged.SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True)
    expected = llm.generate(PROMPTS, params)

    def ask(prompt: str) -> dict:
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 3,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        return real.post("/v1/completions", body).json()["choices"][0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, PROMPTS))
    for choice, output in zip(found, expected, strict=True):
        completion = output.outputs[0]
        assert choice["text"] == completion.text
        assert choice["token_ids"] == completion.token_ids
        assert choice["prompt_token_ids"] == output.prompt_token_ids
        values = completion.token_logprobs
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(values, abs=1e-4)


def test_seeded_samples_are_those_of_the_library(real, llm):
    params = jpaged.SamplingParams(n=3, temperature=0.9, max_tokens=12, seed=5, top_p=0.9)
    (expected,) = llm.generate(["sample"], params)
    body = {"model": "tiny", "prompt": "sample", "n": 3, "temperature": 0.9, "max_tokens": 12}
    done = real.post("/v1/completions", body | {"seed": 5, "top_p": 0.9}).json()
    assert [c["text"] for c in done["choices"]] == [c.text for c in expected.outputs]


def test_chats_have_one_beginning(real, llm):
    """Case H-15: the ids are those of the template."""
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [
        {"type": "text", "text": "hi"}]}]  # fmt: skip
    body = {"model": "tiny", "messages": messages, "max_tokens": 3, "return_token_ids": True}
    done = real.post("/v1/chat/completions", body).json()
    assert done["prompt_token_ids"] == llm.tokenizer.encode_chat(messages)
    assert done["usage"]["prompt_tokens"] == len(done["prompt_token_ids"])
    raw = real.post("/v1/completions", {"model": "tiny", "prompt": "hi", "return_token_ids": True})
    assert raw.json()["choices"][0]["prompt_token_ids"] == llm.tokenizer.encode("hi")


def test_a_message_can_be_continued(real, llm):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]
    body = {
        "model": "tiny", "messages": messages, "max_tokens": 3, "return_token_ids": True,
        "continue_final_message": True, "add_generation_prompt": False, "echo": True,
    }  # fmt: skip
    done = real.post("/v1/chat/completions", body).json()
    expected = llm.tokenizer.encode_chat(
        messages, continue_final_message=True, add_generation_prompt=False
    )
    assert done["prompt_token_ids"] == expected
    assert done["choices"][0]["message"]["content"].startswith("So")


@pytest.mark.parametrize("bias", [{"260": 1}, {"-1": 1}, {"abc": 1}, {"5": 101}])
def test_biases_out_of_range_are_refused(real, bias):
    """Case H-11."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "logit_bias": bias}
    answer = real.post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logit_bias"
    assert real.post("/v1/completions", body | {"logit_bias": {"97": 100}}).status_code == 200


def test_prompt_logprobs_and_cached_tokens(real):
    body = {"model": "tiny", "prompt": "cache " * 12, "max_tokens": 2, "temperature": 0}
    real.post("/v1/completions", body)
    again = real.post("/v1/completions", body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    scored = real.post("/v1/completions", body | {"prompt_logprobs": 1}).json()
    entries = scored["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == scored["usage"]["prompt_tokens"]
    echoed = real.post("/v1/completions", body | {"echo": True, "logprobs": 1}).json()
    logprobs = echoed["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == scored["usage"]["prompt_tokens"] + 2
    assert logprobs["token_logprobs"][0] is None and logprobs["text_offset"][0] == 0


def test_nothing_compiles_after_warm_up(real):
    text = httpx.get(f"{real.url}/metrics").text
    assert metric(text, "jpaged:compilations_after_warm_up_total") == 0
    assert metric(text, "vllm:cache_config_info") == 1


def test_streams_of_text_are_whole_characters(real, llm):
    """Case H-13, end to end: an answer forced by biases would be bytes; none is cut."""
    body = {
        "model": "tiny", "prompt": "\u4e2d\u6587", "max_tokens": 40, "stream": True, "seed": 3,
        "temperature": 1.0, "ignore_eos": True,
    }  # fmt: skip
    text = ""
    for line in real.post("/v1/completions", body).text.split("\n\n")[:-2]:
        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    plain = real.post("/v1/completions", body | {"stream": False}).json()
    assert text == plain["choices"][0]["text"]


def test_an_echo_streams_the_log_probabilities_of_the_prompt(real):
    body = {"model": "tiny", "prompt": "echo", "max_tokens": 3, "temperature": 0}
    body |= {"echo": True, "logprobs": 2}
    plain = real.post("/v1/completions", body).json()["choices"][0]
    events = real.post("/v1/completions", body | {"stream": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(chunk["text"] for chunk in chunks) == plain["text"]
    for name, values in plain["logprobs"].items():
        parts = [chunk["logprobs"][name] for chunk in chunks if chunk["logprobs"]]
        assert sum(parts, []) == values
