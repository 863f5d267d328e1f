"""Which requests get how many tokens in the next step; admission, preemption, finish rules.

There is no prefill phase and no decode phase (the idea is vLLM v1's): a request has `num_tokens`
and `num_computed_tokens`, and a step lets some requests catch up under one token budget.
`schedule` decides a step, `update` takes its result; one step is under way at most, and a request
may be added, forked or finished at any moment between or during steps.

A request is in one of four places:

* waiting  - in a heap ordered by its sort key
* deferred - another request is computing its next block; it waits for that one (see below)
* forking  - another answer to the same prompt, whose first one is not computed yet (see below)
* running  - admitted: it owns a row of the block tables

**Order.** The sort key is the order of `add` ("fcfs") or (priority, arrival time, order of `add`)
("priority"). It never changes, so a preempted request returns before all that came after it.
When blocks run out, the running request with the greatest key is preempted. So the request with
the least key is never preempted for another and is admitted first: it finishes, then the next
one does, and nobody starves (under "priority": nobody but those whom better ones keep arriving
before).

**Equal prefixes that arrive together** are computed once: a request whose next full block is being
computed by a running one is deferred until that one has published all they have in common, ends or
is preempted. Those behind it in the queue pass meanwhile. Whom it waits for is running and
therefore makes progress, so it waits for a bounded number of steps and then has its old place.

**Several answers to a prompt** (`Request.forks`) wait until the first one has computed it, then
share its blocks: full ones are referenced, a part-filled one is copied. Each then computes the last
prompt token for itself and goes its own way. If the first one ends before, the next takes its
place.

The cost of a step depends on the requests it schedules, not on those that wait. The file is long
because everything here changes the state of the same requests.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from jpaged.core.kv_cache_manager import NEVER, KVCacheManager, common_length
from jpaged.request import (
    FinishReason,
    Request,
    ScheduledRequest,
    SchedulerOutput,
    Status,
    StepOutput,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

MAX_DEFERRALS_PER_STEP = 16
"""Bounds the host time that looking up prefixes in vain may take in one step."""

MIN_BUCKET_FILL = 0.75
"""A mixed step is cut down to the bucket below if it fills less of its own than this."""

# Makes a NamedTuple in half the time, in the loop over all requests of a step.
_new_tuple = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

NO_TOKEN_REASON = "no token can be sampled: all are excluded, or the model's logits are not finite"
"""`Request.stop_reason` of a request that ends so."""

_SortKey = tuple[int, float, int]


def cut_to_bucket(num_tokens: int, num_decode_tokens: int, token_buckets: Sequence[int]) -> int:
    """How many tokens a mixed step should compute, so that little of it is padding.

    Args:
        num_tokens: Tokens that could be computed.
        num_decode_tokens: Those of them that no cut may take away.
        token_buckets: Padded sizes, ascending; empty: no padding.

    Returns:
        `num_tokens`, if that fills the bucket above well enough or nothing could be done but
        decode otherwise; else the bucket below.
    """
    above = bisect_left(token_buckets, num_tokens)
    if above == 0 or above == len(token_buckets):
        return num_tokens
    if num_tokens >= MIN_BUCKET_FILL * token_buckets[above]:
        return num_tokens
    below = token_buckets[above - 1]
    return below if below > num_decode_tokens else num_tokens


class Scheduler:
    """Decides each step and keeps every request's state.

    Attributes:
        requests: All unfinished requests by id.
        num_preemptions: Preemptions so far.
        max_num_seqs: Requests that run at the same time, at most.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        token_buckets: Sequence[int] = (),
        long_prefill_token_threshold: int = 0,
        policy: str = "fcfs",
    ) -> None:
        """Makes a scheduler without requests.

        Args:
            kv_cache_manager: Where blocks come from; this scheduler alone uses it.
            max_num_seqs: Requests that run at the same time, at most the manager's rows.
            max_num_batched_tokens: Tokens in one step at most.
            max_model_len: Prompt and answer of one request together, at most. The pool must
                hold it, so that a request that is alone can always run to its end.
            token_buckets: Padded sizes, ascending, of steps in which some request catches up by
                several tokens.
            long_prefill_token_threshold: Tokens of one request in one step at most; 0: no limit.
            policy: "fcfs" or "priority".
        """
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if max_num_seqs > kv_cache_manager.max_num_seqs:
            raise ValueError(
                f"max_num_seqs is {max_num_seqs}; the block tables have "
                f"{kv_cache_manager.max_num_seqs} rows, make it at most that"
            )
        num_blocks, block_size = kv_cache_manager.pool.num_blocks, kv_cache_manager.block_size
        num_needed = kv_cache_manager.most_blocks(max_model_len)
        if max_model_len > kv_cache_manager.max_model_len or num_needed > num_blocks:
            raise ValueError(
                f"max_model_len is {max_model_len}; one request must fit into its block table, "
                f"{kv_cache_manager.max_model_len} tokens, and into the pool, {num_blocks} blocks "
                f"of {block_size} tokens, of which it needs {num_needed}: lower it or give the KV "
                "cache more memory"
            )
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"policy is {policy!r}; it must be 'fcfs' or 'priority'")
        if list(token_buckets) != sorted(set(token_buckets)):
            raise ValueError(f"token_buckets is {tuple(token_buckets)}; it must be ascending")
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._kv = kv_cache_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._token_buckets = tuple(token_buckets)
        self._max_chunk_tokens = long_prefill_token_threshold or max_num_batched_tokens
        self._by_priority = policy == "priority"
        self._new_number = count()
        self._sort_keys: dict[str, _SortKey] = {}
        # Entries of requests that have finished are skipped when they come up.
        self._waiting: list[tuple[_SortKey, Request]] = []
        self._running: dict[str, Request] = {}
        # By the id of the request they wait for: (tokens it must have computed, key, request).
        self._deferred: dict[str, list[tuple[int, _SortKey, Request]]] = {}
        # By the id of the request whose blocks they are to share.
        self._forking: dict[str, list[Request]] = {}
        # The head of the queue that did not fit, and how many blocks there were for it: it is not
        # looked up again before there are more.
        self._refused: tuple[Request | None, int] = (None, 0)

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted: waiting, deferred, forking or preempted."""
        return len(self.requests) - len(self._running)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.requests)

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queues a request, with its `forks`.

        Raises:
            ValueError: An id is in use, or the request could never run.
        """
        for entry in (request, *request.forks):
            self._check_admissible(entry)
        for entry in (request, *request.forks):
            self._register(entry)
        if request.forks:
            self._forking[request.request_id] = list(request.forks)
        self._wait(request)

    def fork(self, request_id: str, child: Request) -> bool:
        """Adds a request that shares blocks with an unfinished one.

        The child brings its own `token_ids`; what the parent has computed of them is shared at
        once, and the child is admitted. If there is no row or block free for that, the child
        waits like any other and finds the shared blocks as a cached prefix.

        Returns:
            Whether it was admitted at once.

        Raises:
            ValueError: No unfinished request has this id, or the child could never run.
        """
        parent = self.requests.get(request_id)
        if parent is None:
            raise ValueError(f"request_id is {request_id!r}; no unfinished request has this id")
        self._check_admissible(child)
        is_admitted = self._admit_fork(parent, child)
        self._register(child)
        if not is_admitted:
            self._wait(child)
        return is_admitted

    def _admit_fork(self, parent: Request, child: Request) -> bool:
        """Admits a child with what its parent has computed of its tokens, if there is room."""
        is_admitted = (
            parent.status is Status.RUNNING
            and len(self._running) < self.max_num_seqs
            and self._kv.fork(parent, child)
        )
        if is_admitted:
            self._run(child)
        return is_admitted

    def _run(self, request: Request) -> None:
        request.status = Status.RUNNING
        request.scheduled_time = request.scheduled_time or time.monotonic()
        self._running[request.request_id] = request

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """Ends a request, wherever it is, and gives its blocks back.

        Returns:
            The request, or `None` if no unfinished request has this id.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        del self._sort_keys[request_id]
        if request.status is Status.RUNNING:
            self._stop_running(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        forking = self._forking.pop(request_id, None)
        if forking is not None:
            self._promote_fork(forking)
        # Keeps requests that ended while they waited from piling up behind a head that stays.
        if len(self._waiting) > 2 * self.num_waiting + 64:
            self._waiting = [entry for entry in self._waiting if not entry[1].is_finished]
            heapify(self._waiting)
        return request

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content, as when the weights change; running requests go on."""
        self._kv.reset_prefix_cache()
        for owner_id in list(self._deferred):
            self._wake(self.requests[owner_id])

    # Steps.

    def schedule(self) -> SchedulerOutput:
        """Decides the next step.

        Running requests come first: those that lack one token, then those that lack more, each
        in the order of admission. Then waiting ones are admitted, unless somebody was preempted.
        If anything is unfinished, something is scheduled.

        Returns:
            The step, to be executed and given to `update` before the next call.
        """
        copies = self._kv.take_copies()
        preempted: list[Request] = []
        decodes, lacking = self._schedule_decodes(preempted)
        chunks = self._schedule_chunks(lacking, decodes, preempted)
        num_tokens = len(decodes) + sum(chunk.num_tokens for chunk in chunks)
        if self._waiting and not preempted:
            num_tokens += self._admit(lacking, chunks, self.max_num_batched_tokens - num_tokens)
        if num_tokens > len(decodes) + len(chunks):
            target = cut_to_bucket(num_tokens, len(decodes), self._token_buckets)
            self._cut_chunks(chunks, num_tokens - target)
            num_tokens = target
        assert num_tokens or not self.requests, "requests are unfinished, but none can run"
        return SchedulerOutput(decodes + chunks, num_tokens, preempted, copies)

    def update(
        self,
        output: SchedulerOutput,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
    ) -> list[StepOutput]:
        """Takes the result of a step.

        Requests that have ended since `schedule` are passed over.

        Args:
            output: What `schedule` returned last.
            token_ids: Entry i is the token sampled for `output.scheduled[i]`, a plain int, of no
                meaning where that does not sample. More entries are padding. `NO_TOKEN` ends
                the request: an error, unless it has `max_tokens` 0.
            logprobs: Their log-probabilities; `None` where they are not asked for.

        Returns:
            One entry for each request that got a token or ended, in the order of the step.
        """
        assert min(len(token_ids), len(logprobs)) >= len(output.scheduled)
        kv, running = self._kv, Status.RUNNING
        commit_at, forking = kv.commit_at, self._forking
        outputs: list[StepOutput] = []
        # The loop runs for every request of every step: what is rare is left to calls.
        for (request, start, num_tokens, samples), token_id, logprob in zip(
            output.scheduled, token_ids, logprobs, strict=False
        ):
            if request.status is not running:
                continue
            num_computed_tokens = request.num_computed_tokens = start + num_tokens
            if num_computed_tokens >= commit_at[request.row]:
                kv.commit(request)
                if self._deferred:
                    self._wake(request, num_computed_tokens)
            if not samples:
                continue
            if forking and request.request_id in forking:
                self._fork_all(request)
            request_token_ids = request.token_ids
            if token_id < 0:
                if request.max_tokens == 0:
                    self.finish(request.request_id, FinishReason.LENGTH)
                else:
                    self.finish(request.request_id, FinishReason.ERROR, NO_TOKEN_REASON)
                outputs.append((request, [], ()))
                continue
            request_token_ids.append(token_id)
            new_logprobs: tuple[TokenLogprobs, ...] = ()
            if logprob is not None:
                request.logprobs.append(logprob)
                new_logprobs = (logprob,)
            if token_id in request.stop_token_ids:
                is_asked = token_id in (request.params.stop_token_ids or ())
                self.finish(request.request_id, FinishReason.STOP, token_id if is_asked else None)
            elif len(request_token_ids) >= request.max_num_tokens:
                self.finish(request.request_id, FinishReason.LENGTH)
            outputs.append((request, [token_id], new_logprobs))
        return outputs

    # Parts of `schedule`.

    def _schedule_decodes(
        self, preempted: list[Request]
    ) -> tuple[list[ScheduledRequest], list[Request]]:
        """Schedules the running requests that lack one token; returns the others as well."""
        num_slots = self._kv.num_slots
        decodes: list[ScheduledRequest] = []
        lacking: list[Request] = []
        for request in list(self._running.values()):
            start = request.num_computed_tokens
            if len(request.token_ids) - start > 1:
                lacking.append(request)
                continue
            if preempted and request.status is not Status.RUNNING:
                continue
            if start < num_slots[request.row] or self._grow(request, 1, preempted, decodes):
                decodes.append(_new_tuple(ScheduledRequest, (request, start, 1, True)))
        del decodes[self.max_num_batched_tokens :]
        return decodes, lacking

    def _schedule_chunks(
        self,
        lacking: list[Request],
        decodes: list[ScheduledRequest],
        preempted: list[Request],
    ) -> list[ScheduledRequest]:
        """Schedules the running requests that lack several tokens, as far as the budget goes."""
        chunks: list[ScheduledRequest] = []
        budget = self.max_num_batched_tokens - len(decodes)
        for request in lacking:
            if request.status is not Status.RUNNING:
                continue
            num_tokens = self._num_chunk_tokens(request, request.num_computed_tokens, budget)
            if num_tokens == 0:
                break
            if self._grow(request, num_tokens, preempted, decodes, chunks):
                chunks.append(_share(request, num_tokens))
            budget -= num_tokens
            if preempted:
                # What was planned for victims is free again.
                num_planned = len(decodes) + sum(chunk.num_tokens for chunk in chunks)
                budget = self.max_num_batched_tokens - num_planned
        return chunks

    def _admit(self, lacking: list[Request], chunks: list[ScheduledRequest], budget: int) -> int:
        """Admits waiting requests in order while budget, rows and blocks allow.

        Returns:
            Tokens scheduled for them; the chunks are appended.
        """
        kv = self._kv
        num_reserved_blocks = sum(map(kv.num_blocks_lacking, lacking))
        num_tokens_left = budget
        num_deferrals_left = MAX_DEFERRALS_PER_STEP
        while num_tokens_left and num_deferrals_left and len(self._running) < self.max_num_seqs:
            request = self._find_head()
            if request is None:
                break
            num_spare_blocks = kv.num_free_blocks - num_reserved_blocks
            refused, num_spare_blocks_then = self._refused
            if request is refused and self._running and num_spare_blocks <= num_spare_blocks_then:
                break
            prefix = kv.find_cached_prefix(request)
            if prefix.owner is not None:
                self._defer(prefix.owner)
                num_deferrals_left -= 1
                continue
            num_tokens = self._num_chunk_tokens(request, prefix.num_tokens, num_tokens_left)
            if not kv.admit(request, prefix, num_tokens, num_reserved_blocks=num_reserved_blocks):
                self._refused = (request, num_spare_blocks)
                break
            heappop(self._waiting)
            self._run(request)
            chunks.append(_share(request, num_tokens))
            num_tokens_left -= num_tokens
            num_reserved_blocks += kv.num_blocks_lacking(request)
        return budget - num_tokens_left

    def _cut_chunks(self, chunks: list[ScheduledRequest], num_tokens: int) -> None:
        """Takes tokens off the last chunks; a request left with none stays admitted."""
        while num_tokens > 0:
            request, _, num_chunk_tokens, _ = chunks.pop()
            num_kept = max(0, num_chunk_tokens - num_tokens)
            self._kv.trim(request, num_kept)
            if num_kept:
                chunks.append(_share(request, num_kept))
            num_tokens -= num_chunk_tokens - num_kept

    def _num_chunk_tokens(self, request: Request, num_computed_tokens: int, budget: int) -> int:
        return min(request.num_tokens - num_computed_tokens, self._max_chunk_tokens, budget)

    def _grow(
        self,
        request: Request,
        num_tokens: int,
        preempted: list[Request],
        *planned: list[ScheduledRequest],
    ) -> bool:
        """Allocates for a running request, preempting others, or itself if it comes last.

        Victims are appended to `preempted` and their shares removed from `planned`.

        Returns:
            Whether the request has its slots; if not, it was preempted.
        """
        if self._kv.allocate(request, num_tokens):
            return True
        while request.status is Status.RUNNING and not self._kv.allocate(request, num_tokens):
            victim = max(
                self._running.values(), key=lambda running: self._sort_keys[running.request_id]
            )
            self._preempt(victim)
            preempted.append(victim)
        for entries in planned:
            entries[:] = [entry for entry in entries if entry.request.status is Status.RUNNING]
        return request.status is Status.RUNNING

    def _preempt(self, request: Request) -> None:
        logger.info(
            "Preempted request %s: no KV block is free; it has %d tokens, %d of them computed, "
            "and will be recomputed (%d running, %d waiting, preemption %d of this request)",
            request.request_id,
            request.num_tokens,
            request.num_computed_tokens,
            self.num_running,
            self.num_waiting,
            request.num_preemptions + 1,
        )
        self._stop_running(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        heappush(self._waiting, (self._sort_keys[request.request_id], request))

    # Where requests stand.

    def _check_admissible(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(
                f"request_id is {request.request_id!r}; an unfinished request has this id already"
            )
        if not request.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty; a prompt must have at least one token")
        if request.num_tokens + min(request.max_tokens, 1) > self._max_model_len:
            pool = self._kv.pool
            raise ValueError(
                f"prompt_token_ids has {request.num_tokens} tokens; with max_model_len "
                f"{self._max_model_len} and {pool.num_blocks} KV blocks, at most "
                f"{self._max_model_len - 1} leave room for an answer: shorten the prompt, or raise "
                "max_model_len or the memory of the KV cache"
            )
        if request.num_output_tokens >= max(request.max_tokens, 1):
            raise ValueError(
                f"max_tokens is {request.max_tokens}; it must be more than the answer tokens that "
                f"there are already, {request.num_output_tokens}"
            )

    def _register(self, request: Request) -> None:
        self.requests[request.request_id] = request
        request.max_num_tokens = min(
            len(request.prompt_token_ids) + request.max_tokens, self._max_model_len
        )
        number = next(self._new_number)
        self._sort_keys[request.request_id] = (
            (request.priority, request.arrival_time, number)
            if self._by_priority
            else (0, 0.0, number)
        )

    def _wait(self, request: Request) -> None:
        heappush(self._waiting, (self._sort_keys[request.request_id], request))

    def _fork_all(self, parent: Request) -> None:
        """Lets the other answers begin, now that the first one has computed the prompt."""
        for child in self._forking.pop(parent.request_id):
            if not child.is_finished and not self._admit_fork(parent, child):
                self._wait(child)

    def _promote_fork(self, forking: list[Request]) -> None:
        """Makes the first of those whose parent ended the parent of the others."""
        forking = [child for child in forking if not child.is_finished]
        if forking:
            first = forking.pop(0)
            if forking:
                self._forking[first.request_id] = forking
            self._wait(first)

    def _find_head(self) -> Request | None:
        """The request whose turn it is to be admitted."""
        while self._waiting and self._waiting[0][1].is_finished:
            heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _defer(self, owner: Request) -> None:
        """Makes the head of the queue wait for what the owner computes of its prefix."""
        sort_key, request = heappop(self._waiting)
        limit = min(owner.num_tokens, request.num_tokens - 1)
        num_tokens = common_length(owner.token_ids, request.token_ids, limit)
        num_tokens -= num_tokens % self._kv.block_size
        entries = self._deferred.setdefault(owner.request_id, [])
        heappush(entries, (num_tokens, sort_key, request))

    def _wake(self, owner: Request, num_computed_tokens: int = NEVER) -> None:
        """Gives those their old place back that wait for this many tokens of the owner."""
        entries = self._deferred.get(owner.request_id)
        if entries is None:
            return
        while entries and entries[0][0] <= num_computed_tokens:
            _, sort_key, request = heappop(entries)
            heappush(self._waiting, (sort_key, request))
        if not entries:
            del self._deferred[owner.request_id]

    def _stop_running(self, request: Request) -> None:
        del self._running[request.request_id]
        self._kv.free(request)
        self._wake(request)

    def check(self) -> None:
        """Asserts every invariant; for tests, it walks all requests and blocks."""
        self._kv.check(self._running.values())
        assert self._sort_keys.keys() == self.requests.keys()
        places = [("waiting", request) for _, request in self._waiting]
        for owner_id, entries in self._deferred.items():
            assert entries and owner_id in self._running
            places += [("deferred", request) for _, _, request in entries]
        for parent_id, children in self._forking.items():
            assert self.requests[parent_id].num_output_tokens == 0
            places += [("forking", request) for request in children]
        places = [place for place in places if not place[1].is_finished]
        places += [("running", request) for request in self._running.values()]
        assert len(places) == len(self.requests)
        for name, request in places:
            assert self.requests[request.request_id] is request
            assert (request.status is Status.RUNNING) == (name == "running")
            assert (request.row >= 0) == (name == "running")
            assert request.status is Status.RUNNING or request.num_computed_tokens == 0
            assert request.num_tokens + min(request.max_tokens, 1) <= self._max_model_len
            assert request.num_output_tokens < max(request.max_tokens, 1)


def _share(request: Request, num_tokens: int) -> ScheduledRequest:
    start = request.num_computed_tokens
    return ScheduledRequest(request, start, num_tokens, start + num_tokens == request.num_tokens)
