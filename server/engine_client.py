"""The HTTP process's end of the engine process: starts it, asks it, hears from it, sees it die."""

import asyncio
import itertools
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jpaged.request import FinishReason, Request
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from server import messages
from server.errors import bad_request, internal_error, unavailable
from server.generation import Generation
from server.messages import Limits, ModelSpec, Stats

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 5.0  # a line in the log
_WAKES_AT_A_TIME = 16  # readers, so that one step's news never holds the event loop for long


@dataclass
class EngineState:
    """What is known of one model's engine.

    Attributes:
        spec: What it was told to serve.
        limits: Once it is ready.
        phase: What it is doing before that, e.g. "warming up 7/12".
        failure: Why it cannot serve, or can no longer.
        is_mistake: Whether that is the operator's to mend.
        stats: After its last step.
        heard: `time.monotonic()` of its last message.
        told: Of the last line about its progress.
        generations: By the ids of their unfinished answers.
    """

    spec: ModelSpec
    limits: Limits | None = None
    phase: str = "starting"
    failure: str | None = None
    is_mistake: bool = False
    stats: Stats = Stats()
    heard: float = field(default_factory=time.monotonic)
    told: float = 0.0
    generations: dict[str, Generation] = field(default_factory=dict[str, Generation])

    def problem(self, stall_s: float) -> str | None:
        """Why it does not serve now; `None` if it does."""
        if self.failure is not None:
            return self.failure
        if self.limits is None:
            return self.phase
        silence = time.monotonic() - self.heard
        if self.generations and silence > stall_s:
            return f"no step for {silence:.0f} s, with {len(self.generations)} answers unfinished"
        return None


class Observer:
    """Hears what happens; `server.metrics` counts it."""

    def on_update(self, model: int, stats: Stats) -> None:
        """A step was made."""

    def on_tokens(self, model: int, generation: Generation, tokens: messages.Tokens) -> None:
        """An answer got tokens."""

    def on_end(self, model: int, generation: Generation) -> None:
        """A generation has ended."""

    def on_rejection(self, model: int) -> None:
        """The queue was full."""

    def close(self) -> None:
        """The server has ended."""


class EngineClient:
    """The engine process.

    Attributes:
        states: One for each model.
        has_ended: Set when the process is gone, wanted or not.
        is_up: Set when every model is ready or has failed.
        is_down: Set when every model has failed.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        observers: Sequence[Observer] = (),
        factory: str = "server.engine_process:make_engines",
        environment: Mapping[str, str] | None = None,
    ):
        """Starts nothing yet."""
        self.states = [EngineState(spec) for spec in specs]
        self.has_ended = asyncio.Event()
        self.is_up = asyncio.Event()
        self.is_down = asyncio.Event()
        self._observers = observers
        self._setup = messages.Setup(
            specs, factory, logging.getLogger().getEffectiveLevel(), dict(environment or {})
        )
        self._numbers = itertools.count()
        self._to_wake: deque[Generation] = deque()
        self._is_waking = False
        self._is_stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def process_id(self) -> int | None:
        """Of the engine process."""
        return self._process and self._process.pid

    async def start(self) -> None:
        """Starts the process and begins to hear it."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "server.engine_process", str(theirs.fileno())]
        with theirs:
            # What this process can import, the other can: the caller may not be installed.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._write(self._setup)
        self._task = asyncio.create_task(self._hear(reader))

    async def stop(self) -> int | None:
        """Has the process end after its present step; kills it if it does not. Its exit status."""
        self._is_stopping = True
        process = self._process
        if process is None:
            return None
        if process.poll() is None and self._writer is not None:
            self._write(None)
            for _ in range(100):
                if process.poll() is not None:
                    break
                await asyncio.sleep(0.1)
        if process.poll() is None:
            process.kill()
        status = await asyncio.to_thread(process.wait)
        if self._task is not None:
            await self._task
        return status

    def submit(
        self,
        model: int,
        token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        request_id: str,
        news: asyncio.Event,
        bad_words: tuple[tuple[int, ...], ...] = (),
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Generation:
        """Sends a prompt to a model's engine; `bad_words` are the ids of those in `params`.

        Raises:
            ApiError: If the model cannot serve.
        """
        state = self.states[model]
        if state.failure is not None:
            raise internal_error(f"the engine of {state.spec.name} has ended: {state.failure}")
        if state.limits is None:
            raise unavailable(f"{state.spec.name} is not ready: {state.phase}", retry_after_s=5)
        engine_id = f"{request_id}-{next(self._numbers)}"
        requests = [
            Request(
                request_id=f"{engine_id}/{index}" if index else engine_id,
                prompt_token_ids=token_ids,
                params=params,
            )
            for index in range(params.num_samples)
        ]
        requests[0].forks = requests[1:]
        generation = Generation(requests[0], prompt, tokenizer, news)
        state.generations |= dict.fromkeys(generation.ids, generation)
        if len(state.generations) == len(generation.ids):
            state.heard = time.monotonic()  # it was idle, and had nothing to tell
        self._write(
            messages.Add(model, engine_id, token_ids, params, bad_words, priority, cache_salt)
        )
        return generation

    def abort(self, model: int, generation: Generation) -> None:
        """Ends answers that nobody wants any more; their blocks are free before the next step."""
        if generation.is_finished:
            return
        ids = list(generation.ids)
        for request_id in ids:
            self.states[model].generations.pop(request_id, None)
        self._write(messages.Abort(model, ids))
        generation.end(FinishReason.ABORT)
        for observer in self._observers:
            observer.on_end(model, generation)
        self._wake_later(generation)

    def abort_all(self) -> None:
        """Ends all answers as they are."""
        for index, state in enumerate(self.states):
            for generation in set(state.generations.values()):
                self.abort(index, generation)

    def _write(self, message: object) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.pack(message))

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header = await reader.readexactly(messages.HEADER.size)
                data = await reader.readexactly(*messages.HEADER.unpack(header))
                self._take(pickle.loads(data))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            await self._take_end()

    async def _take_end(self) -> None:
        assert self._process is not None and self._writer is not None
        self._writer.close()
        status = await asyncio.to_thread(self._process.wait)
        reason = "it was told to"
        if not self._is_stopping:
            reason = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            reason = f"the engine process has ended ({reason})"
            logger.error("%s", reason)
        for index in range(len(self.states)):
            self._fail(index, reason)
        self.has_ended.set()

    def _take(self, message: object) -> None:
        now = time.monotonic()
        match message:
            case messages.Update(model, tokens, stats):
                state = self.states[model]
                for observer in self._observers:  # which looks at the stats before
                    observer.on_update(model, stats)
                state.heard, state.stats = now, stats
                for entry in tokens:
                    self._take_tokens(model, entry, now)
            case messages.Refused(model, request_id, reason, is_full):
                generation = self._drop(model, request_id)
                if generation is None:
                    return
                if is_full:
                    for observer in self._observers:
                        observer.on_rejection(model)
                    generation.fail(unavailable(reason, retry_after_s=1))
                else:
                    param, reason = _find_param(reason)
                    generation.fail(bad_request(reason, param))
                self._wake_later(generation)
            case messages.Progress(model, phase, done, total):
                state = self.states[model]
                state.heard = now
                is_due = now - state.told >= _PROGRESS_EVERY_S or not state.phase.startswith(phase)
                state.phase = f"{phase} {done}/{total}" if total else phase
                if is_due:
                    state.told = now
                    logger.info("%s: %s", state.spec.name, state.phase)
            case messages.Ready(model, limits):
                self.states[model].limits = limits
                self.states[model].heard = now
                self._check_up()
            case messages.Failed(model, reason, is_mistake):
                self.states[model].is_mistake = is_mistake
                if not is_mistake:  # else it is the last line
                    logger.error("%s: %s", self.states[model].spec.name, reason)
                self._fail(model, reason)
            case _:
                raise TypeError(f"the engine process has sent {message!r}")

    def _take_tokens(self, model: int, tokens: messages.Tokens, now: float) -> None:
        generation = self.states[model].generations.get(tokens.request_id)
        if generation is None:
            return  # it has ended here, at a stop string or because nobody wants it
        stop = generation.take(tokens, now)
        if stop is not None:
            self._write(messages.Finish(model, tokens.request_id, stop))
        if tokens.request_id not in generation.ids:
            del self.states[model].generations[tokens.request_id]
        for observer in self._observers:
            observer.on_tokens(model, generation, tokens)
        if generation.is_finished:
            for observer in self._observers:
                observer.on_end(model, generation)
        self._wake_later(generation)

    def _drop(self, model: int, request_id: str) -> Generation | None:
        generations = self.states[model].generations
        generation = generations.get(request_id)
        for entry in generation.ids if generation is not None else ():
            generations.pop(entry, None)
        return generation

    def _fail(self, model: int, reason: str) -> None:
        state = self.states[model]
        state.failure = state.failure or reason
        error = internal_error(f"the engine of {state.spec.name} has ended: {reason}")
        for generation in set(state.generations.values()):
            generation.fail(error)
            self._wake_later(generation)
        state.generations.clear()
        self._check_up()

    def _check_up(self) -> None:
        if all(state.limits is not None or state.failure is not None for state in self.states):
            self.is_up.set()
        if all(state.failure is not None for state in self.states):
            self.is_down.set()

    def _wake_later(self, generation: Generation) -> None:
        self._to_wake.append(generation)
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        for _ in range(min(_WAKES_AT_A_TIME, len(self._to_wake))):
            self._to_wake.popleft().wake()
        self._is_waking = bool(self._to_wake)
        if self._is_waking:
            asyncio.get_running_loop().call_soon(self._wake_some)


def _find_param(reason: str) -> tuple[str | None, str]:
    """The request's field that a refusal of the engine names, and the words for its caller."""
    if reason.startswith("prompt_token_ids of request"):
        return "prompt", re.sub(r"prompt_token_ids of request '[^']*'", "prompt", reason)
    if not reason.startswith("SamplingParams."):
        return None, reason
    reason = reason.removeprefix("SamplingParams.")
    return reason.split(" ", 1)[0], reason
