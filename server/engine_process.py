"""The process in which engines run: one thread for each model, one that hears, one that tells.

Apart from HTTP, so that no step ever waits for a request to be parsed or a stream to be written
(docs/decisions/017). It lives as long as the socket to its parent does.
"""

import bisect
import functools
import importlib
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from server import messages
from server.logs import set_up_logging
from server.messages import ModelSpec, Stats, Tokens

logger = logging.getLogger(__name__)


Inbox = queue.SimpleQueue[Any]
"""Messages for one model's thread; `None` ends it."""

Report = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is done, and of how much."""

Factory = Callable[[Sequence[ModelSpec], Callable[[int], Report]], Iterator[Any]]
"""Makes the engines, `jpaged.engine.Engine` or a test's own, in the order of the specs."""


def make_engines(specs: Sequence[ModelSpec], report_of: Callable[[int], Report]) -> Iterator[Any]:
    """Loads each model and compiles its programs."""
    # Here, because importing JAX takes seconds, in which the parent hears nothing.
    from jpaged.checkpoint import open_checkpoint
    from jpaged.engine import Engine
    from server.memory_shares import share_memory

    configs = iter(share_memory(specs))
    for index, spec in enumerate(specs):
        report = report_of(index)
        report("loading weights", 0, 0)
        with open_checkpoint(spec.path, revision=spec.revision) as checkpoint:
            engine = Engine.from_checkpoint(
                checkpoint, next(configs), num_tokens_known=spec.num_tokens_known
            )
        engine.warm_up(report=functools.partial(report, "warming up"))
        yield engine


class ModelThread:
    """Steps one engine, and does between steps what was asked meanwhile."""

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        engine: Any,
        inbox: Inbox,
        tell: Callable[[Any], None],
    ):
        """Starts no thread; `run` is to be one."""
        self._index, self._spec, self._engine = index, spec, engine
        self._inbox, self._tell = inbox, tell
        self._untold: set[str] = set()  # answers whose first token has not been told
        self._last_end: float | None = None  # of a step, if another is to follow at once
        self._gap_s = 0.0
        self._gap_counts = [0] * (len(messages.GAP_BOUNDS_S) + 1)
        self._has_changed = False
        self._compilations_of_others = 0

    def run(self) -> None:
        """Works until it is told to stop, or the engine fails."""
        try:
            while self._take_messages():
                if self._engine.has_unfinished_requests:
                    self._step()
                elif self._has_changed:
                    self._tell_update([])
        except BaseException as error:
            traceback.print_exc()
            line = str(error).strip().splitlines()[:1] or [""]
            self._tell(messages.Failed(self._index, f"{type(error).__name__}: {line[0]}"))

    def _take_messages(self) -> bool:
        """Does what was asked; waits for more if there is nothing to step. False: the end."""
        must_wait = not self._engine.has_unfinished_requests and not self._has_changed
        while True:
            try:
                message = self._inbox.get(block=must_wait)
            except queue.Empty:
                return True
            must_wait = False
            if message is None:
                return False
            self._has_changed = True
            match message:
                case messages.Add():
                    self._add(message)
                case messages.Abort():
                    for request_id in message.request_ids:
                        self._untold.discard(request_id)
                        self._engine.abort(request_id)
                case messages.Finish():
                    self._engine.finish(message.request_id, message.stop_reason)
                case _:
                    raise TypeError(f"the HTTP process has sent {message!r}")

    def _add(self, message: messages.Add) -> None:
        scheduler, limit = self._engine.scheduler, self._spec.max_num_queued
        num_places = max(0, scheduler.max_num_seqs - scheduler.num_running)
        if limit is not None and scheduler.num_waiting >= limit + num_places:
            waiting = scheduler.num_waiting - num_places
            reason = f"{waiting} requests are waiting, more than {limit} may not; try again later"
            self._tell(messages.Refused(self._index, message.request_id, reason, is_full=True))
            return
        try:
            request = self._engine.add_request(
                message.request_id,
                message.prompt_token_ids,
                message.params,
                priority=message.priority,
                cache_salt=message.cache_salt,
                bad_words=message.bad_words,
            )
        except ValueError as error:
            self._tell(messages.Refused(self._index, message.request_id, str(error)))
            return
        self._untold.update(entry.request_id for entry in (request, *request.forks))

    def _step(self) -> None:
        started = time.monotonic()
        if self._last_end is not None:
            self._count_gap(started - self._last_end)
        outputs = self._engine.step()
        # From here to the next step's beginning, the step after waits for us.
        self._last_end = time.monotonic() if self._engine.has_unfinished_requests else None
        tokens = [
            Tokens(
                request.request_id,
                token_ids,
                logprobs,
                request.finish_reason,
                request.stop_reason,
                self._first_token(request) if request.request_id in self._untold else None,
            )
            for request, token_ids, logprobs in outputs
        ]
        self._tell_update(tokens)

    def _first_token(self, request: Any) -> messages.FirstToken:
        self._untold.remove(request.request_id)
        return messages.FirstToken(
            request.scheduled_time, request.num_cached_tokens, tuple(request.prompt_logprobs)
        )

    def _count_gap(self, seconds: float) -> None:
        self._gap_s += seconds
        self._gap_counts[bisect.bisect_left(messages.GAP_BOUNDS_S, seconds)] += 1

    def _tell_update(self, tokens: list[Tokens]) -> None:
        self._has_changed = False
        self._tell(messages.Update(self._index, tokens, self.stats()))

    def forget_compilations(self) -> None:
        """Says that others were warmed up in this process meanwhile."""
        self._compilations_of_others = self._engine.compilations_after_warm_up

    def stats(self) -> Stats:
        """Where the engine stands."""
        scheduler, manager = self._engine.scheduler, self._engine.kv_cache_manager
        pool, totals = manager.pool, self._engine.stats
        num_held = manager.num_allocated_slots // manager.block_size
        return Stats(
            time=time.monotonic(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            blocks_in_use=pool.num_blocks_in_use,
            blocks_shared=pool.num_shared_blocks,
            blocks_saved=max(0, num_held - pool.num_blocks_in_use),
            blocks_cached=pool.num_cached_blocks,
            blocks_free=pool.num_free_blocks,
            steps=totals.steps,
            step_tokens=totals.last_num_tokens,
            computed_tokens=totals.num_tokens,
            padded_tokens=totals.num_padded_tokens,
            cache_queries=manager.prefix_cache_queries,
            cache_hits=manager.prefix_cache_hits,
            preemptions=scheduler.num_preemptions,
            copies=manager.num_copies,
            compilations=self._engine.compilations_after_warm_up - self._compilations_of_others,
            step_s=totals.step_s,
            host_s=totals.host_s,
            gap_s=self._gap_s,
            gap_counts=tuple(self._gap_counts),
        )


def limits_of(engine: Any, config: Any) -> messages.Limits:
    """What an engine has room for."""
    settings = {field.name: str(getattr(config, field.name)) for field in fields(config)}
    settings |= {
        "num_blocks": str(engine.num_blocks),
        "max_model_len": str(engine.max_model_len),
        "max_num_seqs": str(engine.scheduler.max_num_seqs),
        "max_num_batched_tokens": str(engine.scheduler.max_num_batched_tokens),
        "dtype": str(engine.dtype),
    }
    return messages.Limits(
        max_model_len=engine.max_model_len,
        num_blocks=engine.num_blocks,
        most_blocks=engine.kv_cache_manager.most_blocks(engine.max_model_len),
        block_size=engine.kv_cache_manager.block_size,
        max_num_seqs=engine.scheduler.max_num_seqs,
        cache_config=settings | {"num_gpu_blocks": str(engine.num_blocks)},
    )


def load_factory(name: str) -> Factory:
    """The function behind "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


class EngineProcess:
    """All of this process: the engines, and the socket to the parent."""

    def __init__(self, sock: socket.socket):
        """Reads what is to be served."""
        self._sock = sock
        self._hears = sock.makefile("rb")
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._setup: messages.Setup = self._read()
        self._inboxes: list[Inbox] = [queue.SimpleQueue() for _ in self._setup.specs]
        self._sender = threading.Thread(target=self._send, name="sender", daemon=True)

    def run(self) -> int:
        """Makes the engines and serves until the parent says that it is enough."""
        os.environ.update(self._setup.environment)
        set_up_logging(self._setup.log_level)
        self._sender.start()
        threading.Thread(target=self._dispatch, name="dispatcher", daemon=True).start()
        models: list[ModelThread] = []
        threads: list[threading.Thread] = []
        engines: list[Any] = []
        index = 0
        try:
            made = load_factory(self._setup.factory)(self._setup.specs, self._report_of)
            for index, (spec, engine) in enumerate(zip(self._setup.specs, made, strict=True)):
                model = ModelThread(index, spec, engine, self._inboxes[index], self._outbox.put)
                for other in models:
                    other.forget_compilations()
                models.append(model)
                engines.append(engine)
                threads.append(threading.Thread(target=model.run, name=spec.name))
                self._outbox.put(messages.Ready(index, limits_of(engine, spec.config)))
                threads[-1].start()
        except Exception as error:
            is_mistake = isinstance(error, (ValueError, OSError))
            if not is_mistake:
                traceback.print_exc()
            line = " ".join(str(error).split()) or type(error).__name__
            self._outbox.put(messages.Failed(index, line, is_mistake))
            for inbox in self._inboxes:
                inbox.put(None)
        for thread in threads:
            thread.join()
        for engine in engines:
            engine.close()
        self._outbox.put(None)
        self._sender.join()
        return 0

    def _report_of(self, index: int) -> Report:
        def report(phase: str, done: int, total: int) -> None:
            self._outbox.put(messages.Progress(index, phase, done, total))

        return report

    def _read(self) -> Any:
        header = self._hears.read(messages.HEADER.size)
        if len(header) < messages.HEADER.size:
            raise EOFError
        (size,) = messages.HEADER.unpack(header)
        return pickle.loads(self._hears.read(size))

    def _dispatch(self) -> None:
        try:
            while (message := self._read()) is not None:
                model: int = message.model
                self._inboxes[model].put(message)
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone, and nobody wants what runs
        for inbox in self._inboxes:
            inbox.put(None)

    def _send(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._sock.sendall(messages.pack(message))
        except OSError:
            os._exit(1)


def main() -> int:
    """Serves the socket whose file descriptor is the first argument."""
    # Ctrl-C and what ends a process group are the parent's to decide on; it tells us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return EngineProcess(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    sys.exit(main())
