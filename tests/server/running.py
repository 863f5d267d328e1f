"""Servers for tests: in this process but for the engine's, on a port of their own."""

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from jpaged.config import EngineConfig
from jpaged.text.tokenizer import Tokenizer
from server.app import HttpOptions, Server, create_app
from server.engine_client import EngineClient
from server.messages import ModelSpec
from server.metrics import Metrics
from server.models import Models, ServedModel
from server.serve import HttpServer, listen

FAKE = "benchmarks.letter_engine:make_engines"


class RunningServer:
    """A server in a thread. A context manager.

    Attributes:
        url: Where it listens.
        server: What its handlers work with.
        tokenizer: Of all its models.
    """

    def __init__(
        self,
        directory: Path,
        *,
        names: Mapping[str, str] | None = None,
        config: EngineConfig | None = None,
        http: HttpOptions | None = None,
        factory: str = FAKE,
        environment: Mapping[str, str] | None = None,
        max_num_queued: int | None = None,
        waits: bool = True,
        **served: Any,
    ):
        self.tokenizer = Tokenizer.from_directory(directory)
        self._config = config or EngineConfig()
        names = names or {"tiny": str(directory)}
        self._specs = [
            ModelSpec(
                name, path, None, self._config, self.tokenizer.vocab_size,
                memory_share=1 / len(names), max_num_queued=max_num_queued,
            )
            for name, path in names.items()
        ]  # fmt: skip
        self._served = [
            ServedModel(
                index=index, names=[name, f"{name}-alias"], path=path, tokenizer=self.tokenizer,
                defaults={}, created=int(time.time()), **served,
            )
            for index, (name, path) in enumerate(names.items())
        ]  # fmt: skip
        self._http, self._factory = http or HttpOptions(), factory
        self._environment = dict(environment or {})
        self._waits = waits
        self._listening = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> "RunningServer":
        self._thread.start()
        assert self._ready.wait(120), "the server did not come up"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"

    async def _run(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        metrics = Metrics([spec.name for spec in self._specs])
        client = EngineClient(
            self._specs, observers=[metrics], factory=self._factory, environment=self._environment
        )
        metrics.states = client.states
        self.server = Server(Models(self._served, client), metrics, self._http)
        http = HttpServer(uvicorn.Config(create_app(self.server), log_config=None, lifespan="off"))
        await client.start()
        serving = asyncio.create_task(http.serve(sockets=[self._listening]))
        if self._waits:
            await client.is_up.wait()
        while not http.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        await self._stop.wait()
        client.abort_all()
        await client.stop()
        http.should_exit = http.force_exit = True
        await serving

    @property
    def state(self) -> Any:
        """Of the first model's engine."""
        return self.server.models.client.states[0]

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def wait_until(self, condition: Any, seconds: float = 10.0) -> None:
        """Waits for something to become true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        """Waits until no request is left and no block in use."""
        self.wait_until(
            lambda: (
                self.state.stats.num_running == self.state.stats.num_waiting == 0
                and self.state.stats.blocks_in_use == 0
                and not self.state.generations
            )
        )


def metric(text: str, name: str, **labels: str) -> float:
    """The sum over the series of a metric that have these labels."""
    total, is_found = 0.0, False
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        bare, _, rest = series.partition("{")
        if bare == name and all(f'{key}="{label}"' in rest for key, label in labels.items()):
            total, is_found = total + float(value), True
    assert is_found, f"there is no {name} with {labels}"
    return total
