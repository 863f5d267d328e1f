"""What the HTTP process and the engine process tell each other.

Both are ours and run the same code, so that messages are pickled, one after the other, each behind
its length. Token ids only: text is the business of the HTTP process.
"""

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jpaged.config import EngineConfig
from jpaged.request import FinishReason, TokenLogprobs
from jpaged.sampling_params import SamplingParams

HEADER = struct.Struct("!Q")
GAP_BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25)


def pack(message: Any) -> bytes:
    """A message and its length in front of it."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


class ModelSpec(NamedTuple):
    """A model that the engine process is to serve.

    Attributes:
        name: The first of its names.
        path: What `open_checkpoint` takes.
        revision: Of a hub id.
        config: Of its engine.
        num_tokens_known: Ids that its tokenizer knows.
        memory_share: Part that it has of what all weights leave for KV caches.
        max_num_queued: Requests that may wait for a place in the batch; `None`: any number.
    """

    name: str
    path: str
    revision: str | None
    config: EngineConfig
    num_tokens_known: int
    memory_share: float = 1.0
    max_num_queued: int | None = None


class Setup(NamedTuple):
    """The first message: which models, and who makes their engines.

    Attributes:
        specs: One for each model; messages name them by their index.
        factory: "module:function" that takes all specs and `report`, and yields an engine each.
        log_level: Of the engine process.
        environment: Variables for JAX, set before it is imported.
    """

    specs: Sequence[ModelSpec]
    factory: str
    log_level: int
    environment: Mapping[str, str]


class Add(NamedTuple):
    """A prompt to answer; see `Engine.add_request`."""

    model: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...]
    priority: int
    cache_salt: str


class Abort(NamedTuple):
    """Answers that nobody wants any more."""

    model: int
    request_ids: list[str]


class Finish(NamedTuple):
    """An answer whose text has come to a stop string."""

    model: int
    request_id: str
    stop_reason: str


class Progress(NamedTuple):
    """How far a model is before it can serve."""

    model: int
    phase: str
    done: int = 0
    total: int = 0


class Limits(NamedTuple):
    """What an engine turned out to have room for.

    Attributes:
        max_model_len: Prompt and answer together.
        num_blocks: Of the KV cache.
        most_blocks: That a request of `max_model_len` tokens holds at the same time.
        block_size: Tokens in each.
        max_num_seqs: Requests in one step.
        cache_config: All settings, as text, for `cache_config_info`.
    """

    max_model_len: int
    num_blocks: int
    most_blocks: int
    block_size: int
    max_num_seqs: int
    cache_config: Mapping[str, str]


class Ready(NamedTuple):
    """A model can serve."""

    model: int
    limits: Limits


class Refused(NamedTuple):
    """A prompt that was not taken.

    Attributes:
        model: Its index.
        request_id: Of the prompt.
        reason: For the caller.
        is_full: Whether the queue was full, so that the caller may come again.
    """

    model: int
    request_id: str
    reason: str
    is_full: bool = False


class Tokens(NamedTuple):
    """What a step brought one answer.

    Attributes:
        request_id: Of the answer.
        token_ids: New ones.
        logprobs: Theirs; empty if not asked for.
        finish_reason: If it has ended.
        stop_reason: The id that ended it, if one did.
        first: With its first token: what is known from then on.
    """

    request_id: str
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first: "FirstToken | None" = None


class FirstToken(NamedTuple):
    """What is known of an answer once its prompt was computed.

    Attributes:
        scheduled_time: `time.monotonic()` of its first step's beginning.
        num_cached_tokens: Prompt tokens that came from the cache.
        prompt_logprobs: If asked for.
    """

    scheduled_time: float
    num_cached_tokens: int
    prompt_logprobs: Sequence[TokenLogprobs]


class Stats(NamedTuple):
    """Where an engine stands after a step; counters since its start.

    Attributes:
        time: `time.monotonic()`.
        num_running: Requests in the batch.
        num_waiting: Requests that wait for a place.
        blocks_in_use: Blocks that requests hold, each counted once.
        blocks_shared: Those of them that several hold.
        blocks_saved: Further references to them: blocks that sharing saves.
        blocks_cached: Free ones that hold a prefix.
        blocks_free: Free ones, cached ones included.
        steps: Steps.
        step_tokens: Tokens that the last step computed.
        computed_tokens: Tokens computed, prompts and answers.
        padded_tokens: Tokens that steps were wide.
        cache_queries: Prompt tokens that were looked up.
        cache_hits: Those that were found.
        preemptions: Requests that had to give up their blocks.
        copies: Blocks copied on write.
        compilations: After warm-up.
        step_s: Seconds of all steps.
        host_s: Part of them that the host took.
        gap_s: Seconds between steps while there was work.
        gap_counts: How many of those were up to each of `GAP_BOUNDS_S`, and longer.
    """

    time: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    blocks_in_use: int = 0
    blocks_shared: int = 0
    blocks_saved: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    steps: int = 0
    step_tokens: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    copies: int = 0
    compilations: int = 0
    step_s: float = 0.0
    host_s: float = 0.0
    gap_s: float = 0.0
    gap_counts: tuple[int, ...] = (0,) * (len(GAP_BOUNDS_S) + 1)


class Update(NamedTuple):
    """What a step, or a change of the queue, brought.

    Attributes:
        model: Index.
        tokens: An entry for each answer that got some.
        stats: Afterwards.
    """

    model: int
    tokens: list[Tokens]
    stats: Stats


class Failed(NamedTuple):
    """A model cannot serve, or can no longer.

    Attributes:
        model: Index.
        reason: One line.
        is_mistake: Whether it is the operator's, such as limits that do not fit into memory.
    """

    model: int
    reason: str
    is_mistake: bool = False
