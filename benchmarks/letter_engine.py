"""An engine without a model: the real scheduler and blocks, letters for answers, steps that sleep.

For measuring and testing the server, whose engine process it runs in like the real one:

    jpaged serve --engine-factory benchmarks.letter_engine:make_engines

What it is to do comes in the environment: LETTER_STEP_S, LETTER_BLOCKS.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jpaged.admission import check_ids
from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.scheduler import Scheduler
from jpaged.engine import EngineStats
from jpaged.request import NO_TOKEN, FinishReason, Request, TokenLogprobs
from jpaged.sampling_params import SamplingParams

# Prompts that make it misbehave.
POISON_ERROR, POISON_HANG, POISON_KILL, POISON_NAN = "<error>", "<hang>", "<kill>", "<nan>"
VOCAB_SIZE = 1 << 17


def answer_to(prompt: Sequence[int], count: int) -> str:
    """What it says: letters, by the sum of the prompt's ids."""
    return "".join(chr(ord("a") + (sum(prompt) + i) % 26) for i in range(count))


_NO_LOGPROBS = TokenLogprobs(0.0, 1)


class LetterEngine:
    """What a model's thread needs of an engine; names as in `jpaged.engine.Engine`."""

    dtype = "none"

    def __init__(self, *, step_s: float, num_blocks: int, max_num_seqs: int, max_model_len: int):
        """Steps sleep for `step_s` seconds."""
        self.step_s = step_s
        self.num_blocks, self.max_model_len = num_blocks, max_model_len
        self.kv_cache_manager = KVCacheManager(
            num_blocks=num_blocks,
            block_size=16,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=True,
            watermark=0.0,
        )
        self.scheduler = Scheduler(
            self.kv_cache_manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            max_model_len=max_model_len,
        )
        self.stats = EngineStats()
        self._sums: dict[str, int] = {}
        self._poisons: dict[str, str] = {}
        self.compilations_after_warm_up = 0

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        bad_words: Any = (),
    ) -> Request:
        """Queues a prompt."""
        token_ids = check_ids("prompt_token_ids", prompt_token_ids)
        if not all(0 <= token_id < VOCAB_SIZE for token_id in token_ids):
            raise ValueError(f"prompt_token_ids: ids go from 0 to {VOCAB_SIZE - 1}")
        room = max(self.max_model_len - len(token_ids), 1)
        requests = [
            Request(
                request_id=f"{request_id}/{index}" if index else request_id,
                prompt_token_ids=token_ids,
                params=params,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                stop_token_ids=frozenset(params.stop_token_ids or ()),
                seed=index,
                priority=priority,
                cache_salt=cache_salt,
            )
            for index in range(params.num_samples)
        ]
        requests[0].forks = requests[1:]
        if params.prompt_logprobs is not None:
            entries = [TokenLogprobs(-1.0, 1)] * (len(token_ids) - 1)
            for request in requests:
                request.prompt_logprobs += entries
            requests[0].max_cached_tokens = 0
        text = bytes(i for i in token_ids if i < 256).decode(errors="replace")
        for request in requests:
            self._sums[request.request_id] = sum(token_ids)
            for poison in (POISON_ERROR, POISON_HANG, POISON_KILL, POISON_NAN):
                if poison in text:
                    self._poisons[request.request_id] = poison
        self.scheduler.add(requests[0])
        return requests[0]

    def abort(self, request_id: str) -> None:
        """Ends a request that nobody wants."""
        self.scheduler.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, stop_reason: str) -> None:
        """Ends a request at a stop string."""
        self.scheduler.finish(request_id, FinishReason.STOP, stop_reason)

    def step(self) -> list[Any]:
        """A letter for each request."""
        started = time.perf_counter()
        output = self.scheduler.schedule()
        token_ids, logprobs = [], []
        for request, _, _, samples in output.scheduled:
            self._misbehave(request)
            # As `answer_to`, at a cost that does not grow with the answer.
            token = ord("a") + (self._sums[request.request_id] + request.num_output_tokens) % 26
            if request.max_tokens == 0 or self._is_nan(request):
                token = NO_TOKEN
            token_ids.append(token if samples else NO_TOKEN)
            count = request.num_logprobs
            if count is None:
                logprobs.append(_NO_LOGPROBS)
                continue
            tops = tuple(range(ord("A"), ord("A") + count))
            values = tuple(-0.5 - i for i in range(count))
            logprobs.append(TokenLogprobs(-9.0, count + 1, tops, values))
        built = time.perf_counter()
        time.sleep(self.step_s)
        slept = time.perf_counter()
        outputs = self.scheduler.update(output, token_ids, logprobs)
        stats = self.stats
        stats.steps += 1
        stats.num_tokens += output.num_tokens
        stats.last_num_tokens = output.num_tokens
        stats.num_padded_tokens += output.num_tokens
        stats.step_s += time.perf_counter() - started
        stats.host_s += built - started + time.perf_counter() - slept
        return outputs

    def _misbehave(self, request: Request) -> None:
        poison = self._poisons.get(request.request_id)
        if poison == POISON_ERROR:
            raise RuntimeError("the step went wrong")
        if poison == POISON_HANG:
            time.sleep(3600)
        if poison == POISON_KILL:
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_nan(self, request: Request) -> bool:
        return self._poisons.get(request.request_id) == POISON_NAN

    def close(self) -> None:
        """Nothing to free."""


def make_engines(specs: Sequence[Any], report_of: Callable[[int], Any]) -> Iterator[LetterEngine]:
    """An engine for each model; of one called "broken", none."""
    for index, spec in enumerate(specs):
        report_of(index)("warming up", 1, 2)
        if spec.path == "broken":
            raise ValueError("this model\ncannot be loaded")
        yield LetterEngine(
            step_s=float(os.environ.get("LETTER_STEP_S", "0.001")),
            num_blocks=int(os.environ.get("LETTER_BLOCKS", "512")),
            max_num_seqs=spec.config.max_num_seqs or 8,
            max_model_len=spec.config.max_model_len or 512,
        )
