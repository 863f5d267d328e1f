"""What the checkpoint says (`ModelConfig`) and what the operator says (`EngineConfig`).

Both are frozen and validated when they are made; dtypes are strings, so that nothing here
imports JAX. What one caller asks of one request is `jpaged.sampling_params`.
"""

from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "xla", "triton", "mosaic")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


def check_range(
    owner: str,
    name: str,
    value: int | float | None,
    *,
    minimum: int | float | None = None,
    maximum: int | float | None = None,
) -> None:
    """Raises `ValueError` naming the field, the value and the allowed range.

    `None` passes: it stands for "choose for me" wherever a field allows it.
    """
    if value is None:
        return
    too_low = minimum is not None and not value >= minimum
    too_high = maximum is not None and not value <= maximum
    if too_low or too_high:
        if minimum is None:
            wanted = f"at most {maximum}"
        elif maximum is None:
            wanted = f"at least {minimum}"
        else:
            wanted = f"between {minimum} and {maximum}"
        raise ValueError(f"{owner}.{name} is {value!r}; it must be {wanted}")


def check_int(owner: str, name: str, value: object) -> None:
    """Raises `ValueError` unless the value is a whole number or `None`."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{owner}.{name} is {value!r}; it must be a whole number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's rescaling of rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_range("rope_scaling", "factor", self.factor, minimum=1.0)
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"rope_scaling.high_freq_factor is {self.high_freq_factor!r}; it must be greater "
                f"than low_freq_factor, which is {self.low_freq_factor!r} and must be above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model, read from its checkpoint.

    Attributes:
        architecture: Name in `jpaged.models`, e.g. "LlamaForCausalLM".
        vocab_size: Rows of the embedding. The tokenizer may know fewer ids; the rest is padding.
        num_tokens_known: Ids that the tokenizer knows; ids from here on are never sampled.
            `None` means all of `vocab_size`.
        head_dim: Width of one head; not always `hidden_size / num_heads`.
        attention_bias: Biases on the q, k, v and o projections.
        mlp_bias: Biases on the gate, up and down projections.
        rope_scaling: `None` for plain rotary embeddings.
        bos_token_id: `None` where the model has none.
        eos_token_ids: Every id that ends an answer, from generation_config.json first.
        dtype: What the checkpoint's weights are stored in, as a string.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_tokens_known: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            check_range("ModelConfig", name, getattr(self, name), minimum=1)
        check_range(
            "ModelConfig",
            "num_tokens_known",
            self.num_tokens_known,
            minimum=1,
            maximum=self.vocab_size,
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig.num_heads is {self.num_heads}; it must be a multiple of "
                f"num_kv_heads, which is {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"ModelConfig.head_dim is {self.head_dim}; rotary embeddings need it to be even"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the operator decides. `None` means "choose for me"; each field says how.

    Attributes:
        max_num_seqs: Requests in one step at most. `None`: 16 on CPU, 256 on GPU.
        max_num_batched_tokens: Tokens in one step at most. `None`: 256 on CPU, 2048 on GPU.
        max_model_len: Prompt and answer of one request together, in tokens. `None`: the
            model's own limit, or what the KV cache holds if that is less.
        block_size: Tokens per KV block.
        num_blocks: KV blocks that requests can use. `None`: from `kv_cache_memory_bytes`.
        kv_cache_memory_bytes: Size of the KV cache. `None`: from `memory_utilization`.
        memory_utilization: Share of the device's memory (on CPU: of the memory available at
            start) that weights, compiled workspace and KV cache may take together. On CPU the cache
            is also never more than 1 GiB, nor than `max_num_seqs` full-length requests need.
        enable_prefix_caching: Share blocks between requests with equal prefixes.
        long_prefill_token_threshold: Most prompt tokens of one request in one step; 0: no limit.
        watermark: Share of the blocks kept free when a new request is admitted, so that it is
            not preempted at once.
        scheduling_policy: "fcfs" or "priority" (lower `priority` runs first, then arrival).
        decode_buckets: Padded sizes of steps in which every request computes one token. `None`:
            1, 4, then doubling up to `max_num_seqs`.
        mixed_buckets: Padded token counts of all other steps. `None`: 64, 256, then times four
            up to `max_num_batched_tokens`.
        dtype: "auto" (float32 on CPU, the checkpoint's 16-bit type or bfloat16 on GPU),
            "float32" or "bfloat16".
        attention_backend: "auto" (by a table of measurements, for the GPU at hand; on CPU the
            CPU's own kernel), or one of "xla", "triton" and "mosaic". GPU kernels that are asked
            for on a CPU are interpreted, which is slow and for tests.
        max_logprobs: Alternatives whose log-probabilities a request may ask for, at most; -1: the
            whole vocabulary, which every step then has room for.
        logprobs_mode: What is reported: "raw_logprobs" or "raw_logits" of the model's own
            distribution, "processed_logprobs" or "processed_logits" of the one that was sampled
            from, after all that the request asked.
        seed: Draws the seeds of requests that bring none.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    scheduling_policy: str = "fcfs"
    decode_buckets: tuple[int, ...] | None = None
    mixed_buckets: tuple[int, ...] | None = None
    dtype: str = "auto"
    attention_backend: str = "auto"
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    seed: int = 0

    def __post_init__(self) -> None:
        owner = "EngineConfig"
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "num_blocks",
            "kv_cache_memory_bytes",
        ):
            check_int(owner, name, getattr(self, name))
            check_range(owner, name, getattr(self, name), minimum=1)
        check_range(
            owner, "long_prefill_token_threshold", self.long_prefill_token_threshold, minimum=0
        )
        check_range(owner, "watermark", self.watermark, minimum=0.0, maximum=0.5)
        check_range(owner, "memory_utilization", self.memory_utilization, minimum=0.01, maximum=1.0)
        check_int(owner, "max_logprobs", self.max_logprobs)
        check_range(owner, "max_logprobs", self.max_logprobs, minimum=-1)
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(
                f"{owner}.logprobs_mode is {self.logprobs_mode!r}; it must be one of "
                f"{', '.join(LOGPROBS_MODES)}"
            )
        check_range(owner, "seed", self.seed, minimum=0, maximum=2**63 - 1)
        check_int(owner, "long_prefill_token_threshold", self.long_prefill_token_threshold)
        check_int(owner, "seed", self.seed)
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(
                f"{owner}.scheduling_policy is {self.scheduling_policy!r}; "
                "it must be 'fcfs' or 'priority'"
            )
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(
                f"{owner}.dtype is {self.dtype!r}; it must be 'auto', 'float32' or 'bfloat16'"
            )
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise ValueError(
                f"{owner}.attention_backend is {self.attention_backend!r}; it must be one of "
                f"{', '.join(ATTENTION_BACKENDS)}"
            )
        for name in ("decode_buckets", "mixed_buckets"):
            sizes: tuple[int, ...] | None = getattr(self, name)
            if not isinstance(sizes, tuple | None):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"{owner}.{name} is {sizes!r}; it must be a tuple of sizes")
            for size in sizes or ():
                check_int(owner, name, size)
                check_range(owner, name, size, minimum=1)
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError(
                f"{owner}.num_blocks is {self.num_blocks} and {owner}.kv_cache_memory_bytes is "
                f"{self.kv_cache_memory_bytes}; give one of them"
            )
