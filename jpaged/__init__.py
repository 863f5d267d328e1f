"""jpaged: an LLM serving engine in JAX, with a paged KV cache and continuous batching.

Importing this starts nothing and touches no device.
"""

from typing import TYPE_CHECKING, Any

from jpaged.config import EngineConfig
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged.llm import LLM, generate, score
    from jpaged.runner.logits_processor import LogitsProcessor

__all__ = [
    "LLM",
    "EngineConfig",
    "LogitsProcessor",
    "RequestOutput",
    "SamplingParams",
    "generate",
    "score",
]


def __getattr__(name: str) -> Any:
    # Importing JAX and Flax takes seconds, which `jpaged --help` and config code need not pay.
    if name in ("LLM", "generate", "score"):
        import jpaged.llm

        return getattr(jpaged.llm, name)
    if name == "LogitsProcessor":
        import jpaged.runner.logits_processor

        return jpaged.runner.logits_processor.LogitsProcessor
    raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
