"""jpaged as a model of EleutherAI's lm-evaluation-harness (`pip install 'jpaged[eval]'`).

lm-eval 0.4.13 knows the models that are registered in its own process, and looks for none in
other packages. So its command line is started through this module, with the same arguments:

    python -m jpaged.lm_eval_adapter --model jpaged --model_args pretrained=smollm2 --tasks arc_easy

In Python, importing the module is enough for `lm_eval.simple_evaluate(model="jpaged", ...)`, and
an `LLM` that is already loaded is evaluated by `simple_evaluate(model=JpagedLM(llm), ...)`.

Text becomes token ids, and what is too long is cut, as in lm-eval's own adapters, so that results
can be compared with theirs.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import batched
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, hash_string, make_disjoint_window
from tqdm import tqdm

from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Pairs scored in one call: enough to keep steps full, few enough for the bar to move.
_NUM_PAIRS = 256

# Fields of SamplingParams that a task may not set: lm-eval has its own names for them, or they
# change nothing in the text.
_NOT_FOR_TASKS = {
    "n", "best_of", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "detokenize", "logprobs",
    "prompt_logprobs", "prompt_logprob_start", "skip_reading_prefix_cache", "extra_args",
}  # fmt: skip
_FOR_TASKS = {field.name for field in fields(SamplingParams)} - _NOT_FOR_TASKS


@register_model("jpaged")
class JpagedLM(TemplateLM):
    """An `LLM` behind lm-eval's model interface.

    Attributes:
        llm: The model.
        tokenizer: Its tokenizer, where lm-eval looks for one.
        max_length: Context and continuation together, in tokens, at most.
    """

    def __init__(
        self,
        pretrained: str | LLM = "smollm2",
        *,
        max_gen_toks: int = 256,
        chat_template_args: Mapping[str, Any] | str | None = None,
        batch_size: int | str | None = None,
        device: str | None = None,
        **options: Any,
    ):
        """Loads a model, or takes one that is loaded.

        Args:
            pretrained: What `LLM` takes as its `model`, or an `LLM`.
            max_gen_toks: Tokens to generate at most, for tasks that do not say.
            chat_template_args: Variables of the chat template, e.g. `{"enable_thinking": False}`,
                or their JSON, which is how the command line hands them over.
            batch_size: Not used, since the engine batches by itself, up to `max_num_seqs`; but
                lm-eval's command line always sends one, 1 by default.
            device: Not used, since JAX decides (`JAX_PLATFORMS`); but lm-eval's command line always
                sends one, "cuda:0" by default.
            **options: As for `LLM`; none beside an `LLM`.

        Raises:
            ValueError: Naming the option at fault, or what the model lacks.
        """
        super().__init__()
        if not isinstance(pretrained, LLM):
            pretrained = LLM(pretrained, show_progress=True, **options)
        elif options:
            raise ValueError(f"{', '.join(options)}: give these to the LLM when it is made")
        self.llm = pretrained
        self.max_length: int = self.llm.engine.max_model_len
        self._max_gen_toks = max_gen_toks
        if isinstance(chat_template_args, str):
            self._chat_template_args: dict[str, Any] = json.loads(chat_template_args)
        else:
            self._chat_template_args = dict(chat_template_args or {})
        self.tokenizer = self.llm.get_tokenizer()
        self._prefix = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)

    @property
    def eot_token_id(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The end-of-sequence token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one: beginning-of-sequence, or else end-of-sequence."""
        for token_id in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return token_id
        raise ValueError("the tokenizer has neither a bos_token nor an eos_token; name one")

    @property
    def tokenizer_name(self) -> str:
        """Tells chat templates and their variables apart, in the cache of rendered requests."""
        rendering = f"{self.tokenizer.chat_template}{self._prefix}{self._chat_template_args}"
        return f"jpaged-{hash_string(rendering)}"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a chat; without the system message if the template refuses it, as "hf" does."""
        arguments: dict[str, Any] = self._chat_template_args | {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return self.tokenizer.render_chat(chat_history, **arguments)
        except ValueError as error:
            chat = [message for message in chat_history if message["role"] != "system"]
            if len(chat) in (0, len(chat_history)):
                raise
            logger.warning("leaving out the system message: %s", error)
            return self.tokenizer.render_chat(chat, **arguments)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encodes text; by default, what already begins with the prefix token gets no second."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._prefix)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each whole text, scored in windows of `max_length` tokens.

        No special token is added to a text beyond the prefix token before its first window, even
        by tokenizers that usually add one, where "hf" would score a second one.
        """
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        flat = [window for text_windows in windows for window in text_windows]
        scores = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        totals = []
        for request, text_windows in zip(requests, windows, strict=True):
            totals.append(sum(next(scores)[0] for _ in text_windows))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers each prompt up to one of its `until` strings, an end token or `max_gen_toks`."""
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        all_args: list[tuple[Any, ...]] = [request.args for request in requests]
        for context, gen_kwargs in all_args:
            kwargs: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs, self._max_gen_toks)}
            params.append(self._sampling_params(**kwargs))
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(self._fit(prompt, kwargs["max_gen_toks"]))
        answers = [""] * len(requests)
        with self._bar("generate_until", len(requests), disable_tqdm) as bar:
            for index, _, _, output in self.llm.stream(prompts, params):
                if output is not None:
                    answers[index] = output.outputs[0].text
                    self.cache_hook.add_partial("generate_until", all_args[index], answers[index])
                    bar.update()
        return answers

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(Log-probability, whether greedy) of (key of lm-eval's cache, context, continuation)."""
        answers = []
        with self._bar("loglikelihood", len(requests), disable_tqdm) as bar:
            for some in batched(requests, _NUM_PAIRS):
                for key, _, continuation in some:
                    if not continuation:
                        raise ValueError(f"a continuation has no tokens after its context: {key!r}")
                scores = self.llm.score(
                    [self._fit(context, len(continuation)) for _, context, continuation in some],
                    [continuation for _, _, continuation in some],
                    use_tqdm=False,
                )
                for (key, _, _), score in zip(some, scores, strict=True):
                    answers.append((score.sum, score.is_greedy))
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answers[-1])
                bar.update(len(some))
        return answers

    def _sampling_params(
        self, *, until: list[str], max_gen_toks: int, do_sample: bool, **kwargs: Any
    ) -> SamplingParams:
        unknown = sorted(kwargs.keys() - _FOR_TASKS)
        if unknown:
            raise ValueError(
                f"generation_kwargs holds {', '.join(unknown)}; jpaged takes until, max_gen_toks, "
                f"do_sample, {', '.join(sorted(_FOR_TASKS))}"
            )
        if not do_sample:
            kwargs["temperature"] = 0.0
        # Tasks stop at the text of special tokens, too, which must therefore be in the answer.
        kwargs.setdefault("skip_special_tokens", False)
        end = self.tokenizer.eos_token_id
        ends = [] if end is None else [end]
        return SamplingParams(max_tokens=max_gen_toks, stop=until, stop_token_ids=ends, **kwargs)

    def _fit(self, context: list[int], num_more: int) -> list[int]:
        """The end of a context, as much as leaves room for `num_more` tokens."""
        room = self.max_length - num_more
        if room < 1:
            raise ValueError(
                f"{num_more} tokens of continuation (max_gen_toks, where it is generated) leave no "
                f"room for a context; max_model_len is {self.max_length}: lower the one or raise "
                "the other"
            )
        if len(context) > room:
            logger.warning(
                "a context of %d tokens is cut to its last %d, before %d tokens of continuation",
                len(context), room, num_more,
            )  # fmt: skip
        return context[-room:]

    def _bar(self, name: str, total: int, disable: bool) -> tqdm:
        return tqdm(total=total, desc=f"Running {name} requests", disable=disable)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
