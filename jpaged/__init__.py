"""jpaged: an LLM serving engine in JAX, with a paged KV cache and continuous batching.

Importing this starts nothing and touches no device.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from jpaged.config import EngineConfig
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput, ScoreOutput
from jpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged.llm import LLM, StreamDelta, generate, score
    from jpaged.runner.logits_processor import LogitsProcessor

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "LogitsProcessor",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StreamDelta",
    "generate",
    "score",
]

# Importing JAX and Flax takes seconds, which `jpaged --help` and config code need not pay.
_LAZY = {
    "LLM": "jpaged.llm",
    "StreamDelta": "jpaged.llm",
    "generate": "jpaged.llm",
    "score": "jpaged.llm",
    "LogitsProcessor": "jpaged.runner.logits_processor",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "__version__":
        return importlib.metadata.version("jpaged")
    raise AttributeError(f"module 'jpaged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
