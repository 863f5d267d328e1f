"""What clients and operators do to a server: leave, stall, flood, kill, lock out."""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from benchmarks.letter_engine import POISON_ERROR, POISON_HANG, POISON_KILL, answer_to
from jpaged.config import EngineConfig
from server.app import HttpOptions
from tests.server.running import RunningServer, metric

LONG = {"model": "tiny", "prompt": "long", "max_tokens": 400}


def open_request(server: RunningServer, body: dict) -> socket.socket:
    """A request over a bare socket, whose answer nobody has read."""
    data = json.dumps(body).encode()
    port = int(server.url.rsplit(":", 1)[1])
    sock = socket.create_connection(("127.0.0.1", port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return sock


@pytest.fixture(scope="module")
def slow(tiny_model):
    """Steps of 10 ms."""
    with RunningServer(tiny_model("gqa"), environment={"LETTER_STEP_S": "0.01"}) as server:
        yield server


def test_work_for_clients_that_went_away_stops(slow):
    """Case H-07: five streamed and five plain."""
    before = slow.get("/metrics").text
    socks = [open_request(slow, LONG | {"stream": i % 2 == 0}) for i in range(10)]
    slow.wait_until(lambda: slow.state.stats.num_running == 8 and slow.state.stats.num_waiting == 2)
    for sock in socks:
        sock.close()
    slow.wait_until_idle()
    generated = slow.get("/metrics").text
    time.sleep(0.3)
    after = slow.get("/metrics").text
    name = "vllm:generation_tokens_total"
    assert metric(after, name) == metric(generated, name)
    assert metric(after, "vllm:num_requests_running") == 0
    assert metric(after, "vllm:kv_cache_usage_perc") == 0
    finished = "vllm:request_success_total"
    assert metric(after, finished, finished_reason="abort") >= 10
    started = time.monotonic()
    done = slow.post("/v1/completions", {"model": "tiny", "prompt": "next", "max_tokens": 3})
    assert done.status_code == 200 and time.monotonic() - started < 5
    read = slow.post("/v1/completions", LONG | {"max_tokens": 5, "stream": True})
    assert read.text.endswith("data: [DONE]\n\n")
    last = slow.get("/metrics").text
    assert metric(last, finished, finished_reason="length") >= 2
    assert metric(last, finished, finished_reason="abort") == metric(
        after, finished, finished_reason="abort"
    )
    assert metric(before, "vllm:num_preemptions_total") >= 0


def test_a_client_that_reads_nothing_holds_nobody_up(slow):
    sock = open_request(slow, LONG | {"stream": True, "logprobs": 5, "max_tokens": 200})
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    started = time.monotonic()
    done = slow.post("/v1/completions", {"model": "tiny", "prompt": "quick", "max_tokens": 20})
    assert done.status_code == 200 and time.monotonic() - started < 5
    slow.wait_until(lambda: slow.state.stats.num_running == 0)  # it has ended, unread
    received = b""
    sock.settimeout(5)
    while b"[DONE]" not in received:
        received += sock.recv(65536)
    sock.close()
    events = received.decode(errors="replace").split("data: ")[1:]
    texts = []
    for event in events[:-1]:
        text, _ = json.JSONDecoder().raw_decode(event.replace("\r\n", "\n"))
        texts += [choice["text"] for choice in text["choices"]]
    assert "".join(texts) == answer_to(slow.tokenizer.encode("long"), 200)
    slow.wait_until_idle()


def test_a_full_queue_is_said(tiny_model):
    with (
        RunningServer(
            tiny_model("gqa"),
            environment={"LETTER_STEP_S": "0.02"},
            config=EngineConfig(max_num_seqs=2),
            max_num_queued=3,
        ) as server,
        ThreadPoolExecutor(16) as pool,
    ):
        body = {"model": "tiny", "prompt": "x", "max_tokens": 40}
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(16)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses.count(200) >= 5 and statuses.count(503) >= 8
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        text = server.get("/metrics").text
        assert metric(text, "vllm:admission_rejections_total") == statuses.count(503)
        server.wait_until_idle()
        assert server.post("/v1/completions", body).status_code == 200


def test_health_tells_of_a_step_that_hangs(tiny_model):
    with RunningServer(tiny_model("gqa"), http=HttpOptions(stall_s=0.5)) as server:
        assert server.get("/health").status_code == 200
        sock = open_request(server, {"model": "tiny", "prompt": POISON_HANG})
        server.wait_until(lambda: server.get("/health").status_code == 503)
        assert "no step for" in server.get("/health").json()["status"]
        sock.close()
        os.kill(server.server.models.client.process_id, signal.SIGKILL)


@pytest.mark.parametrize("poison", [POISON_ERROR, POISON_KILL])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_takes_nothing_with_it_but_its_answers(tiny_model, poison, stream):
    with RunningServer(tiny_model("gqa"), environment={"LETTER_STEP_S": "0.01"}) as server:
        others = [open_request(server, LONG | {"stream": stream}) for _ in range(2)]
        server.wait_until(lambda: server.state.stats.num_running == 2)
        answer = server.post("/v1/completions", {"model": "tiny", "prompt": poison})
        assert answer.status_code == 500
        assert "has ended" in answer.json()["error"]["message"]
        for sock in others:
            sock.settimeout(5)
            received = b""
            while b"InternalServerError" not in received:
                piece = sock.recv(65536)
                assert piece, received
                received += piece
            sock.close()
        health = server.get("/health")
        reason = "signal 9" if poison == POISON_KILL else "the step went wrong"
        assert health.status_code == 503 and reason in health.json()["status"]
        assert server.get("/metrics").status_code == server.get("/v1/models").status_code == 200
        again = server.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        assert again.status_code == 500


def test_several_models_and_one_that_fails(tiny_model):
    names = {"a": "x", "b": "y"}
    with RunningServer(tiny_model("gqa"), names=names) as server:
        assert [c["id"] for c in server.get("/v1/models").json()["data"]] == [
            "a", "a-alias", "b", "b-alias"
        ]  # fmt: skip
        for name in ("a", "b", "b-alias"):
            done = server.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 3})
            assert done.json()["model"] == name
        text = server.get("/metrics").text
        counter = "vllm:generation_tokens_total"
        assert metric(text, counter, model_name="a") == 3
        assert metric(text, counter, model_name="b") == 6
        server.post("/v1/completions", {"model": "a", "prompt": POISON_ERROR})
        assert server.post("/v1/completions", {"model": "a", "prompt": "x"}).status_code == 500
        assert server.post("/v1/completions", {"model": "b", "prompt": "x"}).status_code == 200
        assert server.get("/health").json()["status"].startswith("a: ")


def test_keys_guard_every_path_but_health(tiny_model):
    http_options = HttpOptions(api_keys=["secret", "other"])
    with RunningServer(tiny_model("gqa"), http=http_options) as server:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        for path in ("/v1/models", "/metrics", "/load", "/version", "/openapi.json", "/nothing"):
            answer = server.get(path)
            assert answer.status_code == 401 and "API key" in answer.json()["error"]["message"]
        for header in ("", "secret", "Basic secret", "Bearer wrong", "Bearer secret2", "Bearer"):
            headers = {"authorization": header}
            assert server.post("/v1/completions", body, headers=headers).status_code == 401
        for key in ("secret", "other"):
            headers = {"authorization": f"Bearer {key}"}
            assert server.post("/v1/completions", body, headers=headers).status_code == 200
        assert server.get("/health").status_code == server.get("/ping").status_code == 200


def test_bodies_have_a_limit_and_origins_are_closed(tiny_model):
    with RunningServer(tiny_model("gqa"), http=HttpOptions(max_body_bytes=2000)) as server:
        body = {"model": "tiny", "prompt": "x" * 3000}
        assert server.post("/v1/completions", body).status_code == 413
        pieces = (b" " * 1000 for _ in range(10))
        chunked = httpx.post(
            f"{server.url}/v1/completions",
            content=pieces,
            headers={"content-type": "application/json"},
        )
        assert chunked.status_code == 413 and chunked.json()["error"]["code"] == 413
        headers = {"origin": "http://evil.example"}
        answer = server.get("/v1/models", headers=headers)
        assert "access-control-allow-origin" not in answer.headers


def test_before_it_is_ready_it_says_how_far_it_is(tiny_model):
    with RunningServer(tiny_model("gqa"), names={"a": "broken"}, waits=False) as server:
        answer = server.post("/v1/completions", {"model": "a", "prompt": "x"})
        assert answer.status_code in (500, 503)
        server.wait_until(lambda: server.state.failure is not None)
        assert server.state.is_mistake
        assert server.get("/health").json()["status"] == "a: this model cannot be loaded"


def test_waves_of_unequal_prompts_get_what_each_gets_alone(slow):
    """Case H-03, through the server."""
    prompts = [[65 + n % 60] * n for n in (1, 15, 16, 17, 31, 33, 64, 65)]

    def ask(prompt: list[int]) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24}
        return slow.post("/v1/completions", body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(32) as pool:
        futures = []
        for _ in range(5):
            futures += [(prompt, pool.submit(ask, prompt)) for prompt in prompts]
            time.sleep(0.005)
        for prompt, future in futures:
            assert future.result() == answer_to(prompt, 24)
    slow.wait_until_idle()


def test_preemption_is_invisible(tiny_model):
    """Case H-05, through the server."""
    environment = {"LETTER_BLOCKS": "14"}
    config = EngineConfig(max_num_seqs=4, max_model_len=200)
    with RunningServer(tiny_model("gqa"), environment=environment, config=config) as server:
        prompts = [[70 + i] * 40 for i in range(3)]
        results: list[str] = [""] * 3

        def read(index: int) -> None:
            body = {"model": "tiny", "prompt": prompts[index], "max_tokens": 120, "stream": True}
            text = server.post("/v1/completions", body).text
            for line in text.split("\n\n")[:-2]:
                results[index] += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

        threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [answer_to(prompt, 120) for prompt in prompts]
        assert metric(server.get("/metrics").text, "vllm:num_preemptions_total") > 0


def test_a_prefix_of_paths_may_be_cut_off_or_not(tiny_model):
    http_options = HttpOptions(api_keys=["key"], root_path="/llm", guards_metrics=False)
    with RunningServer(tiny_model("gqa"), http=http_options) as server:
        headers = {"authorization": "Bearer key"}
        for prefix in ("", "/llm"):
            assert server.get(f"{prefix}/health").status_code == 200
            assert server.get(f"{prefix}/metrics").status_code == 200
            assert server.get(f"{prefix}/v1/models").status_code == 401
            assert server.get(f"{prefix}/v1/models", headers=headers).status_code == 200
        assert server.get("/llm/llm/v1/models", headers=headers).status_code == 404
        document = server.get("/openapi.json", headers=headers).json()
        assert document["servers"] == [{"url": "/llm"}]


def test_browsers_of_allowed_origins_are_answered(tiny_model):
    http_options = HttpOptions(allowed_origins=["http://a.example"], api_keys=["key"])
    with RunningServer(tiny_model("gqa"), http=http_options) as server:
        ask = {
            "origin": "http://a.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        allowed = httpx.options(f"{server.url}/v1/completions", headers=ask)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "http://a.example"
        denied = httpx.options(
            f"{server.url}/v1/completions", headers=ask | {"origin": "http://b.example"}
        )
        assert denied.status_code == 400


def test_comments_keep_a_stream_alive_before_its_first_token(tiny_model):
    http_options = HttpOptions(keep_alive_s=0.1)
    config = EngineConfig(max_num_seqs=1)
    slow = {"LETTER_STEP_S": "0.02"}
    model = tiny_model("gqa")
    with RunningServer(model, http=http_options, config=config, environment=slow) as server:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 300, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as first:
            lines = first.iter_lines()
            next(lines)
            short = body | {"max_tokens": 1}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=short) as second:
                assert second.status_code == 200
                assert next(second.iter_lines()) == ": keep-alive"
            bad = server.post("/v1/completions", body | {"max_tokens": 10**6})
            assert bad.status_code == 400
