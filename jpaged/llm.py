"""Prompts in, answers out: `LLM` for those who keep a model, `generate` for one call.

Both take text, token ids or chats and work offline: all prompts are known before the first step.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any, NamedTuple

from flax import nnx
from tqdm import tqdm

from jpaged.admission import check_ids
from jpaged.answers import AnswerGroup
from jpaged.checkpoint import open_checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.outputs import RequestOutput, ScoreOutput
from jpaged.request import Request
from jpaged.runner.logits_processor import LogitsProcessor
from jpaged.runner.step_inputs import Bucket
from jpaged.sampling_params import SamplingParams, read_generation_config
from jpaged.text.tokenizer import Tokenizer

Chat = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Chat | Mapping[str, Any]


class StreamDelta(NamedTuple):
    """What a step brought to one answer.

    Attributes:
        prompt_index: Which of the prompts.
        answer_index: Which of its answers.
        text: New text of it.
        output: All answers to the prompt, with the last delta of the last one; else `None`.
    """

    prompt_index: int
    answer_index: int
    text: str
    output: RequestOutput | None


class LLM:
    """A model that answers prompts. A context manager; `close` frees its memory.

    Attributes:
        engine: The engine, for those who step themselves.
        tokenizer: The model's tokenizer; `None` for a module that came without one.
        model_defaults: Fields of `SamplingParams` that the model's generation_config.json sets.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nnx.Module = "smollm2",
        *,
        tokenizer: Tokenizer | None = None,
        revision: str | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        show_progress: bool = False,
        **options: Any,
    ):
        """Loads a model, or takes one that is in memory.

        Args:
            model: "smollm2" (the demo model), a Hugging Face directory or hub id, a GGUF file, or
                a module of `jpaged.models`, whose arrays are used without a copy.
            tokenizer: Instead of the checkpoint's own.
            revision: Branch, tag or commit of a hub id.
            generation_config: Where default sampling parameters come from: "auto", the
                checkpoint's generation_config.json; "vllm", those of `SamplingParams`.
            override_generation_config: Entries that take precedence over that file's.
            logits_processors: Functions that requests may ask for in `extra_args`.
            show_progress: Draws progress bars while fetching, loading, compiling and generating.
            **options: Fields of `EngineConfig`, e.g. `max_num_seqs=4`.

        Raises:
            ValueError: Naming the option, file or tensor at fault.
            FileNotFoundError: If the model is not there.
        """
        config = make_engine_config(options)
        self._show_progress = show_progress
        self._request_ids = itertools.count()
        self._lock = threading.Lock()
        self.tokenizer = tokenizer
        if generation_config not in ("auto", "vllm"):
            raise ValueError(
                f"generation_config is {generation_config!r}; it must be 'auto' (the checkpoint's) "
                "or 'vllm' (none)"
            )
        overrides = dict(override_generation_config or {})
        self.model_defaults = read_generation_config(overrides)
        if isinstance(model, nnx.Module):
            if revision is not None:
                raise ValueError(f"revision is {revision!r}; a module in memory has no revisions")
            self.engine = Engine(model, config, logits_processors=logits_processors)
            return
        with open_checkpoint(model, revision=revision, show_progress=show_progress) as checkpoint:
            if self.tokenizer is None:
                self.tokenizer = checkpoint.tokenizer()
            if generation_config == "auto":
                self.model_defaults = read_generation_config(
                    checkpoint.generation_config | overrides
                )
            self.engine = Engine.from_checkpoint(
                checkpoint,
                config,
                num_tokens_known=self.tokenizer.vocab_size,
                logits_processors=logits_processors,
                show_progress=show_progress,
            )

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answers all prompts and returns the answers in their order.

        Args:
            prompts: One prompt or a list. A prompt is text, a list or array of token ids, a chat
                (a list of messages with "role" and "content"), or as in vLLM a dict with "prompt"
                or "prompt_token_ids". Text that a chat template has rendered holds its special
                tokens already: give the chat, or ids (`Tokenizer.encode_chat`).
            sampling_params: One for all, or one for each prompt; `None`: `default_params`.
            use_tqdm: Draws a progress bar; `None`: as `show_progress` of this LLM.
            priority: One for all, or one for each prompt; lower runs first under the "priority"
                policy.

        Raises:
            ValueError: If a prompt cannot be read or can never fit, before anything runs.
        """
        prompts = _as_list(prompts)
        params = self._one_for_each(sampling_params, len(prompts))
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        with self._progress_bar(len(prompts), "generating", use_tqdm) as bar:
            for delta in self.stream(prompts, params, priority=priority):
                if delta.output is not None:
                    outputs[delta.prompt_index] = delta.output
                    bar.update()
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] = 0,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; see `generate`.

        Args:
            messages: A conversation, a list of messages with "role" and "content", or a list of
                conversations.
            sampling_params: As for `generate`.
            use_tqdm: As for `generate`.
            priority: As for `generate`.
            chat_template: Jinja source, instead of the model's own.
            chat_template_content_format: "string", "openai" (parts) or "auto"; see
                `Tokenizer.render_chat`.
            add_generation_prompt: Begin a new turn of the assistant.
            continue_final_message: Go on with the last message instead; both at once are refused.
            tools: Descriptions of tools, for templates that know them.
            chat_template_kwargs: Further variables of the template.
        """
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for chat in chats:
            text = tokenizer.render_chat(
                chat,  # type: ignore[arg-type]
                chat_template=chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            prompts.append(_Rendered(text))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[StreamDelta]:
        """Yields new text and finished outputs as steps bring them.

        A caller who stops iterating aborts what is unfinished. With `best_of` above `n` there is no
        text before the end, since nobody knows yet which answers are returned.

        Args:
            prompts: As for `generate`.
            params: As for `generate`.
            priority: As for `generate`.
            should_stop: Asked before every step; if it says yes, all answers end as they are, with
                the finish reason "abort".
        """
        prompts = _as_list(prompts)
        params = self._one_for_each(params, len(prompts))
        with self._exclusive_engine() as engine:
            groups: list[AnswerGroup] = []
            answers: dict[str, tuple[AnswerGroup, int]] = {}
            try:
                encoded = [self._encode(prompt) for prompt in prompts]
                priorities = _repeat(priority, len(prompts), "priority")
                for (text, token_ids), param, rank in zip(encoded, params, priorities, strict=True):
                    request = engine.add_request(
                        f"llm-{next(self._request_ids)}",
                        token_ids,
                        param,
                        priority=rank,
                        bad_words=self._encode_bad_words(param),
                    )
                    group = AnswerGroup(len(groups), text, request, self.tokenizer)
                    groups.append(group)
                    for index, answer in enumerate(group.answers):
                        answers[answer.request.request_id] = group, index
                self._warm_up([group.request for group in groups])
                while engine.has_unfinished_requests:
                    if should_stop():
                        for request_id in answers:
                            engine.abort(request_id)
                        break
                    for request, token_ids, _ in engine.step():
                        place = answers.get(request.request_id)
                        if place is None:
                            continue  # somebody else's, added through `engine`
                        group, index = place
                        answer = group.answers[index]
                        text = answer.add(token_ids)
                        if answer.stop_reason is not None and not request.is_finished:
                            engine.finish(request.request_id, answer.stop_reason)
                        if request.is_finished:
                            del answers[request.request_id]
                            group.num_open -= 1
                        yield from _deltas(group, index, text)
                for request_id, (group, index) in list(answers.items()):  # those that were aborted
                    del answers[request_id]
                    group.num_open -= 1
                    yield from _deltas(group, index, group.answers[index].add(()))
            finally:
                for request_id in answers:
                    engine.abort(request_id)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        use_tqdm: bool | None = None,
    ) -> list[ScoreOutput]:
        """Log-probabilities of given completions, as generation would have reported them.

        They are the model's own, before temperature and anything else that a caller may ask.
        Equal prompts are computed once, as far as blocks are full and prefix caching is on.

        Args:
            prompts: One for each completion, or one for all; as for `generate`.
            completions: Text or token ids. Text after text is encoded as one text and divided
                (`Tokenizer.encode_pair`), so that ids at the border are those of the whole; to
                score exactly what was generated, give its ids.
            use_tqdm: As for `generate`.

        Raises:
            ValueError: If a text cannot be read, a prompt is empty or a pair can never fit, before
                anything runs.
        """
        completions = _as_list(completions)  # type: ignore[arg-type]
        prompts = _as_list(prompts)
        if len(prompts) == 1:
            prompts = prompts * len(completions)
        if len(prompts) != len(completions):
            raise ValueError(
                f"there are {len(prompts)} prompts and {len(completions)} completions; give one "
                "prompt for each completion, or one for all"
            )
        pairs = [
            self._encode_pair(prompt, completion)  # type: ignore[arg-type]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return self._score(pairs, use_tqdm)

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], *, use_tqdm: bool | None = None
    ) -> list[tuple[float, bool]]:
        """Log-probability of each (context, continuation), and whether greedy sampling gives it.

        What the model interface of lm-evaluation-harness asks for. An empty context stands for the
        beginning-of-sequence token (`Tokenizer.encode_pair`).
        """
        tokenizer = self.get_tokenizer()
        for pair in pairs:
            is_pair = isinstance(pair, list | tuple) and len(pair) == 2
            if not is_pair or not all(isinstance(text, str) for text in pair):
                raise ValueError(f"pairs holds {pair!r}; each entry must be two texts")
        scored = self._score([tokenizer.encode_pair(*pair) for pair in pairs], use_tqdm)
        return [(output.sum, output.is_greedy) for output in scored]

    @property
    def default_params(self) -> SamplingParams:
        """Used where none are given: the model's generation_config.json, as in vLLM."""
        return SamplingParams(**self.model_defaults)

    def get_default_sampling_params(self) -> SamplingParams:
        """`default_params`, under vLLM's name."""
        return self.default_params

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: If there is none.
        """
        if self.tokenizer is None:
            raise ValueError(
                "this model has no tokenizer; give token ids, or a jpaged.text.tokenizer.Tokenizer "
                "as tokenizer="
            )
        return self.tokenizer

    def update_weights(self, model: nnx.Module) -> None:
        """Takes another module's arrays, without a copy, and forgets all cached prefixes."""
        self.engine.update_weights(model)

    def close(self) -> None:
        """Frees the KV cache and lets go of the weights."""
        self.engine.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its ids."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or len(prompt) != 1:
                raise ValueError(
                    f"a prompt has the keys {sorted(prompt)}; give 'prompt' or 'prompt_token_ids'"
                )
            prompt = next(iter(prompt.values()))
        prompt = _from_array(prompt)
        if not isinstance(prompt, str | list | tuple):
            raise ValueError(
                f"a prompt is {prompt!r}; give text, a list of token ids or a list of messages"
            )
        if not isinstance(prompt, str):
            if all(isinstance(entry, Integral) for entry in prompt):
                return None, check_ids("a prompt", prompt)
            if not all(isinstance(entry, Mapping) for entry in prompt):
                raise ValueError(
                    f"a prompt is the list {prompt!r:.200}; its entries must all be token ids, or "
                    "all messages with 'role' and 'content'"
                )
        tokenizer = self.get_tokenizer()
        if isinstance(prompt, _Rendered):
            return prompt, tokenizer.encode(prompt, add_special_tokens=False)
        if isinstance(prompt, str):
            return prompt, tokenizer.encode(prompt)
        text = tokenizer.render_chat(prompt)  # type: ignore[arg-type]
        return text, tokenizer.encode(text, add_special_tokens=False)

    def _encode_pair(
        self, prompt: Prompt, completion: str | Sequence[int]
    ) -> tuple[list[int], list[int]]:
        if isinstance(prompt, str) and isinstance(completion, str):
            return self.get_tokenizer().encode_pair(prompt, completion)
        if isinstance(completion, str):
            token_ids = self.get_tokenizer().encode(completion, add_special_tokens=False)
        else:
            _, token_ids = self._encode(completion)
        return self._encode(prompt)[1], token_ids

    def _encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise ValueError(
                        f"SamplingParams.{name} is {getattr(params, name)!r}; it needs a tokenizer"
                    )
            return ()
        return self.tokenizer.encode_bad_words(params.bad_words or ())

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], use_tqdm: bool | None
    ) -> list[ScoreOutput]:
        requests: dict[int, Request] = {}
        with (
            self._exclusive_engine() as engine,
            self._progress_bar(len(pairs), "scoring", use_tqdm) as bar,
        ):
            try:
                for index, (prompt, completion) in enumerate(pairs):
                    if not prompt:
                        raise ValueError(
                            "a prompt has no tokens; the first token of a text has no "
                            "log-probability: give at least the beginning-of-sequence token"
                        )
                    if not completion:
                        bar.update()
                        continue
                    params = SamplingParams(
                        max_tokens=0, prompt_logprobs=0, prompt_logprob_start=len(prompt) - 1
                    )
                    request_id = f"llm-{next(self._request_ids)}"
                    requests[index] = engine.add_request(request_id, [*prompt, *completion], params)
                self._warm_up(list(requests.values()))
                unfinished = {request.request_id for request in requests.values()}
                while unfinished:
                    for request, _, _ in engine.step():
                        if request.is_finished and request.request_id in unfinished:
                            unfinished.remove(request.request_id)
                            bar.update()
            finally:
                for request in requests.values():
                    engine.abort(request.request_id)
        outputs: list[ScoreOutput] = []
        for index, (prompt, completion) in enumerate(pairs):
            request = requests.get(index)
            entries = request.prompt_logprobs if request else []
            outputs.append(
                ScoreOutput(
                    prompt_token_ids=prompt,
                    token_ids=completion,
                    logprobs=[entry.logprob for entry in entries],
                    ranks=[entry.rank for entry in entries],
                    num_cached_tokens=request.num_cached_tokens if request else 0,
                )
            )
        return outputs

    @contextlib.contextmanager
    def _exclusive_engine(self) -> Iterator[Engine]:
        """The engine, for one call at a time."""
        if self._lock.locked():
            raise ValueError(
                "this LLM is in the middle of another call; finish or close that iterator first"
            )
        with self._lock:
            yield self.engine

    def _progress_bar(self, total: int, what: str, use_tqdm: bool | None) -> tqdm:
        is_shown = self._show_progress if use_tqdm is None else use_tqdm
        return tqdm(total=total, desc=what, disable=not is_shown)

    def _one_for_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.default_params
        params = _repeat(params, count, "sampling_params")
        for param in params:
            if not isinstance(param, SamplingParams):
                raise ValueError(f"sampling_params holds {param!r}; give SamplingParams")
        return params

    def _warm_up(self, requests: Sequence[Request]) -> None:
        """Compiles the programs that these requests can need, and no others."""
        table = self.engine.runner.buckets
        num_requests = sum(request.params.num_samples for request in requests)
        num_rows = min(num_requests, table.decode[-1].num_rows)
        largest = table.find(num_rows, num_rows)
        needed: list[Bucket] = [b for b in table.decode if b.num_rows <= largest.num_rows]
        num_tokens = sum(request.num_tokens for request in requests)
        num_slots, num_blocks = 0, 0
        for request in requests:
            count = request.num_tokens + request.max_tokens
            num_slots += count * request.params.num_samples
            most = self.engine.kv_cache_manager.most_blocks(count)
            num_blocks += most * request.params.num_samples
        if num_blocks > self.engine.num_blocks // 2:
            num_tokens = num_slots  # a preempted request computes its answer again as a prompt
        for bucket in table.mixed:
            needed.append(bucket)
            if bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows:
                break
        params = {id(request.params): request.params for request in requests}.values()
        self.engine.warm_up(needed, params, show_progress=self._show_progress)


class _Rendered(str):
    """A prompt that a chat template has rendered: its special tokens are in it."""


def _deltas(group: AnswerGroup, index: int, text: str) -> Iterable[StreamDelta]:
    """What there is to tell after an answer got this text: one delta or none.

    The last answer's last text comes with the output.
    """
    if group.is_chosen_late:
        text = ""
    output = group.output() if group.num_open == 0 else None
    return [StreamDelta(group.prompt_index, index, text, output)] if text or output else []


def generate(
    model: str | os.PathLike[str] | nnx.Module,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **options: Any,
) -> list[RequestOutput]:
    """Answers prompts with a model and frees the memory afterwards.

    For more than one call with a model, make an `LLM`: it keeps cache and compiled programs.

    Args:
        model: As for `LLM`; a module's arrays are used as they are.
        prompts: As for `LLM.generate`.
        sampling_params: As for `LLM.generate`.
        **options: As for `LLM`.
    """
    with LLM(model, **options) as llm:
        return llm.generate(prompts, sampling_params)


def score(
    model: str | os.PathLike[str] | nnx.Module,
    prompts: Prompt | Sequence[Prompt],
    completions: str | Sequence[int] | Sequence[str | Sequence[int]],
    **options: Any,
) -> list[ScoreOutput]:
    """Scores completions with a model and frees the memory afterwards; see `LLM.score`.

    Args:
        model: As for `LLM`; a module's arrays are used as they are.
        prompts: As for `LLM.score`.
        completions: As for `LLM.score`.
        **options: As for `LLM`.
    """
    with LLM(model, **options) as llm:
        return llm.score(prompts, completions)


def make_engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """An `EngineConfig` from keyword options.

    Raises:
        ValueError: Naming an option that there is not, and those that there are.
    """
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ValueError(f"there is no option {name!r}; options are {', '.join(known)}")
    return EngineConfig(**options)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one or many: a list of ints or of messages is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = _from_array(prompts)
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts is {prompts!r}; give a prompt or a list of prompts")
    entries: list[Any] = list(prompts)
    is_ids = all(isinstance(entry, Integral) for entry in entries)
    is_chat = all(isinstance(entry, Mapping) and "role" in entry for entry in entries)
    return [entries] if entries and (is_ids or is_chat) else entries


def _from_array(value: Any) -> Any:
    """Ids in a NumPy or JAX array as a list, or a list of lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _repeat(value: Any, count: int, name: str) -> list[Any]:
    """The value for each of `count` prompts, if it is not one for each already."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one for each")
    return list(value)
