"""The command as a process: what it says, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT
from tests.server.test_life import open_request


class Process:
    """`jpaged serve` over letters, on a port of its own. A context manager."""

    def __init__(self, *arguments: str, **environment: str):
        command = [sys.executable, "-m", "server", *arguments, "--host", "127.0.0.1"]
        command += ["--port", "0", "--engine-factory", "benchmarks.letter_engine:make_engines"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | environment
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.lines.append(line)

    def __enter__(self) -> "Process":
        self.wait_for("ready: ")
        (self.port,) = re.findall(r"listening at http://127.0.0.1:(\d+)", self.log)
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(20)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log:
            assert time.monotonic() < deadline and self.process.poll() is None, self.log
            time.sleep(0.02)

    def ends_with(self, status: int, seconds: float = 20) -> None:
        assert self.process.wait(seconds) == status, self.log
        assert "Traceback" not in self.log


LONG = {"model": "tiny", "prompt": "long", "max_tokens": 100, "stream": True}


def read_to_the_end(sock: socket.socket) -> bytes:
    with sock:
        sock.settimeout(20)
        received = b""
        while piece := sock.recv(65536):
            received += piece
    return received


def test_sigterm_lets_answers_end_and_exits_0(tiny_model):
    model = f"tiny={tiny_model('gqa')}"
    with Process(model, "--shutdown-timeout", "20", LETTER_STEP_S="0.02") as server:
        sock = open_request(server, LONG)  # pyright: ignore[reportArgumentType]
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        answer = read_to_the_end(sock)
        assert answer.count(b'"finish_reason":"length"') == 1 and b"[DONE]" in answer
        server.ends_with(0)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_sigterm_without_time_ends_answers_as_they_are(tiny_model):
    with Process(f"tiny={tiny_model('gqa')}", LETTER_STEP_S="0.05") as server:
        sock = open_request(server, LONG)  # pyright: ignore[reportArgumentType]
        time.sleep(0.3)
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        answer = read_to_the_end(sock)
        assert b'"finish_reason":"abort"' in answer and b"[DONE]" in answer
        server.ends_with(0)
        assert time.monotonic() - started < 10


def test_a_second_signal_ends_at_once(tiny_model):
    model = f"tiny={tiny_model('gqa')}"
    with (
        Process(model, "--shutdown-timeout", "60", LETTER_STEP_S="0.5") as server,
        open_request(server, LONG),  # pyright: ignore[reportArgumentType]
    ):
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping; once more ends at once")
        server.process.send_signal(signal.SIGTERM)
        server.ends_with(128 + signal.SIGTERM, seconds=10)


def test_an_engine_that_is_killed_ends_the_server_after_its_last_words(tiny_model):
    with Process(f"tiny={tiny_model('gqa')}") as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        (child,) = children.read_text().split()
        os.kill(int(child), signal.SIGKILL)
        server.wait_for("killed by signal 9")
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and "signal 9" in health.json()["status"]
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        server.ends_with(1)


def test_the_engine_process_does_not_outlive_a_server_that_is_killed(tiny_model):
    with Process(f"tiny={tiny_model('gqa')}") as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        (child,) = children.read_text().split()
        server.process.kill()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{child}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nonexistent/model"], "/nonexistent/model"),
        (["--trust-remote-code"], "--trust-remote-code is not offered"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--chat-template", "/nonexistent.jinja"], "/nonexistent.jinja"),
        (["TINY", "--generation-config", "mine"], "--generation-config is 'mine'"),
        (["TINY", "--port", "TAKEN"], "cannot listen at 127.0.0.1:"),
        (["TINY", "--host", "256.1.1.1"], "cannot listen at 256.1.1.1"),
        (["TINY", "--default-chat-template-kwargs", "[1]"], "it must be a JSON object"),
    ],
)
def test_mistakes_are_one_clear_line(tiny_model, arguments, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"TINY": str(tiny_model("gqa")), "TAKEN": str(taken.getsockname()[1])}
        arguments = [places.get(argument, argument) for argument in arguments]
        command = [sys.executable, "-m", "jpaged.cli", "serve", *arguments]
        if "--host" not in arguments:
            command += ["--host", "127.0.0.1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert message in done.stderr.splitlines()[-1]


def test_a_model_that_cannot_be_loaded_ends_the_server(tiny_model, tmp_path):
    """The engine process says why, in its own words."""
    command = [sys.executable, "-m", "server", f"tiny={tiny_model('gqa')}", "--port", "0"]
    command += ["--host", "127.0.0.1", "--max-model-len", "100000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--max-model-len is 100000" in done.stderr.splitlines()[-1]


def test_requests_are_logged_when_asked(tiny_model):
    with Process(f"tiny={tiny_model('gqa')}", "--enable-log-requests") as server:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        server.wait_for("POST /v1/completions 200 in")
        assert answer.headers["x-request-id"] in server.log
        assert json.loads(answer.text)["object"] == "text_completion"


def test_unusable_certificates_end_the_server_before_it_loads(tiny_model, tmp_path):
    for name in ("key.pem", "cert.pem"):
        (tmp_path / name).write_text("garbage")
    files = [
        "--ssl-keyfile",
        str(tmp_path / "key.pem"),
        "--ssl-certfile",
        str(tmp_path / "cert.pem"),
    ]
    server = Process(f"tiny={tiny_model('gqa')}", *files)
    try:
        server.ends_with(2)
        assert server.log.count("\n") == 1 and "--ssl-certfile" in server.log
    finally:
        server.__exit__()
