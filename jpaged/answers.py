"""From requests to outputs: the text, the log-probabilities, the choice among several answers."""

import math
from collections.abc import Sequence

from jpaged.detokenizer import Detokenizer
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.request import FinishReason, Request, TokenLogprobs
from jpaged.text.tokenizer import Tokenizer


class Answer:
    """One answer in the making.

    Attributes:
        request: What it is the answer to.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None and request.params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, request.params)

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

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, in the words of the OpenAI API; `None` while it goes on."""
        reason = self.request.finish_reason
        return "stop" if self.stop_reason is not None else reason and reason.value

    @property
    def final_stop_reason(self) -> int | str | None:
        """The stop string or id that ended it, if one did."""
        return self.request.stop_reason if self.stop_reason is None else self.stop_reason

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole answer, if that was asked for or needed."""
        if self.request.num_logprobs is None:
            return None
        return math.fsum(entry.logprob for entry in self.request.logprobs)

    def output(self, index: int) -> CompletionOutput:
        """The finished answer."""
        request = self.request
        token_ids = request.output_token_ids
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [
                describe_logprobs(token_id, entry, self._tokenizer)
                for token_id, entry in zip(token_ids, request.logprobs, strict=True)
            ]
        return CompletionOutput(
            index=index,
            text=self._detokenizer.text if self._detokenizer else "",
            token_ids=token_ids,
            logprobs=logprobs,
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.final_stop_reason,
        )


class AnswerGroup:
    """All answers to one prompt.

    Attributes:
        prompt_index: Which of the caller's prompts.
        answers: In the order of their seeds.
        num_open: Answers whose end was not delivered yet; their owner counts it down.
    """

    def __init__(
        self, prompt_index: int, prompt: str | None, request: Request, tokenizer: Tokenizer | None
    ):
        self.prompt_index = prompt_index
        self.answers = [Answer(entry, tokenizer) for entry in (request, *request.forks)]
        self.num_open = len(self.answers)
        self._prompt = prompt
        self._tokenizer = tokenizer

    @property
    def request(self) -> Request:
        """The request of the first answer."""
        return self.answers[0].request

    @property
    def is_chosen_late(self) -> bool:
        """Whether it shows at the end only which answers are returned."""
        params = self.request.params
        return params.num_samples > params.n

    def output(self) -> RequestOutput:
        """The finished answers; with `best_of`, the likeliest `n` of them, best first.

        Those that an error ended come last.
        """
        request, answers = self.request, self.answers
        if self.is_chosen_late:
            answers = sorted(answers, key=_order)
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[answer.output(i) for i, answer in enumerate(answers[: request.params.n])],
            finished=True,
            prompt_logprobs=self._prompt_logprobs(),
            num_cached_tokens=request.num_cached_tokens,
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        request = self.request
        if request.params.prompt_logprobs is None:
            return None
        described: list[dict[int, Logprob] | None] = [None] * request.num_prompt_tokens
        start = request.params.prompt_logprob_start + 1
        for index, entry in enumerate(request.prompt_logprobs, start):
            token_id = request.prompt_token_ids[index]
            described[index] = describe_logprobs(token_id, entry, self._tokenizer)
        return described


def _order(answer: Answer) -> tuple[bool, float]:
    is_error = answer.request.finish_reason is FinishReason.ERROR
    return is_error, -(answer.cumulative_logprob or 0.0)


def describe_logprobs(
    token_id: int, entry: TokenLogprobs, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """Log-probabilities of an id and its alternatives by id, with their texts."""
    ranked = [(token_id, entry.logprob, entry.rank)]
    ranked += zip(entry.top_ids, entry.top_logprobs, range(1, len(entry.top_ids) + 1), strict=True)
    described: dict[int, Logprob] = {}
    for candidate, logprob, rank in ranked:
        if candidate in described:
            continue
        if tokenizer is None:
            described[candidate] = Logprob(logprob, rank)
        else:
            text, data = tokenizer.token_text(candidate), tokenizer.token_bytes(candidate)
            described[candidate] = Logprob(logprob, rank, text, data)
    return described
