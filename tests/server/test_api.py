"""Shapes and words of the API, over an engine that answers letters."""

import asyncio
import json
import time

import httpx
import openai
import pytest

from benchmarks.letter_engine import POISON_NAN, answer_to
from tests.server.running import RunningServer, metric


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def expected(server: RunningServer, prompt: str, count: int) -> str:
    return answer_to(server.tokenizer.encode(prompt), count)


def test_completions_and_usage(fake):
    done = client_of(fake).completions.create(model="tiny", prompt="hello", max_tokens=9)
    assert done.id.startswith("cmpl-") and done.object == "text_completion"
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.index) == (
        expected(fake, "hello", 9), "length", 0
    )  # fmt: skip
    num_prompt = len(fake.tokenizer.encode("hello"))
    assert done.usage is not None and done.usage.prompt_tokens == num_prompt
    assert (done.usage.completion_tokens, done.usage.total_tokens) == (9, num_prompt + 9)
    assert done.usage.prompt_tokens_details is not None


def test_streams_say_what_plain_answers_say(fake):
    client = client_of(fake)
    text = ""
    for chunk in client.completions.create(model="tiny", prompt="hello", max_tokens=9, stream=True):
        text += chunk.choices[0].text
        assert chunk.usage is None
    assert text == expected(fake, "hello", 9)


def test_chats(fake):
    messages = [{"role": "user", "content": "hello"}]
    client = client_of(fake)
    done = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5)  # pyright: ignore[reportArgumentType, reportCallIssue]
    ids = fake.tokenizer.encode_chat(messages, add_generation_prompt=True)
    assert done.choices[0].message.content == answer_to(ids, 5)
    assert done.choices[0].message.role == "assistant" and done.id.startswith("chatcmpl-")
    assert done.usage is not None and done.usage.prompt_tokens == len(ids)
    chunks = list(
        client.chat.completions.create(  # pyright: ignore[reportCallIssue, reportArgumentType]
            model="tiny", messages=messages, max_tokens=5, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer_to(ids, 5)
    assert [c.choices[0].finish_reason for c in chunks].count("length") == 1


def test_the_async_client_streams(fake):
    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="x") as client:
            stream = await client.completions.create(
                model="tiny", prompt="async", max_tokens=7, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(run()) == expected(fake, "async", 7)


@pytest.mark.parametrize("include_usage", [True, False, None])
def test_indices_and_usage_of_several_prompts_and_answers(fake, include_usage):
    """Case H-16."""
    body = {"model": "tiny", "prompt": ["a", "bc", "def"], "n": 2, "max_tokens": 4, "seed": 1}
    plain = fake.post("/v1/completions", body).json()
    assert [choice["index"] for choice in plain["choices"]] == list(range(6))
    num_prompt = sum(len(fake.tokenizer.encode(p)) for p in ("a", "bc", "def"))
    assert plain["usage"]["prompt_tokens"] == num_prompt
    assert plain["usage"]["completion_tokens"] == 24
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    lines = fake.post("/v1/completions", body | {"stream": True} | options).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and lines.count("data: [DONE]") == 1
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    empty = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(empty) == (1 if include_usage else 0)
    if include_usage:
        assert chunks[-1]["usage"] == plain["usage"] | {
            "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
        }
    texts, reasons = [""] * 6, [0] * 6
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] += choice["finish_reason"] is not None
    assert texts == [choice["text"] for choice in plain["choices"]] and reasons == [1] * 6


@pytest.mark.parametrize("max_tokens", ["absent", None, 0, -1, 1.5])
def test_max_tokens_in_all_its_forms(fake, max_tokens):
    """Case H-08."""
    body = {"model": "tiny", "prompt": "hi"}
    body |= {} if max_tokens == "absent" else {"max_tokens": max_tokens}
    done = fake.post("/v1/completions", body)
    if max_tokens in (-1, 1.5):
        assert done.status_code == 400 and done.json()["error"]["param"] == "max_tokens"
    else:
        count = 0 if max_tokens == 0 else 16
        assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == count
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    if max_tokens in ("absent", None):
        chat |= {} if max_tokens is None else {"max_tokens": None}
        done = fake.post("/v1/chat/completions", chat).json()
        assert done["usage"]["total_tokens"] == 512  # up to the context limit


def test_echo_of_a_prompt_that_nothing_follows(fake):
    """Case H-08, with logprobs."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = fake.post("/v1/completions", body).json()["choices"]
    assert choice["text"] == "hi" and choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == len(fake.tokenizer.encode("hi"))


def test_logprobs_in_both_forms(fake):
    """Case H-12."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
    for value, count in ((None, None), (0, 0), (2, 2)):
        done = fake.post("/v1/completions", body | {"logprobs": value}).json()
        logprobs = done["choices"][0]["logprobs"]
        if count is None:
            assert logprobs is None
            continue
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 3
        assert (logprobs["top_logprobs"] is None) == (count == 0)
    assert fake.post("/v1/completions", body | {"logprobs": -1}).status_code == 400
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    for top in (None, 0, 3):
        done = fake.post("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": top})
        content = done.json()["choices"][0]["logprobs"]["content"]
        assert len(content) == 3 and len(content[0]["top_logprobs"]) == (top or 0)
        assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    for wrong in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": -1}):
        assert fake.post("/v1/chat/completions", chat | wrong).status_code == 400
    assert fake.post("/v1/chat/completions", chat | {"logprobs": False}).status_code == 200


def test_a_stop_string_ends_streams_and_plain_answers_alike(fake):
    text = expected(fake, "stop", 60)
    stop = text[20:23]
    body = {"model": "tiny", "prompt": "stop", "max_tokens": 60, "stop": [stop, "zzz"]}
    plain = fake.post("/v1/completions", body).json()
    (choice,) = plain["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        text[: text.index(stop)], "stop", stop
    )  # fmt: skip
    assert plain["usage"]["completion_tokens"] == text.index(stop) + 3
    lines = fake.post("/v1/completions", body | {"stream": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["finish_reason"] == "stop"
    fake.wait_until_idle()


BAD = {
    "cut off": ('{"model": "ti', 400, None),
    "a list": ("[]", 400, None),
    "empty": ("", 400, None),
    "NaN": ('{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, None),
    "unknown model": ({"model": "nope", "prompt": "x"}, 404, "model"),
    "no prompt": ({"model": "tiny"}, 400, "prompt"),
    "empty prompt": ({"model": "tiny", "prompt": []}, 400, "prompt"),
    "prompt of objects": ({"model": "tiny", "prompt": [{}]}, 400, "prompt"),
    "id outside": ({"model": "tiny", "prompt": [-1]}, 400, None),
    "temperature": ({"model": "tiny", "prompt": "x", "temperature": "hot"}, 400, "temperature"),
    "top_p": ({"model": "tiny", "prompt": "x", "top_p": 2}, 400, "top_p"),
    "n": ({"model": "tiny", "prompt": "x", "n": 0}, 400, "n"),
    "stop": ({"model": "tiny", "prompt": "x", "stop": [1]}, 400, "stop"),
    "stops": ({"model": "tiny", "prompt": "x", "stop": list("abcde")}, 400, "stop"),
    "suffix": ({"model": "tiny", "prompt": "x", "suffix": "y"}, 400, "suffix"),
    "beams": ({"model": "tiny", "prompt": "x", "use_beam_search": True}, 400, "use_beam_search"),
    "json": (
        {"model": "tiny", "prompt": "x", "response_format": {"type": "json_object"}},
        400, "response_format",
    ),
    "guided": ({"model": "tiny", "prompt": "x", "guided_regex": "a+"}, 400, "guided_regex"),
    "stream options": (
        {"model": "tiny", "prompt": "x", "stream_options": {"include_usage": True}},
        400, "stream_options",
    ),
    "salt": ({"model": "tiny", "prompt": "x", "cache_salt": "a/b"}, 400, "cache_salt"),
    "priority": ({"model": "tiny", "prompt": "x", "priority": 1}, 400, "priority"),
    "too long": ({"model": "tiny", "prompt": "x" * 600}, 400, "prompt"),
    "no room": ({"model": "tiny", "prompt": "x", "max_tokens": 600}, 400, "max_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_faulty_requests_get_the_envelope(fake, case, stream):
    """Case H-17."""
    body, status, param = BAD[case]
    if isinstance(body, dict):
        body = json.dumps(body | ({} if case == "stream options" else {"stream": stream}))
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{fake.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    if param is not None:
        assert error["param"] == param and error["message"]


@pytest.mark.parametrize("messages", ["absent", [], "text", [{}], [{"role": 1}], [[]], None])
def test_faulty_messages(fake, messages):
    body = {"model": "tiny"} | ({} if messages == "absent" else {"messages": messages})
    answer = fake.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


def test_other_faults(fake):
    """Case H-17: content type, method, route."""
    answer = httpx.post(f"{fake.url}/v1/completions", content="{}")
    assert answer.status_code in (400, 415) and "content type" in answer.json()["error"]["message"]
    assert fake.get("/v1/completions").status_code == 405
    assert fake.get("/v1/completions").json()["error"]["code"] == 405
    assert fake.get("/nothing").status_code == 404
    assert fake.get("/nothing").json()["error"]["type"] == "NotFoundError"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client_of(fake).completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="top_p is 2"):
        client_of(fake).completions.create(model="tiny", prompt="x", top_p=2)


def test_defaults_of_what_is_not_offered_are_accepted(fake):
    body = {
        "model": "tiny", "prompt": "x", "suffix": None, "use_beam_search": False,
        "response_format": {"type": "text"}, "tools": None, "tool_choice": "none", "user": "me",
        "length_penalty": 1.0, "guided_json": None, "logit_bias": None, "best_of": 1,
    }  # fmt: skip
    answer = fake.post("/v1/completions", body)
    assert answer.status_code == 200 and "x-jpaged-ignored" not in answer.headers


def test_what_nobody_knows_is_named(fake):
    answer = fake.post("/v1/completions", {"model": "tiny", "prompt": "x", "foo": 1, "bar": [2]})
    assert answer.status_code == 200 and answer.headers["x-jpaged-ignored"] == "bar, foo"
    answer = fake.post("/v1/completions", {"model": "tiny", "prompt": "a", "\x1f\r\nü": 1})
    assert answer.status_code == 200 and answer.headers["x-jpaged-ignored"] == "????"


def test_request_ids_come_back(fake):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    answer = fake.post("/v1/completions", body, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1" and answer.json()["id"] == "cmpl-abc-1"
    other = fake.post("/v1/completions", body)
    assert other.json()["id"] == "cmpl-" + other.headers["x-request-id"]


def test_models_tokens_and_the_rest(fake):
    data = fake.get("/v1/models").json()["data"]
    assert [card["id"] for card in data] == ["tiny", "tiny-alias"]
    assert data[0]["max_model_len"] == 512
    assert fake.get("/v1/models/tiny").json()["id"] == "tiny"
    assert fake.get("/v1/models/none").status_code == 404
    found = fake.post("/tokenize", {"prompt": "hello", "return_token_strs": True}).json()
    ids = fake.tokenizer.encode("hello")
    assert (found["count"], found["tokens"], found["max_model_len"]) == (len(ids), ids, 512)
    assert len(found["token_strs"]) == len(ids)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert fake.post("/tokenize", chat).json()["tokens"] == fake.tokenizer.encode_chat(
        chat["messages"]
    )
    back = fake.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert back == fake.tokenizer.decode(ids, skip_special_tokens=False)
    assert fake.post("/detokenize", {"tokens": [10**6]}).status_code == 400
    assert fake.get("/health").status_code == fake.get("/ping").status_code == 200
    assert set(fake.get("/version").json()) == {"version"}
    assert fake.get("/load").json() == {"server_load": 0}
    assert fake.get("/openapi.json").json()["openapi"] == "3.1.0"


def test_an_answer_that_ends_in_an_error_is_a_500(fake):
    body = {"model": "tiny", "prompt": POISON_NAN}
    assert fake.post("/v1/completions", body).status_code == 500
    lines = fake.post("/v1/completions", body | {"stream": True}).text
    assert "InternalServerError" in lines
    fake.wait_until_idle()


def test_metrics_count(fake):
    before = fake.get("/metrics").text
    fake.post("/v1/completions", {"model": "tiny", "prompt": "count me", "max_tokens": 7})
    fake.wait_until_idle()
    after = fake.get("/metrics").text
    for name, count in (
        ("vllm:generation_tokens_total", 7),
        ("vllm:prompt_tokens_total", len(fake.tokenizer.encode("count me"))),
        ("vllm:time_to_first_token_seconds_count", 1),
        ("vllm:inter_token_latency_seconds_count", 6),
        ("vllm:e2e_request_latency_seconds_count", 1),
    ):
        assert metric(after, name) - metric(before, name) == count, name
    assert metric(after, "vllm:num_requests_running", model_name="tiny") == 0
    assert metric(after, "vllm:gpu_cache_usage_perc") == 0
    assert metric(after, "jpaged:step_gap_seconds_count") > 0


def test_the_best_of_several_are_not_streamed(fake):
    body = {"model": "tiny", "prompt": "x", "n": 1, "best_of": 3, "max_tokens": 4}
    done = fake.post("/v1/completions", body).json()
    assert len(done["choices"]) == 1
    answer = fake.post("/v1/completions", body | {"stream": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "best_of"


def test_chunks_may_be_fewer(fake):
    body = {"model": "tiny", "prompt": "few", "max_tokens": 20, "stream": True}
    lines = fake.post("/v1/completions", body | {"stream_interval": 8}).text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) == expected(fake, "few", 20)
    assert len(chunks) <= 3


def test_prompts_are_cut_only_where_asked(fake):
    ids = list(range(97, 117))
    body = {"model": "tiny", "prompt": ids, "max_tokens": 2, "return_token_ids": True}
    for more, kept in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": -1}, ids),
    ):
        done = fake.post("/v1/completions", body | more).json()
        assert done["choices"][0]["prompt_token_ids"] == kept
    assert fake.post("/v1/completions", body | {"truncate_prompt_tokens": 0}).status_code == 400


def test_streams_give_the_prompt_back_once_where_plain_answers_do(fake):
    body = {"model": "tiny", "prompt": ["ab", "c"], "n": 2, "max_tokens": 3}
    body |= {"return_token_ids": True, "return_prompt_text": True}
    plain = fake.post("/v1/completions", body).json()["choices"]
    events = fake.post("/v1/completions", body | {"stream": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    for choice in plain:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert [chunk["prompt_text"] for chunk in mine if "prompt_text" in chunk] == [
            choice["prompt_text"]
        ]
        ids = [chunk["prompt_token_ids"] for chunk in mine if "prompt_token_ids" in chunk]
        assert ids == [choice["prompt_token_ids"]]
        assert sum((chunk["token_ids"] for chunk in mine), []) == choice["token_ids"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    chat |= {"return_token_ids": True, "return_prompt_text": True}
    plain = fake.post("/v1/chat/completions", chat).json()
    events = fake.post("/v1/chat/completions", chat | {"stream": True}).text.split("\n\n")[:-2]
    first, *others = [json.loads(event.removeprefix("data: ")) for event in events]
    for name in ("prompt_text", "prompt_token_ids"):
        assert first[name] == plain[name]
        assert not any(name in chunk for chunk in others)


def test_histories_with_calls_of_tools_are_read(fake):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant"},
        {"role": "user", "content": "q"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    assert fake.post("/v1/chat/completions", body).status_code == 200
    body["tools"] = tools
    refused = fake.post("/v1/chat/completions", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    assert fake.post("/v1/chat/completions", body | {"tool_choice": "none"}).status_code == 200


def test_what_is_asked_beyond_the_limits_is_named(fake):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "q"}]}
    for path, body, param in (
        ("chat/completions", chat | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", chat | {"max_tokens": -1}, "max_tokens"),
        ("completions", {"model": "tiny", "prompt": "a", "logprobs": 21}, "logprobs"),
        ("completions", {"model": "tiny", "prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"model": "tiny", "prompt": "a", "max_tokens": -1}, "max_tokens"),
    ):
        answer = fake.post(f"/v1/{path}", body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param, error
        assert "EngineConfig" not in error["message"]


def test_latencies_of_answers_without_tokens_are_no_nonsense(fake):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 0, "echo": True}
    assert fake.post("/v1/completions", body).status_code == 200
    text = httpx.get(f"{fake.url}/metrics").text
    for name in ("e2e_request_latency", "request_inference_time", "request_decode_time"):
        assert metric(text, f"vllm:{name}_seconds_sum") >= 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 5, "n": 1000}, "n"),
        ({"bad_words": ["w"] * 129}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"prompt": "ab c9 ,x" * 100_000}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_would_keep_the_server_busy_is_refused(fake, fields, param, stream):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "stream": stream} | fields
    answer = fake.post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_cut_to_what_fits_leaves_room_for_the_answer(fake):
    limit = fake.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"model": "tiny", "prompt": "ab" * limit, "truncate_prompt_tokens": -1}
    for max_tokens in (1, 7):
        done = fake.post("/v1/completions", body | {"max_tokens": max_tokens}).json()
        assert done["usage"]["total_tokens"] == limit


def test_variables_of_templates_are_not_the_fields_of_requests(fake):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "q"}], "max_tokens": 1}
    for name in ("add_generation_prompt", "messages", "self"):
        answer = fake.post("/v1/chat/completions", body | {"chat_template_kwargs": {name: False}})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "chat_template_kwargs"
        assert "jpaged." not in error["message"] and name in error["message"]


def test_models_are_listed_with_a_slash_too(fake):
    assert fake.get("/v1/models/").json() == fake.get("/v1/models").json()


def test_many_answers_to_one_prompt_end_with_their_client(fake):
    body = {"model": "tiny", "prompt": "a", "n": 4096, "max_tokens": 50}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{fake.url}/v1/completions", json=body, timeout=1.0)
    started = time.monotonic()
    assert fake.get("/health").status_code == 200
    assert fake.post("/v1/completions", body | {"n": 1, "max_tokens": 1}).status_code == 200
    assert time.monotonic() - started < 5
