"""Prompts in, answers out: `LLM` for those who keep a model, `generate` for one call.

Both take text, token ids or chats and work offline: all prompts are known before the first step.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any

from flax import nnx
from tqdm import tqdm

from jpaged.checkpoint import open_checkpoint
from jpaged.config import EngineConfig
from jpaged.detokenizer import Detokenizer
from jpaged.engine import Engine
from jpaged.request import CompletionOutput, FinishReason, Request, RequestOutput
from jpaged.runner.step_inputs import Bucket
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer

Chat = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Chat | Mapping[str, Any]


class LLM:
    """A model that answers prompts. A context manager; `close` frees its memory.

    Attributes:
        engine: The engine, for those who step themselves.
        tokenizer: The model's tokenizer; `None` for a module that came without one.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nnx.Module = "smollm2",
        *,
        tokenizer: Tokenizer | None = None,
        revision: str | None = None,
        show_progress: bool = False,
        **options: Any,
    ):
        """Loads a model, or takes one that is in memory.

        Args:
            model: "smollm2" (the demo model), a Hugging Face directory or hub id, a GGUF file, or
                a module of `jpaged.models`, whose arrays are used without a copy.
            tokenizer: Instead of the checkpoint's own.
            revision: Branch, tag or commit of a hub id.
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
        if isinstance(model, nnx.Module):
            if revision is not None:
                raise ValueError(f"revision is {revision!r}; a module in memory has no revisions")
            self.engine = Engine(model, config)
            return
        with open_checkpoint(model, revision=revision, show_progress=show_progress) as checkpoint:
            if self.tokenizer is None:
                self.tokenizer = checkpoint.tokenizer()
            self.engine = Engine.from_checkpoint(
                checkpoint,
                config,
                num_tokens_known=self.tokenizer.vocab_size,
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
    ) -> list[RequestOutput]:
        """Answers all prompts and returns the answers in their order.

        Args:
            prompts: One prompt or a list. A prompt is text, a list or array of token ids, a chat
                (a list of messages with "role" and "content"), or as in vLLM a dict with "prompt"
                or "prompt_token_ids".
            sampling_params: One for all, or one for each prompt; `None`: the defaults.

        Raises:
            ValueError: If a prompt cannot be read or can never fit, before anything runs.
        """
        prompts = _as_list(prompts)
        params = _one_for_each(sampling_params, len(prompts))
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        bar = tqdm(total=len(prompts), desc="generating", disable=not self._show_progress)
        with bar:
            for index, _, output in self.stream(prompts, params):
                if output is not None:
                    outputs[index] = output
                    bar.update()
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; see `generate`."""
        if messages and isinstance(messages[0], Mapping):
            messages = [messages]  # type: ignore[list-item]
        return self.generate(messages, sampling_params)  # type: ignore[arg-type]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, str, RequestOutput | None]]:
        """Yields (index of the prompt, new text, final output or `None`) as steps bring them.

        A caller who stops iterating aborts what is unfinished.

        Args:
            prompts: As for `generate`.
            params: One for each prompt.
            should_stop: Asked before every step; if it says yes, all answers end as they are, with
                the finish reason "abort".
        """
        if self._lock.locked():
            raise ValueError(
                "this LLM is in the middle of another call; finish or close that iterator first"
            )
        with self._lock:
            answers: dict[str, _Answer] = {}
            try:
                encoded = [self._encode(prompt) for prompt in prompts]
                for param in params:
                    if self.tokenizer is None and param.stop:
                        raise ValueError(
                            f"SamplingParams.stop is {param.stop!r}; it needs a tokenizer"
                        )
                for index, ((text, token_ids), param) in enumerate(
                    zip(encoded, params, strict=True)
                ):
                    request_id = f"llm-{next(self._request_ids)}"
                    request = self.engine.add_request(request_id, token_ids, param)
                    answers[request_id] = _Answer(index, text, request, self.tokenizer)
                self._warm_up([answer.request for answer in answers.values()])
                while self.engine.has_unfinished_requests:
                    if should_stop():
                        for request_id in answers:
                            self.engine.abort(request_id)
                        break
                    for request, token_ids, _ in self.engine.step():
                        answer = answers.get(request.request_id)
                        if answer is None:
                            continue  # somebody else's, added through `engine`
                        delta = answer.add(token_ids)
                        if answer.stop_reason is not None and not request.is_finished:
                            self.engine.finish(request.request_id, answer.stop_reason)
                        if request.is_finished:
                            del answers[request.request_id]
                            yield answer.index, delta, answer.output()
                        elif delta:
                            yield answer.index, delta, None
                for request_id, answer in list(answers.items()):  # those that were aborted
                    del answers[request_id]
                    yield answer.index, answer.add(()), answer.output()
            finally:
                for request_id in answers:
                    self.engine.abort(request_id)

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
                return None, [int(i) for i in prompt]  # type: ignore[arg-type]
            if not all(isinstance(entry, Mapping) for entry in prompt):
                raise ValueError(
                    f"a prompt is the list {prompt!r:.200}; its entries must all be token ids, or "
                    "all messages with 'role' and 'content'"
                )
        if self.tokenizer is None:
            raise ValueError(
                "this model has no tokenizer; give token ids, or a jpaged.text.tokenizer.Tokenizer "
                "as tokenizer="
            )
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        text = self.tokenizer.render_chat(prompt)  # type: ignore[arg-type]
        return text, self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]

    def _warm_up(self, requests: Sequence[Request]) -> None:
        """Compiles the programs that these requests can need, and no others."""
        table = self.engine.runner.buckets
        num_rows = min(len(requests), table.decode[-1].num_rows)
        largest = table.find(num_rows, num_rows)
        needed: list[Bucket] = [b for b in table.decode if b.num_rows <= largest.num_rows]
        num_tokens = sum(request.num_tokens for request in requests)
        num_slots = sum(request.num_tokens + request.max_tokens for request in requests)
        if num_slots > self.engine.num_blocks * self.engine.runner.block_size // 2:
            num_tokens = num_slots  # a preempted request computes its answer again as a prompt
        for bucket in table.mixed:
            needed.append(bucket)
            if bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows:
                break
        self.engine.warm_up(needed, show_progress=self._show_progress)


class _Answer:
    """One answer in the making."""

    def __init__(
        self, index: int, prompt: str | None, request: Request, tokenizer: Tokenizer | None
    ):
        self.index = index
        self.request = request
        self._prompt = prompt
        params = request.params
        self._detokenizer = Detokenizer(tokenizer, params) if tokenizer else None

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes new ids and returns the text that may be shown."""
        if self._detokenizer is None:
            return ""
        request = self.request
        ends_at_id = request.finish_reason is FinishReason.STOP
        if ends_at_id and not request.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self._detokenizer.add(token_ids, finished=request.is_finished)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found, if any."""
        return self._detokenizer and self._detokenizer.stop_reason

    def output(self) -> RequestOutput:
        """The finished answer."""
        request = self.request
        logprobs = request.logprobs if request.params.logprobs is not None else None
        stop_string = self.stop_reason
        reason = request.finish_reason
        completion = CompletionOutput(
            index=0,
            text=self._detokenizer.text if self._detokenizer else "",
            token_ids=request.output_token_ids,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(logprobs),
            finish_reason="stop" if stop_string is not None else reason and reason.value,
            stop_reason=request.stop_reason if stop_string is None else stop_string,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=True,
            num_cached_tokens=request.num_cached_tokens,
        )


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


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    for param in params:
        if not isinstance(param, SamplingParams):
            raise ValueError(f"sampling_params holds {param!r}; give jpaged.SamplingParams")
    if len(params) != count:
        raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts")
    return list(params)
