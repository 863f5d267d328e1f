"""A directory as a checkpoint: config.json, the tokenizer's files, and weights in some format.

What is common to all formats of weights is here: which files say what, and which tensors must be
there.
"""

import abc
import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.checkpoint import EMBEDDING, LM_HEAD, Checkpoint, check_tensors
from jpaged.checkpoint.hf_config import read_model_config
from jpaged.checkpoint.stored_tensor import FLOAT_DTYPES, Index, StoredTensor
from jpaged.config import ModelConfig
from jpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_COMPARED_ROWS = 4096
# The small ones that hold a JSON object; of tokenizer.json its library says what is wrong.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_TOKENIZER_OBJECTS = ("tokenizer_config.json", "special_tokens_map.json")


class ModelDirectory(Checkpoint):
    """A checkpoint in a directory.

    Args:
        directory: It holds config.json, the weights, and the tokenizer's files.
        name: What to call it; the directory's name if `None`.

    Raises:
        OSError: Naming the file that is missing or cannot be read.
        ValueError: Naming the file, tensor or key that is damaged or not supported.
    """

    def __init__(self, directory: Path, name: str | None = None):
        self.name = directory.resolve().name if name is None else name
        self.directory = directory
        config = read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        # A link that leads nowhere is no file that was left out.
        is_there = os.path.lexists(generation_path)
        self.generation_config = read_json(generation_path) if is_there else {}
        model_config = read_model_config(config, self.generation_config)
        try:
            self._tensors = self._open_tensors()
            self.model_config, self.shapes = self._check(model_config)
        except BaseException:
            self.close()
            raise

    @abc.abstractmethod
    def _open_tensors(self) -> dict[str, StoredTensor]:
        """Opens all weight files, and says what is in them."""

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint.read`."""
        return self._tensors[name].read()

    def read_part(self, name: str, index: Index) -> np.ndarray:
        """See `Checkpoint.read_part`."""
        return self._tensors[name].read(index)

    def stored_dtype(self, name: str) -> str:
        """See `Checkpoint.stored_dtype`."""
        return str(self._tensors[name].dtype)

    @property
    def num_bytes(self) -> int:
        """See `Checkpoint.num_bytes`."""
        return sum(self._tensors[name].num_bytes for name in self.shapes)

    def tokenizer(self) -> Tokenizer:
        """See `Checkpoint.tokenizer`."""
        for name in _TOKENIZER_FILES:
            path = self.directory / name
            # Its library would wait for a pipe's writer, and read a device without end.
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is not a regular file. Put the checkpoint's file there")
            if path.exists() and name in _TOKENIZER_OBJECTS:
                read_json(path)
        try:
            return Tokenizer.from_directory(self.directory)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.directory}: its tokenizer files hold a value of the wrong type "
                f"({type(error).__name__}: {error}). Fetch them again"
            ) from error

    def _check(self, config: ModelConfig) -> tuple[ModelConfig, dict[str, tuple[int, ...]]]:
        """Checks the tensors against the config; returns it corrected by them, and the shapes."""
        for name, tensor in self._tensors.items():
            if tensor.dtype is None:
                raise ValueError(
                    f"{tensor.path}: tensor {name!r} is stored as {tensor.stored_as}; "
                    f"supported: {', '.join(FLOAT_DTYPES)}. Packed and quantised weights are not "
                    "supported here: use an unquantised checkpoint, or a GGUF file"
                )
        found = {name: tensor.shape for name, tensor in self._tensors.items()}
        if config.tie_word_embeddings and LM_HEAD in found and EMBEDDING in found:
            if self._heads_are_equal():
                del found[LM_HEAD]
            else:
                # As transformers 5 does (PreTrainedModel.tie_weights).
                logger.warning(
                    "%s: config.json says tie_word_embeddings, but %s differs from %s; both are "
                    "used, as transformers does. Set tie_word_embeddings to false to say so",
                    self.name,
                    LM_HEAD,
                    EMBEDDING,
                )
                config = dataclasses.replace(config, tie_word_embeddings=False)
        shapes = check_tensors(self.name, config, found)
        stored = str(self._tensors[EMBEDDING].dtype)
        return dataclasses.replace(config, dtype=stored), shapes

    def _heads_are_equal(self) -> bool:
        embedding, head = self._tensors[EMBEDDING], self._tensors[LM_HEAD]
        if embedding.shape != head.shape or not embedding.shape:
            return False
        rows = embedding.shape[0]
        for start in range(0, rows, _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, rows)
            ours, theirs = (
                tensor.read([slice(start, stop)]).astype(np.float32) for tensor in (embedding, head)
            )
            if not np.array_equal(ours, theirs):
                return False
        return True


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        OSError: The file is missing or cannot be read.
        ValueError: It holds something else.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing. Fetch the whole checkpoint")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file. Put the checkpoint's file there")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}. Fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}; it must be a JSON object")
    return content
