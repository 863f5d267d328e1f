"""Which architectures exist: their name in config.json, their module, their checkpoint names."""

from collections.abc import Callable
from typing import NamedTuple

from flax import nnx

from jpaged.config import ModelConfig
from jpaged.models import llama


class Family(NamedTuple):
    """One model family.

    Attributes:
        module: Makes the module of a config and a dtype.
        leaf_sources: Where each leaf comes from in a checkpoint.
    """

    module: Callable[..., nnx.Module]
    leaf_sources: Callable[[ModelConfig], dict[str, llama.LeafSource]]


_LLAMA = Family(llama.Llama, llama.leaf_sources)
FAMILIES = {"LlamaForCausalLM": _LLAMA, "MistralForCausalLM": _LLAMA}


def find_family(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        ValueError: If there is none; names those that exist.
    """
    if architecture not in FAMILIES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]
