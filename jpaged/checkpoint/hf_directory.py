"""A Hugging Face directory as a checkpoint: config.json beside one or more safetensors files.

The format of a safetensors file (https://huggingface.co/docs/safetensors): eight bytes that say
how long the header is, the header in JSON, then the tensors' bytes without gaps. It is parsed
here because the library's NumPy interface has no bfloat16 and hides truncation until a read.
"""

import collections
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jpaged.checkpoint.checkpoint import (
    EMBEDDING,
    LM_HEAD,
    Checkpoint,
    check_tensors,
    count_elements,
)
from jpaged.checkpoint.hf_config import read_model_config
from jpaged.checkpoint.tensor_file import Extent, TensorFile
from jpaged.config import ModelConfig
from jpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_COMPARED_ROWS = 4096
# The safetensors library's own limit.
_MAX_HEADER_BYTES = 100_000_000
# The small ones that hold a JSON object; of tokenizer.json its library says what is wrong.
_TOKENIZER_OBJECTS = ("tokenizer_config.json", "special_tokens_map.json")


class _Tensor(NamedTuple):
    """Where one tensor stands."""

    file: TensorFile
    dtype: str
    shape: tuple[int, ...]
    extent: Extent


class HFDirectory(Checkpoint):
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
        self._directory = directory
        config = _read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        self.generation_config = _read_json(generation_path) if generation_path.exists() else {}
        model_config = read_model_config(config, self.generation_config)
        self._files: list[TensorFile] = []
        try:
            self._tensors = self._open_files()
            self.model_config, self.shapes = self._check(model_config)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint.read`."""
        tensor = self._tensors[name]
        return tensor.file.read(tensor.extent).view(_DTYPES[tensor.dtype]).reshape(tensor.shape)

    @property
    def num_bytes(self) -> int:
        """See `Checkpoint.num_bytes`."""
        return sum(self._tensors[name].extent.num_bytes for name in self.shapes)

    def tokenizer(self) -> Tokenizer:
        """See `Checkpoint.tokenizer`."""
        for name in _TOKENIZER_OBJECTS:
            if (self._directory / name).exists():
                _read_json(self._directory / name)
        try:
            return Tokenizer.from_directory(self._directory)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self._directory}: its tokenizer files hold a value of the wrong type "
                f"({type(error).__name__}: {error}). Fetch them again"
            ) from error

    def close(self) -> None:
        """See `Checkpoint.close`."""
        for file in self._files:
            file.close()

    def _open_files(self) -> dict[str, _Tensor]:
        """Opens all weight files and reads their headers."""
        if (self._directory / _SINGLE).exists():
            return self._open_file(_SINGLE)
        if not (self._directory / _INDEX).exists():
            raise _no_weights(self._directory)
        weight_map = _read_weight_map(self._directory / _INDEX)
        tensors: dict[str, _Tensor] = {}
        for shard in sorted(set(weight_map.values())):
            if not (self._directory / shard).exists():
                raise FileNotFoundError(
                    f"{self._directory / shard} is missing; {_INDEX} names it. Fetch it, or the "
                    "whole checkpoint again"
                )
            for name, tensor in self._open_file(shard).items():
                if weight_map.get(name) != shard:
                    raise ValueError(
                        f"{self._directory / shard} holds tensor {name!r}, for which {_INDEX} "
                        f"names {weight_map.get(name)!r}: files of different checkpoints are "
                        "mixed. Fetch the whole checkpoint again"
                    )
                tensors[name] = tensor
        for name, shard in weight_map.items():
            if name not in tensors:
                raise ValueError(
                    f"{self._directory / shard} does not hold tensor {name!r}, for which {_INDEX} "
                    "names it: files of different checkpoints are mixed. Fetch the whole "
                    "checkpoint again"
                )
        return tensors

    def _open_file(self, name: str) -> dict[str, _Tensor]:
        file = TensorFile(self._directory / name)
        self._files.append(file)
        return _read_header(file)

    def _check(self, config: ModelConfig) -> tuple[ModelConfig, dict[str, tuple[int, ...]]]:
        """Checks the tensors against the config; returns it corrected by them, and the shapes."""
        for name, tensor in self._tensors.items():
            if tensor.dtype not in _DTYPES:
                raise ValueError(
                    f"{tensor.file.path}: tensor {name!r} is stored as {tensor.dtype}; supported: "
                    f"{', '.join(_DTYPES)}. Packed and quantised weights are not supported here: "
                    "use an unquantised checkpoint, or a GGUF file"
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
        stored = str(_DTYPES[self._tensors[EMBEDDING].dtype])
        return dataclasses.replace(config, dtype=stored), shapes

    def _heads_are_equal(self) -> bool:
        embedding, head = self._tensors[EMBEDDING], self._tensors[LM_HEAD]
        if embedding.shape != head.shape or not embedding.shape:
            return False
        rows = embedding.shape[0]
        for start in range(0, rows, _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, rows)
            if not np.array_equal(
                _read_rows(embedding, start, stop), _read_rows(head, start, stop)
            ):
                return False
        return True


def _read_rows(tensor: _Tensor, start: int, stop: int) -> np.ndarray:
    """Rows of a matrix, flat, as float32."""
    row_bytes = tensor.extent.num_bytes // tensor.shape[0]
    extent = Extent(tensor.extent.offset + start * row_bytes, (stop - start) * row_bytes)
    return tensor.file.read(extent).view(_DTYPES[tensor.dtype]).astype(np.float32)


def _read_header(file: TensorFile) -> dict[str, _Tensor]:
    """Parses the header of a safetensors file, and checks that the data are all there."""
    problem = f"{file.path} is not a whole safetensors file: "
    if file.num_bytes < 8:
        raise ValueError(f"{problem}it has {file.num_bytes} bytes. Fetch it again")
    header_bytes = int.from_bytes(file.read(Extent(0, 8)).tobytes(), "little")
    data_start = 8 + header_bytes
    if data_start > file.num_bytes:
        raise ValueError(
            f"{problem}its header should end at byte {data_start}, the file ends at "
            f"{file.num_bytes}. Fetch it again"
        )
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(
            f"{problem}its header should have {header_bytes} bytes, and {_MAX_HEADER_BYTES} is the "
            "most that the format allows. Fetch it again"
        )
    try:
        header = json.loads(
            file.read(Extent(8, header_bytes)).tobytes(), object_pairs_hook=_unique_keys
        )
        if not isinstance(header, dict):
            raise ValueError(f"it holds {type(header).__name__} instead of an object")
        header.pop("__metadata__", None)
        tensors = {
            name: _parse_entry(name, entry, file, data_start) for name, entry in header.items()
        }
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{problem}its header is unreadable ({error}). Fetch it again") from error
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].extent):
        if tensor.dtype in _DTYPES:
            num_bytes = count_elements([tensor.shape]) * _DTYPES[tensor.dtype].itemsize
            if tensor.extent.num_bytes != num_bytes:
                raise ValueError(
                    f"{problem}tensor {name!r} of shape {list(tensor.shape)} and dtype "
                    f"{tensor.dtype} takes {tensor.extent.num_bytes} bytes instead of {num_bytes}. "
                    "Fetch it again"
                )
        if tensor.extent.offset != end:
            raise ValueError(
                f"{problem}tensor {name!r} begins at byte {tensor.extent.offset}, the one before "
                f"it ends at {end}. Fetch it again"
            )
        end += tensor.extent.num_bytes
    if end != file.num_bytes:
        raise ValueError(
            f"{problem}its tensors end at byte {end}, the file at {file.num_bytes}. Fetch it again"
        )
    return tensors


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        [(name, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice")
    return content


def _parse_entry(name: str, entry: Any, file: TensorFile, data_start: int) -> _Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            if all(type(size) is int and size >= 0 for size in shape) and 0 <= start <= stop:
                return _Tensor(file, dtype, tuple(shape), Extent(data_start + start, stop - start))
    raise ValueError(f"dtype, shape and data_offsets of tensor {name!r} make no sense: {entry!r}")


def _read_weight_map(path: Path) -> dict[str, str]:
    """The index: which file of the directory holds which tensor."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"{path}: weight_map is {type(weight_map).__name__}; it must be an object that names "
            "the file of each tensor. Fetch it again"
        )
    for name, shard in weight_map.items():
        # By its words and not by where links lead: the hub's cache is made of links.
        if not isinstance(shard, str) or not _is_inside(Path(shard)):
            raise ValueError(
                f"{path}: weight_map names {shard!r} for tensor {name!r}; it must be the name of a "
                "file in the same directory. Fetch it again"
            )
    return weight_map


def _is_inside(path: Path) -> bool:
    return path.parts != () and not path.is_absolute() and ".." not in path.parts


def _no_weights(directory: Path) -> Exception:
    pickled = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)
    )
    if pickled:
        return ValueError(
            f"{directory / pickled[0]} is a pickled checkpoint, which can run code when it is "
            "opened; jpaged reads safetensors only. Convert it, e.g. with transformers: "
            "save_pretrained(..., safe_serialization=True)"
        )
    return FileNotFoundError(
        f"{directory} holds neither {_SINGLE} nor {_INDEX}. Fetch the whole checkpoint"
    )


def _read_json(path: Path) -> dict[str, Any]:
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
