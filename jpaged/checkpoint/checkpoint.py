"""What every kind of checkpoint offers, and what a model must find in one.

A checkpoint is verified when it is opened: once a `Checkpoint` exists, every tensor that its
model needs is there, whole, and of the right shape, and nothing in it that would change the
result is left unread. Its tensors are named and laid out as Hugging Face does it, whatever the
file format: `model.layers.0.self_attn.q_proj.weight` of shape `[out, in]`.
"""

import abc
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jpaged.checkpoint.stored_tensor import Index
from jpaged.config import ModelConfig
from jpaged.models.registry import find_family
from jpaged.text.tokenizer import Tokenizer

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

# Tables of rotary frequencies that old checkpoints carry along; they follow from the config.
_HARMLESS_TENSOR = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


class Checkpoint(abc.ABC):
    """A verified model on disk: its configuration, its tensors one by one, its tokenizer.

    Reading is safe from several threads at once. A checkpoint is a context manager.

    Attributes:
        name: What the caller called it, e.g. "smollm2" or "org/name".
        model_config: The shape of the model.
        generation_config: generation_config.json as it is; empty where there is none.
        shapes: Shape of every tensor that the model needs, by its Hugging Face name.
    """

    name: str
    model_config: ModelConfig
    generation_config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Reads one tensor, and nothing else, from disk into memory of its own.

        Args:
            name: A key of `shapes`.

        Returns:
            The tensor as it is stored, `ml_dtypes.bfloat16` included; what GGUF stores
            quantised comes dequantised, as float32.
        """

    def read_part(self, name: str, index: Index) -> np.ndarray:
        """Reads a part of a tensor: what one of several devices needs.

        Args:
            name: A key of `shapes`.
            index: The part. Formats that can do so read no more than this from disk.

        Returns:
            A contiguous array, otherwise as of `read`.
        """
        return np.ascontiguousarray(self.read(name)[tuple(index)])

    def stored_dtype(self, name: str) -> str:
        """The dtype in which `read` gives a tensor, by its name in `jpaged.config.DTYPES`."""
        return "float32"

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all tensors in `shapes` together, as `read` returns them."""

    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer, chat template included."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the files; `read` fails from then on. May be called twice."""

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a model needs, by Hugging Face name."""
    sources = find_family(config.architecture).leaf_sources(config)
    return {name: shape for source in sources.values() for name, shape in source.tensors.items()}


def check_tensors(
    name: str, config: ModelConfig, found: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Refuses a checkpoint whose tensors are not the ones that its config promises.

    Args:
        name: The checkpoint, for the message.
        config: What the model should be.
        found: Shapes of what the files hold.

    Returns:
        `expected_shapes(config)`.

    Raises:
        ValueError: Naming the first tensor that is missing, misshapen or not understood.
    """
    # A damaged config can ask for more layers than there is memory for their names.
    if config.num_layers > len(found):
        raise ValueError(
            f"{name}: the config asks for {config.num_layers} layers, and there are {len(found)} "
            "tensors in all. Use the config.json that belongs to these weights"
        )
    expected = expected_shapes(config)
    for tensor, shape in expected.items():
        if tensor not in found:
            raise ValueError(
                f"{name}: tensor {tensor!r} is missing; the config asks for it with shape "
                f"{list(shape)}. Use a complete checkpoint of this model"
            )
        if found[tensor] != shape:
            raise ValueError(
                f"{name}: tensor {tensor!r} has shape {list(found[tensor])}; the config asks for "
                f"{list(shape)}. Use the config.json that belongs to these weights"
            )
    for tensor in found:
        if tensor not in expected and not _HARMLESS_TENSOR.fullmatch(tensor):
            raise ValueError(
                f"{name}: tensor {tensor!r} is not part of this architecture, and leaving it out "
                "would change the result. Use a checkpoint of a supported architecture"
            )
    return expected


def count_elements(shapes: Iterable[tuple[int, ...]]) -> int:
    """Elements in tensors of these shapes together."""
    return sum(math.prod(shape) for shape in shapes)
