"""A directory whose weights are an Orbax checkpoint: `weights/` beside config.json and tokenizer.

`weights/` is what Orbax's own `StandardCheckpointer` writes and restores: an OCDBT store of Zarr
arrays under the tensors' Hugging Face names, flat or nested at the dots. As `jpaged convert`
writes it, chunks are not compressed, so that a part of a tensor is a range of bytes in a file,
read without the rest; what others have written is read through TensorStore where it differs.

conversion.json, which `jpaged convert` writes beside it, says what it has written: weights of
another conversion are refused.
"""

import functools
import hashlib
import itertools
import json
import math
import reprlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore

from jpaged.checkpoint.model_directory import ModelDirectory, read_json
from jpaged.checkpoint.ocdbt import MANIFEST, Place, data_files, read_tree
from jpaged.checkpoint.stored_tensor import FLOAT_DTYPES, Index, StoredTensor, resolve_index
from jpaged.checkpoint.tensor_file import TensorFile, make_buffer

WEIGHTS = "weights"
METADATA = "_METADATA"
RECORD = "conversion.json"
RECORD_VERSION = 1
IDENTITY_FILES = (MANIFEST, METADATA)
ZARR_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "bfloat16"}

_DTYPES = {stored: FLOAT_DTYPES[kind] for kind, stored in ZARR_DTYPES.items()}
_MAX_OPEN_FILES = 64


class _Files:
    """The data files of a checkpoint, a few of them open."""

    def __init__(self):
        # Whoever reads from a file that is dropped here still has it.
        self._open = functools.lru_cache(maxsize=_MAX_OPEN_FILES)(TensorFile)
        self._memory = threading.local()
        self._is_closed = False

    def open(self, path: Path) -> TensorFile:
        """An open file; `ValueError` after `close`."""
        self.check_open(path)
        return self._open(path)

    def check_open(self, path: Path) -> None:
        """`ValueError` after `close`."""
        if self._is_closed:
            raise ValueError(f"{path} is closed; open the checkpoint again to read from it")

    def scratch(self, num_bytes: int) -> np.ndarray:
        """Memory (dtype uint8) for a moment, the same for each call from a thread.

        New memory for each chunk would cost more than reading it.
        """
        memory = getattr(self._memory, "bytes", None)
        if memory is None or memory.size < num_bytes:
            memory = self._memory.bytes = make_buffer(num_bytes, 0)
        return memory[:num_bytes]

    def close(self) -> None:
        """Closes all; may be called twice."""
        self._is_closed = True
        self._open.cache_clear()


class OrbaxDirectory(ModelDirectory):
    """A checkpoint whose weights are in Orbax's format; see `ModelDirectory`.

    Attributes:
        digests: SHA-256 of each tensor's bytes, by its name, as it was written; empty where there
            is no conversion.json.
    """

    def __init__(self, directory: Path, name: str | None = None):
        self.digests: Mapping[str, str] = {}
        self._files = _Files()
        super().__init__(directory, name)

    def close(self) -> None:
        """See `Checkpoint.close`."""
        self._files.close()

    def _open_tensors(self) -> dict[str, StoredTensor]:
        """See `ModelDirectory`."""
        weights = self.directory / WEIGHTS
        if not (weights / METADATA).is_file():
            raise ValueError(
                f"{weights} is not a whole Orbax checkpoint: {METADATA} is missing. Convert or "
                "fetch it again"
            )
        tensors = open_arrays(weights, self._files)
        record_path = self.directory / RECORD
        if record_path.exists():
            record = read_json(record_path)
            try:
                self._check_record(record, tensors)
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{record_path} is damaged ({type(error).__name__}: {error}). Convert again"
                ) from error
        return tensors

    def _check_record(self, record: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
        path = self.directory / RECORD
        if record.get("version") != RECORD_VERSION:
            raise ValueError(
                f"{path}: version is {reprlib.repr(record.get('version'))}; this jpaged reads "
                f"{RECORD_VERSION}. Convert again"
            )
        for name in IDENTITY_FILES:
            if record.get("sha256", {}).get(name) != file_sha256(self.directory / WEIGHTS / name):
                raise ValueError(
                    f"{self.directory / WEIGHTS} is not what {path} says was written: files of "
                    "different conversions are mixed, or some are damaged. Convert again"
                )
        self.digests = {name: entry["sha256"] for name, entry in record["tensors"].items()}
        written = {
            name: (tuple(entry["shape"]), entry["dtype"])
            for name, entry in record["tensors"].items()
        }
        found = {name: (tensor.shape, str(tensor.dtype)) for name, tensor in tensors.items()}
        if found != written:
            raise ValueError(
                f"{self.directory / WEIGHTS} holds other tensors than {path} names. Convert again"
            )


def file_sha256(path: Path) -> str:
    """Names the content of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_arrays(weights: Path, files: _Files | None = None) -> dict[str, StoredTensor]:
    """Finds the arrays of an Orbax checkpoint, and checks that their files are all there.

    Args:
        weights: The directory with the OCDBT store.
        files: What the arrays are read from.

    Raises:
        ValueError: Naming what is damaged.
    """
    files = files or _Files()
    for path in weights.rglob("*"):
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is not a regular file. Put the checkpoint's file there")
    values = read_tree(weights)
    for path, num_bytes in data_files(values).items():
        if not path.is_file():
            raise ValueError(
                f"{path} is missing; {weights / MANIFEST} names it. Convert or fetch it again"
            )
        if path.stat().st_size < num_bytes:
            raise ValueError(
                f"{path} is truncated: it has {path.stat().st_size} bytes and should have "
                f"{num_bytes}. Convert or fetch it again"
            )
    chunks: dict[str, dict[str, Place | bytes]] = {}
    for key, value in values.items():
        name, _, part = key.partition("/")
        chunks.setdefault(name, {})[part] = value
    tensors: dict[str, StoredTensor] = {}
    for name, parts in chunks.items():
        if ".zarray" in parts:
            tensors[name] = _open_zarr(weights, name, parts, files)
        elif "zarr.json" in parts:
            tensors[name] = _ForeignArray(weights, name, "zarr3", files)
        else:
            raise ValueError(f"{weights}: {name!r} is not an array. Convert or fetch it again")
    return tensors


class _Description(NamedTuple):
    """What .zarray says of an array; `is_plain`: its chunks are its bytes."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    stored_as: str
    is_plain: bool


# Layers are alike.
@functools.lru_cache(maxsize=256)
def _read_description(text: bytes) -> _Description:
    content = json.loads(text.decode())
    shape, chunk = tuple(content["shape"]), tuple(content["chunks"])
    are_sizes = all(type(size) is int and size > 0 for size in (*shape, *chunk))
    if not are_sizes or len(shape) != len(chunk):
        raise ValueError(f"shape {shape} and chunks {chunk} make no sense")
    is_plain = (
        content.get("compressor") is None
        and not content.get("filters")
        and content.get("order") == "C"
        and content.get("dimension_separator", ".") == "."
    )
    return _Description(shape, chunk, str(content["dtype"]), is_plain)


def _open_zarr(
    weights: Path, name: str, parts: Mapping[str, Place | bytes], files: _Files
) -> StoredTensor:
    text = parts[".zarray"]
    if isinstance(text, Place):
        text = TensorFile(text.path).read(text.extent).tobytes()
    try:
        shape, chunk, stored_as, is_plain = _read_description(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{weights}: the description of {name!r} is damaged ({error}). Convert or fetch it "
            "again"
        ) from error
    dtype = _DTYPES.get(stored_as)
    if dtype is None or not is_plain:
        return _ForeignArray(weights, name, "zarr", files)
    counts = [-(-size // step) for size, step in zip(shape, chunk, strict=True)]
    num_pieces = len(parts) - 1
    # Before they are numbered: a damaged shape may have more than there is memory for.
    if math.prod(counts) != num_pieces:
        raise ValueError(
            f"{weights}: tensor {name!r} has {num_pieces} pieces instead of {math.prod(counts)}. "
            "Convert or fetch it again"
        )
    numbers = list(itertools.product(*map(range, counts)))
    keys = [".".join(map(str, number)) or "0" for number in numbers]
    for key in keys:
        if key not in parts:
            raise ValueError(
                f"{weights}: piece {key} of tensor {name!r} is missing. Convert or fetch it again"
            )
    num_bytes = math.prod(chunk) * dtype.itemsize
    pieces = [parts[key] for key in keys]
    for key, piece in zip(keys, pieces, strict=True):
        found = piece.extent.num_bytes if isinstance(piece, Place) else len(piece)
        if found != num_bytes:
            raise ValueError(
                f"{weights}: piece {key} of tensor {name!r} has {found} bytes instead of "
                f"{num_bytes}. Convert or fetch it again"
            )
    by_number = dict(zip(numbers, pieces, strict=True))
    return _PlainArray(weights, shape, stored_as, dtype, chunk, by_number, files)


class _PlainArray(StoredTensor):
    """An array whose chunks are not compressed."""

    def __init__(self, path, shape, stored_as, dtype, chunk, pieces, files):
        super().__init__(path, shape, stored_as, dtype)
        self._chunk: Sequence[int] = chunk
        self._pieces: Mapping[tuple[int, ...], Place | bytes] = pieces
        self._files: _Files = files
        # The chunks follow each other in their file, mostly.
        first = next(iter(pieces.values()))
        self._first_offset = first.extent.offset if isinstance(first, Place) else 0

    def read(self, index: Index = ()) -> np.ndarray:
        """See `StoredTensor.read`: of each chunk, the rows that are wanted are read."""
        self._files.check_open(self.path)
        bounds = resolve_index(index, self.shape)
        sizes = [stop - start for start, stop in bounds]
        out = make_buffer(math.prod(sizes) * self.known_dtype.itemsize, self._first_offset)
        out = out.view(self.known_dtype).reshape(sizes)
        overlaps = [
            range(start // step, -(-stop // step)) if stop > start else range(0)
            for (start, stop), step in zip(bounds, self._chunk, strict=True)
        ]
        for number in itertools.product(*overlaps):
            self._read_chunk(number, bounds, out)
        return out

    def _read_chunk(
        self, number: tuple[int, ...], bounds: Sequence[tuple[int, int]], out: np.ndarray
    ) -> None:
        """Fills the part of `out` that stands in one chunk."""
        of_chunk: list[slice] = []
        of_out: list[slice] = []
        for place, step, (start, stop) in zip(number, self._chunk, bounds, strict=True):
            origin = place * step
            first, last = max(start, origin), min(stop, origin + step)
            of_chunk.append(slice(first - origin, last - origin))
            of_out.append(slice(first - start, last - start))
        target = out[tuple(of_out)]
        piece = self._pieces[number]
        if isinstance(piece, bytes):
            whole = np.frombuffer(piece, self.known_dtype).reshape(self._chunk)
            target[...] = whole[tuple(of_chunk)]
            return
        rows, *columns = of_chunk
        row_shape = self._chunk[1:]
        row_bytes = math.prod(row_shape) * self.known_dtype.itemsize
        num_rows = rows.stop - rows.start
        offset = piece.extent.offset + rows.start * row_bytes
        file = self._files.open(piece.path)
        if target.shape[1:] == tuple(row_shape) and target.flags.c_contiguous:
            file.read_into(offset, target.reshape(-1).view(np.uint8))
        elif target.shape[1:] != tuple(row_shape) and len(row_shape) == 1:
            offset += columns[0].start * self.known_dtype.itemsize
            for row in target:
                file.read_into(offset, row.view(np.uint8))
                offset += row_bytes
        else:
            data = self._files.scratch(num_rows * row_bytes)
            file.read_into(offset, data)
            target[...] = data.view(self.known_dtype).reshape(-1, *row_shape)[:, *columns]


class _ForeignArray(StoredTensor):
    """An array that is compressed or otherwise not plain: TensorStore reads it."""

    def __init__(self, weights: Path, name: str, driver: str, files: _Files):
        self._files: _Files = files
        spec = {
            "driver": driver,
            "kvstore": {
                "driver": "ocdbt", "base": f"file://{weights.resolve()}/", "path": f"{name}/"
            },
            # Else a chunk that is not there would be read as zeros.
            "fill_missing_data_reads": False,
        }  # fmt: skip
        try:
            self._array = tensorstore.open(spec, open=True, read=True).result()
        except Exception as error:  # as in `read_tree`
            reason = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"{weights}: tensor {name!r} cannot be read ({reason}). Convert or fetch it again"
            ) from error
        stored_as = self._array.dtype.name
        super().__init__(weights, tuple(self._array.shape), stored_as, FLOAT_DTYPES.get(stored_as))
        self._name = name

    def read(self, index: Index = ()) -> np.ndarray:
        """See `StoredTensor.read`."""
        self._files.check_open(self.path)
        part = tuple(slice(*bound) for bound in resolve_index(index, self.shape))
        try:
            return np.ascontiguousarray(self._array[part].read().result())
        except Exception as error:  # as in `read_tree`
            reason = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"{self.path}: tensor {self._name!r} cannot be read ({reason}). Convert or fetch "
                "it again"
            ) from error
