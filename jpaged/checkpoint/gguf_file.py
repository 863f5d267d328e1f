"""A GGUF file as a checkpoint.

The `gguf` package knows the quantised formats. Its reader takes six seconds for a vocabulary of
49,152 tokens (one NumPy view per string), which every start would pay, so the header is parsed
here, after docs/gguf.md of ggml-org/ggml: magic, version, counts, then key-value pairs, then
one record per tensor, then the aligned data.
"""

import dataclasses
import math
import reprlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from jpaged.checkpoint.checkpoint import Checkpoint, check_tensors, count_elements
from jpaged.checkpoint.gguf_config import ROPE_FACTORS, find_architecture, read_config
from jpaged.checkpoint.gguf_tokenizer import (
    build_tokenizer,
    find_end_token_ids,
    read_tokenizer_config,
)
from jpaged.checkpoint.hf_config import read_model_config
from jpaged.checkpoint.tensor_file import Extent, TensorFile
from jpaged.text.tokenizer import Tokenizer

_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q",
                   11: "q", 12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_BLOCKS_PER_ROW = 256
# What the largest vocabularies fill is a third of it; a damaged length must not fill the memory.
_MAX_HEADER_BYTES = 64 << 20


class _Tensor(NamedTuple):
    """One tensor record; `shape` is in NumPy's order, the reverse of the file's."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    extent: Extent


class _Record(NamedTuple):
    """What the header says about one tensor; the offset counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind_id: int
    offset: int


class GGUFFile(Checkpoint):
    """A checkpoint in one GGUF file, its tokenizer and chat template included.

    Args:
        path: The file.
        name: What to call it; its file name if `None`.

    Attributes:
        config: What config.json of a Hugging Face directory of this model would say.

    Raises:
        OSError: The file is not there or cannot be read.
        ValueError: Naming what in it is damaged or not supported.
    """

    def __init__(self, path: Path, name: str | None = None):
        self.name = path.name if name is None else name
        self._file = TensorFile(path)
        try:
            self._metadata, tensors = _read_header(self._file)
            try:
                self._architecture = find_architecture(self._metadata)
                self._tensors = self._by_hf_name(tensors)
                found = {name: tensor.shape for name, tensor in self._tensors.items()}
                ids = _special_ids(self._metadata)
                self.config = read_config(self._metadata, found, self._read_rope_factors()) | ids
                self.generation_config = {"_from_model_config": True} | ids
                self.model_config = read_model_config(self.config, self.generation_config)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
            found.pop(ROPE_FACTORS, None)
            self.shapes = check_tensors(self.name, self.model_config, found)
            self._check_formats()
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint.read`."""
        tensor = self._tensors[name]
        weights = dequantize(self._file.read(tensor.extent), tensor.kind, tensor.shape)
        if self._architecture.norms_have_one and name.endswith("norm.weight"):
            return weights - np.float32(1)
        if self._architecture.has_pairs and ".q_proj." in name:
            return _part_pairs(weights, self.model_config.num_heads)
        if self._architecture.has_pairs and ".k_proj." in name:
            return _part_pairs(weights, self.model_config.num_kv_heads)
        return weights

    @property
    def num_bytes(self) -> int:
        """See `Checkpoint.num_bytes`."""
        return 4 * count_elements(self.shapes.values())

    def tokenizer(self) -> Tokenizer:
        """See `Checkpoint.tokenizer`."""
        try:
            backend = build_tokenizer(self._metadata)
            config = read_tokenizer_config(self._metadata)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{self.name}: {error}") from error
        return Tokenizer(backend, config)

    def close(self) -> None:
        """See `Checkpoint.close`."""
        self._file.close()

    def _by_hf_name(self, tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
        renamed: dict[str, _Tensor] = {}
        for name, tensor in tensors.items():
            hf_name = self._architecture.hf_name(name)
            if hf_name in renamed:
                raise ValueError(f"tensor {hf_name!r} is there twice. Fetch the file again")
            renamed[hf_name] = tensor
        return renamed

    def _read_rope_factors(self) -> np.ndarray | None:
        tensor = self._tensors.get(ROPE_FACTORS)
        if tensor is None:
            return None
        if tensor.kind != gguf.GGMLQuantizationType.F32:
            raise ValueError(f"tensor {ROPE_FACTORS!r} has format {tensor.kind.name}, not F32")
        return self._file.read(tensor.extent).view(np.float32).reshape(tensor.shape)

    def _check_formats(self) -> None:
        for name in self.shapes:
            kind = self._tensors[name].kind
            _, type_size = gguf.GGML_QUANT_SIZES[kind]
            try:
                gguf.quants.dequantize(np.zeros((1, type_size), np.uint8), kind)
            except NotImplementedError:
                raise ValueError(
                    f"{self.name}: tensor {name!r} has format {kind.name}, which the gguf package "
                    "cannot dequantise. Use a file in another format, e.g. Q8_0 or Q4_K_M"
                ) from None


def dequantize(
    data: np.ndarray, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]
) -> np.ndarray:
    """Makes float32 numbers of a tensor's bytes.

    Args:
        data: All of them, dtype uint8.
        kind: Its format.
        shape: Of the tensor, in NumPy's order.
    """
    # The package works through 16 rows at a time, whatever a row is: with rows of thousands of
    # numbers its time is spent in NumPy's loops and two threads can share it.
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = data.reshape(-1, block_bytes * math.gcd(data.size // block_bytes, _BLOCKS_PER_ROW))
    weights = gguf.quants.dequantize(rows, kind).reshape(shape)
    return weights.astype(np.float32, copy=False)


def _part_pairs(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the interleaving of rotary pairs that llama.cpp's converter applies to q and k."""
    rows, *rest = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, *rest)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, *rest))


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    for name, key in (("bos", "bos"), ("pad", "padding")):
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            ids[f"{name}_token_id"] = metadata[f"tokenizer.ggml.{key}_token_id"]
    ends = find_end_token_ids(metadata)
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def _read_header(file: TensorFile) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    """Parses everything before the tensor data, and checks that the data are all there."""
    # The header is at the front, its length unknown: read more until it fits.
    num_bytes = min(file.num_bytes, 16 << 20)
    while True:
        cursor = _Cursor(file.read(Extent(0, num_bytes)).tobytes())
        try:
            return _parse_header(cursor, file)
        except struct.error:
            if num_bytes == file.num_bytes:
                raise ValueError(
                    f"{file.path} is truncated within its header. Fetch it again"
                ) from None
            if num_bytes == _MAX_HEADER_BYTES:
                raise ValueError(
                    f"{file.path} is damaged: its header does not end within {num_bytes} bytes. "
                    "Fetch it again"
                ) from None
            num_bytes = min(file.num_bytes, num_bytes * 4, _MAX_HEADER_BYTES)


@dataclasses.dataclass
class _Cursor:
    """Reads little-endian values one after the other; `struct.error` at the end."""

    data: bytes
    position: int = 0

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{count}{code}")
        return values

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def texts(self, count: int) -> list[str]:
        # One loop with few calls: vocabularies and merges are 100,000 texts and more.
        data, position, end = self.data, self.position, len(self.data)
        unpack_length = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        # Each takes eight bytes at least.
        if count > (end - position) // 8:
            raise struct.error
        for _ in range(count):
            (length,) = unpack_length(data, position)
            start = position + 8
            position = start + length
            if position > end:
                raise struct.error
            texts.append(data[start:position].decode())
        self.position = position
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.texts(1)[0]
        if kind == _ARRAY:
            element_kind, count = self.scalar("I"), self.scalar("Q")
            if element_kind == _STRING:
                return self.texts(count)
            if element_kind in _SCALAR_FORMATS:
                return list(self.scalars(_SCALAR_FORMATS[element_kind], count))
            raise ValueError(f"a metadata array has elements of type {element_kind}")
        if kind not in _SCALAR_FORMATS:
            raise ValueError(f"a metadata value has type {kind}, which GGUF does not define")
        return self.scalar(_SCALAR_FORMATS[kind])


def _parse_header(cursor: _Cursor, file: TensorFile) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    if cursor.data[:4] != b"GGUF":
        raise ValueError(f"{file.path} does not begin with 'GGUF'; it is not a GGUF file")
    cursor.position = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"{file.path} has GGUF version {version}; supported: 2 and 3")
    num_tensors, num_pairs = cursor.scalars("Q", 2)
    try:
        metadata = _parse_metadata(cursor, num_pairs)
        records = [_parse_record(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {reprlib.repr(alignment)}")
    except ValueError as error:
        raise ValueError(f"{file.path} is damaged: {error}. Fetch it again") from error
    data_start = -(-cursor.position // alignment) * alignment
    return metadata, _place_tensors(records, file, data_start, alignment)


def _parse_metadata(cursor: _Cursor, num_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        (key,) = cursor.texts(1)
        if key in metadata:
            raise ValueError(f"{key} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata


def _parse_record(cursor: _Cursor) -> _Record:
    (name,) = cursor.texts(1)
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(reversed(cursor.scalars("Q", num_dims)))
    return _Record(name, shape, cursor.scalar("I"), cursor.scalar("Q"))


def _place_tensors(
    records: list[_Record], file: TensorFile, data_start: int, alignment: int
) -> dict[str, _Tensor]:
    """Finds where the tensors stand, one after the other; they come by their names in the file."""
    tensors: dict[str, _Tensor] = {}
    end = data_start
    for name, shape, kind_id, offset in records:
        try:
            kind = gguf.GGMLQuantizationType(kind_id)
        except ValueError:
            raise ValueError(
                f"{file.path}: tensor {name!r} has format {kind_id}, which the gguf package does "
                "not know. Use a file in another format, e.g. Q8_0 or Q4_K_M"
            ) from None
        problem = f"{file.path} is damaged: tensor {name!r} "
        elements_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % elements_per_block:
            raise ValueError(
                f"{problem}has rows of {shape[-1]} elements, and {kind.name} has blocks of "
                f"{elements_per_block}. Fetch it again"
            )
        start = data_start + offset
        if start != -(-end // alignment) * alignment:
            raise ValueError(
                f"{problem}begins at byte {start}, the one before it ends at {end}. Fetch it again"
            )
        num_bytes = count_elements([shape]) // elements_per_block * bytes_per_block
        end = start + num_bytes
        if end > file.num_bytes:
            raise ValueError(
                f"{file.path} is truncated: tensor {name!r} ends at byte {end}, the file at "
                f"{file.num_bytes}. Fetch it again"
            )
        if name in tensors:
            raise ValueError(f"{problem}is there twice. Fetch it again")
        tensors[name] = _Tensor(shape, kind, Extent(start, num_bytes))
    return tensors
