"""What the checkpoint says (`ModelConfig`) and what the operator says (`EngineConfig`).

Both are frozen and validated when they are made; dtypes are strings, so that nothing here
imports JAX. What one caller asks of one request is `jpaged.sampling_params`.
"""

from dataclasses import dataclass

from jpaged.kv_groups import KVGroup, group_layers

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu_tanh")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
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
class RopeConfig:
    """Rotary position embeddings, and how they are stretched beyond the length of training.

    Attributes:
        theta: The base of the frequencies.
        rotary_dim: Dimensions of a head that are rotated; `None`: all.
        rope_type: One of `ROPE_TYPES`, by transformers' names.
        factor: How much longer; of all types but "default" and "longrope".
        original_max_position_embeddings: Length of training; of all types but "default" and
            "linear".
        attention_factor: Multiplies cosine and sine; of "yarn" and "longrope".
        low_freq_factor, high_freq_factor: Of "llama3".
        beta_fast, beta_slow, truncate: Of "yarn".
        short_factor, long_factor: Of "longrope", one for each pair of dimensions; the long ones
            where requests may be longer than `original_max_position_embeddings`.
    """

    theta: float = 10000.0
    rotary_dim: int | None = None
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope.rope_type is {self.rope_type!r}; it must be one of {ROPE_TYPES}"
            )
        check_range("rope", "factor", self.factor, minimum=1.0)
        check_range("rope", "rotary_dim", self.rotary_dim, minimum=2)
        if self.rotary_dim is not None and self.rotary_dim % 2:
            raise ValueError(f"rope.rotary_dim is {self.rotary_dim}; it must be even")
        if self.rope_type not in ("default", "linear"):
            original = self.original_max_position_embeddings
            if original is None or original < 1:
                raise ValueError(
                    f"rope.original_max_position_embeddings is {original!r}; {self.rope_type} "
                    "needs it"
                )
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"rope.high_freq_factor is {self.high_freq_factor!r}; it must be greater than "
                f"low_freq_factor, which is {self.low_freq_factor!r} and must be above 0"
            )
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"rope.beta_fast is {self.beta_fast!r}; it must be greater than beta_slow, which "
                f"is {self.beta_slow!r} and must be above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model, read from its checkpoint: what its family and it leave open.

    Attributes:
        architecture: Name in `jpaged.models`, e.g. "LlamaForCausalLM".
        vocab_size: Rows of the embedding. The tokenizer may know fewer ids; the rest is padding.
        num_tokens_known: Ids that the tokenizer knows; ids from here on are never sampled.
            `None` means all of `vocab_size`.
        head_dim: Width of one head; not always `hidden_size / num_heads`.
        max_position_embeddings: Longest request.
        max_model_len: Longest request that the engine will take, for the types of rotary embeddings
            that depend on it ("dynamic" and "longrope"). `None`: `max_position_embeddings`.
        activation: Of the gate: "silu" or "gelu_tanh".
        rope: Rotary embeddings.
        window_rope: Those of layers with a window; `None`: the same.
        windows: Tokens that each layer's tokens see at most, themselves included; `None`: all;
            empty: no layer has a window.
        attention_scale: Of the scores; `None`: `head_dim**-0.5`.
        attention_softcap: Scores become `softcap * tanh(score / softcap)`.
        logits_softcap: The same for logits.
        qk_norm: Norms of queries and keys: "head" (each head by itself), "row" (all heads of a
            token together) or `None`.
        norm_before, norm_after: Norms of what attention and MLP read and give.
        norm_adds_one: Norms scale by one plus their weight.
        embedding_scale: Multiplies embeddings.
        residual_scale: Multiplies what attention and MLP give.
        logits_scale: Multiplies logits.
        qkv_bias, o_bias: Biases of attention's projections.
        mlp_bias: Biases on the gate, up and down projections.
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
    max_model_len: int | None = None
    activation: str = "silu"
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    window_rope: RopeConfig | None = None
    windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    qk_norm: str | None = None
    norm_before: bool = True
    norm_after: bool = False
    norm_adds_one: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
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
        for name, allowed in (("activation", ACTIVATIONS), ("qk_norm", (None, "head", "row"))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"ModelConfig.{name} is {getattr(self, name)!r}; it must be one of {allowed}"
                )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"ModelConfig.windows has {len(self.windows)} entries; there are {self.num_layers} "
                "layers"
            )
        for window in self.windows:
            check_range("ModelConfig", "windows", window, minimum=1)
        for name in ("rope", "window_rope"):
            rope = getattr(self, name)
            if rope is not None and (rope.rotary_dim or 0) > self.head_dim:
                raise ValueError(
                    f"ModelConfig.{name}.rotary_dim is {rope.rotary_dim}; a head has "
                    f"{self.head_dim} dimensions"
                )

    def window(self, layer: int) -> int | None:
        """The window of a layer; `None`: its tokens see all before them."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotary embeddings of a layer."""
        if self.window_rope is None or self.window(layer) is None:
            return self.rope
        return self.window_rope

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """How the layers share block tables; a window that no request outgrows is none."""
        limit = self.max_model_len or self.max_position_embeddings
        windows = self.windows or (None,) * self.num_layers
        return group_layers(tuple(w if w is not None and w < limit else None for w in windows))

    @property
    def num_cached_layers(self) -> int:
        """Layers whose keys and values one block holds."""
        return max(len(group.layers) for group in self.kv_groups)


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
