"""Attention of real models: the shapes that tests, checks and benchmarks share."""

from typing import NamedTuple


class ModelShape(NamedTuple):
    """One kind of layer of one model.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Numbers per head.
        window: Tokens that a token sees at most; `None`: all.
        softcap: Bound of the logits; `None`: none.
        has_sinks: Whether each head has an extra logit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def with_kv_heads(self, num_kv_heads: int) -> "ModelShape":
        """The same with at most so many KV heads; heads do not know each other."""
        kept = min(num_kv_heads, self.num_kv_heads)
        return self._replace(num_heads=kept * self.group, num_kv_heads=kept)


SHAPES = {
    "smollm2-135m": ModelShape(9, 3, 64),
    "llama-3.2-1b": ModelShape(32, 8, 64),
    "llama-3.1-8b": ModelShape(32, 8, 128),
    "llama-3.1-70b": ModelShape(64, 8, 128),
    "qwen3-14b": ModelShape(40, 8, 128),
    "qwen3-0.6b": ModelShape(16, 8, 128),
    "gemma-2-9b": ModelShape(16, 8, 256, window=4096, softcap=50.0),
    "gemma-3-270m": ModelShape(4, 1, 256, window=512),
    "gpt-oss-20b": ModelShape(64, 8, 64, window=128, has_sinks=True),
    "phi-2": ModelShape(32, 32, 80),
    "phi-3-mini": ModelShape(32, 32, 96),
    "multi-query-16": ModelShape(16, 1, 128),
}
