"""What requests may hold: the fields of OpenAI's API and vLLM's, with the defaults of the latter.

A field is honoured, or refused by name when it asks for something that there is not, or passed over
when it could not change the answer. What nobody knows is accepted, and named in a header.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jpaged.sampling_params import SamplingParams
from server.errors import ApiError, bad_request

MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
DEFAULT_MAX_TOKENS = 16
MAX_ERRORS_SHOWN, MAX_VALUE_SHOWN = 10, 200

# Fields that say nothing about the answer.
HARMLESS = frozenset(
    {
        "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "session_id", "service_tier",
    }
)  # fmt: skip

_OFF: tuple[Any, ...] = (None, False, [], {}, "")
# Fields that there is nothing for, and the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "suffix": _OFF,
    "use_beam_search": _OFF,
    "length_penalty": (None, 1.0, 1),
    "prompt_embeds": _OFF,
    "logprob_token_ids": _OFF,
    "tools": (None,),  # of chats, see ChatRequest
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": _OFF,
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": _OFF,
    "guided_json": _OFF,
    "guided_regex": _OFF,
    "guided_choice": _OFF,
    "guided_grammar": _OFF,
    "guided_decoding_backend": _OFF,
    "guided_whitespace_pattern": _OFF,
    "reasoning_effort": (None, "none"),
    "include_reasoning": (None, True, False),  # there is none to include
    "thinking_token_budget": _OFF,
    "return_weight_versions": _OFF,
    "return_token_offsets": _OFF,
    "routed_experts_prompt_start": _OFF,
    "kv_transfer_params": _OFF,
    "ec_transfer_params": _OFF,
    "repetition_detection": _OFF,
    "mm_processor_kwargs": _OFF,
    "media_io_kwargs": _OFF,
    "mm_payload": _OFF,
    "watermarking": _OFF,
    "modalities": (None, ["text"]),
    "audio": _OFF,
    "prediction": _OFF,
    "web_search_options": _OFF,
    "verbosity": (None, "medium"),
    "store": _OFF,
    "stop_regex": _OFF,
    "regex": _OFF,
    "ebnf": _OFF,
    "lora_path": _OFF,
    "custom_logit_processor": _OFF,
    "return_hidden_states": _OFF,
    "grammar": _OFF,
    "typical_p": (None, 1.0, 1),
    "mirostat": (None, 0),
}

Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(extra="allow")
    include_usage: Flag | None = False
    continuous_usage_stats: Flag | None = False


class GenerationRequest(BaseModel):
    """Fields that both kinds of requests have."""

    model_config = ConfigDict(extra="allow")

    model: Text | None = None
    max_tokens: Whole | None = None
    n: Whole | None = 1
    best_of: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = 0.0
    frequency_penalty: Number | None = 0.0
    repetition_penalty: Number | None = None
    seed: Whole | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Whole] | None = None
    include_stop_str_in_output: Flag | None = False
    ignore_eos: Flag | None = False
    min_tokens: Whole | None = 0
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: list[Whole] | None = None
    bad_words: list[Text] | None = None
    prompt_logprobs: Whole | None = None
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    stream_interval: Whole | None = None
    skip_special_tokens: Flag | None = True
    spaces_between_special_tokens: Flag | None = True
    truncate_prompt_tokens: Whole | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Whole | None = 0
    request_id: Text | None = None
    cache_salt: Text | None = None
    return_token_ids: Flag | None = False
    return_tokens_as_token_ids: Flag | None = False
    return_prompt_text: Flag | None = False
    vllm_xargs: dict[str, Any] | None = None

    def ignored(self) -> list[str]:
        """Names of fields that nobody knows."""
        extra = self.model_extra or {}
        return sorted(set(extra) - HARMLESS - UNSUPPORTED.keys())

    def check(self) -> None:
        """Refuses what there is not, and what contradicts itself.

        Raises:
            ApiError: Naming the field.
        """
        for name, value in (self.model_extra or {}).items():
            allowed = UNSUPPORTED.get(name)
            if allowed is not None and not any(_same(value, entry) for entry in allowed):
                raise bad_request(
                    f"{name} is {_shown(value)}; jpaged does not offer it: leave it out", name
                )
        if self.stream_options is not None and not self.stream:
            raise bad_request(
                "stream_options is given without stream; set stream to true", "stream_options"
            )
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise bad_request(
                f"stop has {len(self.stop)} entries; it may have {MAX_STOP_STRINGS}", "stop"
            )
        for name, most in (("bad_words", MAX_BAD_WORDS), ("stop_token_ids", MAX_STOP_TOKEN_IDS)):
            entries = getattr(self, name) or ()
            if len(entries) > most:
                raise bad_request(f"{name} has {len(entries)} entries; it may have {most}", name)
        if self.stream and self.prompt_logprobs is not None and self.prompt_logprobs != 0:
            raise bad_request(
                f"prompt_logprobs is {self.prompt_logprobs} with stream; it needs stream false",
                "prompt_logprobs",
            )
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise bad_request(
                f"best_of is {self.best_of} with stream; which answers are the best shows at the "
                "end only: leave one out",
                "best_of",
            )
        if self.cache_salt is not None:
            is_long = len(self.cache_salt) > 128
            if is_long or not self.cache_salt or any(c in self.cache_salt for c in "@/\\\0"):
                raise bad_request(
                    "cache_salt must have 1 to 128 characters and none of @ / \\ NUL", "cache_salt"
                )
        if self.stream_interval is not None and self.stream_interval < 1:
            raise bad_request(
                f"stream_interval is {self.stream_interval}; it must be at least 1",
                "stream_interval",
            )

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """What the engine is asked for.

        Args:
            defaults: Of the model; where a field is null or left out, they count.
            max_tokens: Already resolved; `None`: as many as fit.
            logprobs: Alternatives for each token; `None`: nothing.

        Raises:
            ApiError: Naming the field that is out of range.
        """
        fields: dict[str, Any] = dict(defaults)
        cap = fields.pop("max_tokens", None)  # of the server, as in vLLM
        names = (
            "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids",
            "include_stop_str_in_output", "ignore_eos", "min_tokens", "logit_bias",
            "allowed_token_ids", "bad_words", "prompt_logprobs", "skip_special_tokens",
            "spaces_between_special_tokens",
        )  # fmt: skip
        given = self.model_fields_set
        for name in names:
            value = getattr(self, name)
            if value is not None and (name in given or name not in fields):
                fields[name] = value
        if self.seed is not None and self.seed != -1:
            fields["seed"] = self.seed
        if self.vllm_xargs:
            fields["extra_args"] = self.vllm_xargs
        limits = [limit for limit in (max_tokens, cap) if limit is not None]
        max_tokens = min(limits) if limits else None
        if max_tokens == 0 and fields.get("prompt_logprobs") is None:
            fields["prompt_logprobs"] = 0  # nothing is generated; the prompt is looked at
        try:
            return SamplingParams(**fields, max_tokens=max_tokens, logprobs=logprobs)
        except ValueError as error:
            message = str(error).removeprefix("SamplingParams.")
            raise bad_request(message, message.split(" ", 1)[0]) from None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Text | list[Text] | list[Whole] | list[list[Whole]]
    echo: Flag | None = False
    logprobs: Whole | None = None
    add_special_tokens: Flag | None = True


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Whole | None = None
    logprobs: Flag | None = False
    top_logprobs: Whole | None = None
    echo: Flag | None = False
    add_special_tokens: Flag | None = False
    add_generation_prompt: Flag | None = True
    continue_final_message: Flag | None = False
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    def check(self) -> None:
        """Refuses calls of tools; which there are is told to the template.

        Raises:
            ApiError: Naming the field.
        """
        super().check()
        if self.tools is not None and not self.tools:
            raise bad_request("tools is []; leave it out", "tools")
        if self.tool_choice not in (None, "none", "auto"):
            raise bad_request(
                f"tool_choice is {_shown(self.tool_choice)}; jpaged does not offer it: leave it "
                "out",
                "tool_choice",
            )
        if self.tools and self.tool_choice != "none":
            raise bad_request(
                "tools is given; jpaged does not read calls of tools out of answers: leave it out, "
                'or set tool_choice to "none" to have the tools in the prompt only',
                "tools",
            )


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or a conversation."""

    model_config = ConfigDict(extra="allow")
    model: Text | None = None
    prompt: Text | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = False
    add_generation_prompt: Flag | None = True
    continue_final_message: Flag | None = False
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="allow")
    model: Text | None = None
    tokens: list[Whole]


def parse[Model: BaseModel](kind: type[Model], body: Any) -> Model:
    """A request from JSON that was read.

    Raises:
        ApiError: Naming the fields at fault.
    """
    if not isinstance(body, dict):
        raise bad_request(f"the body is {_shown(body)}; it must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ApiError:
    entries = error.errors(include_url=False, include_context=False)
    lines: dict[str, str] = {}
    for entry in entries:
        # Of a field that may be of several kinds, pydantic names each kind behind the field.
        name = str(entry["loc"][0]) if entry["loc"] else "body"
        if name not in lines:
            value = "" if entry["type"] == "missing" else f" (here {_shown(entry['input'])})"
            lines[name] = f"{name}: {entry['msg']}{value}"
    shown = list(lines.values())[:MAX_ERRORS_SHOWN]
    return bad_request("; ".join(shown), next(iter(lines)))


def _same(value: Any, other: Any) -> bool:
    """Equal, and not as False is to 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_SHOWN else text[:MAX_VALUE_SHOWN] + "..."
