"""Writing a model's tensors one by one, in a format, so that it can be gone on with later.

A writer works in a directory that is not yet a checkpoint, and makes it one in `finish`: until
then the weights stand under a name, or without a file, without which no reader takes them.
"""

import abc
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import tensorstore

from jpaged.checkpoint.hf_directory import DTYPE_NAMES, INDEX_FILE, SINGLE_FILE
from jpaged.checkpoint.ocdbt import MANIFEST, data_files, read_tree
from jpaged.checkpoint.orbax_directory import (
    IDENTITY_FILES,
    METADATA,
    RECORD,
    RECORD_VERSION,
    WEIGHTS,
    ZARR_DTYPES,
    file_sha256,
    open_arrays,
)
from jpaged.checkpoint.stored_tensor import FLOAT_DTYPES
from jpaged.checkpoint.tensor_file import Extent, TensorFile

# Bytes that wait in memory for the next commit of an Orbax checkpoint; each makes a data file.
_COMMIT_BYTES = 128 << 20
# Of one chunk; what others restore, they restore chunk by chunk.
_CHUNK_BYTES = 16 << 20
# Hugging Face's files are about as large.
_SHARD_BYTES = 5_000_000_000


class TensorPlan:
    """What is to be written of one tensor.

    Attributes:
        shape: Its shape.
        dtype: A key of `FLOAT_DTYPES`.
        column_parts: How many devices may share out its columns; 1: they share out its rows.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, column_parts: int = 1):
        self.shape = shape
        self.dtype = dtype
        self.column_parts = column_parts

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * FLOAT_DTYPES[self.dtype].itemsize


class WeightWriter(abc.ABC):
    """Writes the tensors of a model into `directory`.

    Args:
        directory: It exists, and may hold what an earlier writer of the same plan left there.
        plan: The tensors.
    """

    def __init__(self, directory: Path, plan: Mapping[str, TensorPlan]):
        self.directory = directory
        self.plan = plan

    @abc.abstractmethod
    def write(self, name: str, tensor: np.ndarray) -> None:
        """Takes a tensor, contiguous and as planned; one that was written before is replaced."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Returns when all that was written will be there after a crash of this process."""

    @abc.abstractmethod
    def find_written(self, names: Iterable[str]) -> dict[str, str]:
        """SHA-256 of those of the tensors that stand here, as they stand here."""

    @abc.abstractmethod
    def finish(self, digests: Mapping[str, str], source: Mapping[str, object]) -> None:
        """Makes the weights readable; may be called again.

        Args:
            digests: SHA-256 of each tensor.
            source: What the tensors were read from.
        """

    def close(self) -> None:  # noqa: B027
        """Lets go of files that are open; may be called twice."""


class OrbaxWriter(WeightWriter):
    """Writes an OCDBT store of uncompressed Zarr arrays, as Orbax restores it."""

    def __init__(self, directory: Path, plan: Mapping[str, TensorPlan]):
        super().__init__(directory, plan)
        self._weights = directory / WEIGHTS
        self._weights.mkdir(exist_ok=True)
        # Orbax restores nothing without it; it comes back in `finish`.
        (self._weights / METADATA).unlink(missing_ok=True)
        spec = {
            "driver": "ocdbt",
            "base": f"file://{self._weights.resolve()}/",
            # As Orbax sets it: the tree of any model is one node.
            "config": {"max_decoded_node_bytes": 100_000_000, "max_inline_value_bytes": 1024},
        }
        self._store = tensorstore.KvStore.open(spec).result()
        self._transaction = tensorstore.Transaction(atomic=True)
        self._waiting_bytes = 0

    def write(self, name: str, tensor: np.ndarray) -> None:
        """See `WeightWriter.write`."""
        chunk = _chunk_shape(self.plan[name])
        description = {
            "chunks": chunk, "compressor": None, "dimension_separator": ".",
            "dtype": ZARR_DTYPES[self.plan[name].dtype], "fill_value": None, "filters": None,
            "order": "C", "shape": tensor.shape, "zarr_format": 2,
        }  # fmt: skip
        self._put(f"{name}/.zarray", json.dumps(description, sort_keys=True).encode())
        counts = [-(-size // step) for size, step in zip(tensor.shape, chunk, strict=True)]
        for number in itertools.product(*map(range, counts)):
            place = [
                slice(index * step, (index + 1) * step)
                for index, step in zip(number, chunk, strict=True)
            ]
            piece = tensor[tuple(place)]
            if piece.shape != tuple(chunk):  # the last rows: a chunk is whole in its file
                whole = np.zeros(chunk, tensor.dtype)
                whole[tuple(slice(size) for size in piece.shape)] = piece
                piece = whole
            self._put(f"{name}/{'.'.join(map(str, number))}", piece.tobytes())

    def _put(self, key: str, value: bytes) -> None:
        self._store.with_transaction(self._transaction).write(key, value).result()
        self._waiting_bytes += len(value)
        if self._waiting_bytes >= _COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """See `WeightWriter.commit`."""
        if self._waiting_bytes:
            try:
                self._transaction.commit_async().result()
            # TensorStore raises what it makes of absl's status codes.
            except Exception as error:
                reason = (str(error).splitlines() or [""])[0]
                raise OSError(f"{self._weights} cannot be written: {reason}") from error
        self._transaction = tensorstore.Transaction(atomic=True)
        self._waiting_bytes = 0

    def find_written(self, names: Iterable[str]) -> dict[str, str]:
        """See `WeightWriter.find_written`."""
        if not (self._weights / MANIFEST).exists():
            return {}
        try:
            tensors = open_arrays(self._weights)
        except ValueError:  # data files have gone: begin again
            return {}
        return {
            name: sha256(tensors[name].read())
            for name in names
            if name in tensors and tensors[name].dtype is not None
        }

    def finish(self, digests: Mapping[str, str], source: Mapping[str, object]) -> None:
        """See `WeightWriter.finish`."""
        self.commit()
        # Commits that were interrupted leave data files that no key points to.
        kept = {self._weights / MANIFEST, *data_files(read_tree(self._weights))}
        for path in self._weights.rglob("*"):
            if path.is_file() and path not in kept:
                path.unlink()
        now = time.time_ns()
        _write_json(
            self._weights / "_CHECKPOINT_METADATA",
            {
                "item_handlers": "orbax.checkpoint._src.handlers.standard_checkpoint_handler."
                "StandardCheckpointHandler",
                "metrics": {}, "performance_metrics": {}, "init_timestamp_nsecs": now,
                "commit_timestamp_nsecs": now, "custom_metadata": {},
            },
        )  # fmt: skip
        _write_json(self._weights / METADATA, {
            "tree_metadata": {
                str((name,)): {
                    "key_metadata": [{"key": name, "key_type": 2}],
                    "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
                }
                for name in sorted(self.plan)
            },
            "use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        })  # fmt: skip
        (self._weights / "commit_success.txt").write_text("jpaged has written everything.\n")
        _write_json(self.directory / RECORD, {
            "version": RECORD_VERSION,
            "source": source,
            "sha256": {name: file_sha256(self._weights / name) for name in IDENTITY_FILES},
            "tensors": {
                name: {"shape": tensor.shape, "dtype": tensor.dtype, "sha256": digests[name]}
                for name, tensor in self.plan.items()
            },
        })  # fmt: skip


class SafetensorsWriter(WeightWriter):
    """Writes safetensors files; each has its full size from the start, and a name of its own."""

    def __init__(self, directory: Path, plan: Mapping[str, TensorPlan]):
        super().__init__(directory, plan)
        self._extents: dict[str, tuple[str, Extent]] = {}
        self._descriptors: dict[str, int] = {}
        groups = _group(plan)
        self._names = [SINGLE_FILE] if len(groups) == 1 else [
            f"model-{index + 1:05}-of-{len(groups):05}.safetensors" for index in range(len(groups))
        ]  # fmt: skip
        for file, names in zip(self._names, groups, strict=True):
            self._open(file, names)

    def _open(self, file: str, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            tensor = self.plan[name]
            start, end = end, end + tensor.num_bytes
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape,
                "data_offsets": [start, end],
            }  # fmt: skip
            self._extents[name] = (file, Extent(start, tensor.num_bytes))
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data_start = 8 + len(text)
        for name in names:
            _, (offset, num_bytes) = self._extents[name]
            self._extents[name] = (file, Extent(data_start + offset, num_bytes))
        path = self._path(file)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._descriptors[file] = descriptor
        os.truncate(descriptor, data_start + end)
        _write_all(descriptor, 0, len(text).to_bytes(8, "little") + text)

    def _path(self, file: str) -> Path:
        """Where a file stands: under its own name from `finish` on."""
        done = self.directory / file
        return done if done.exists() else self.directory / f"{file}.part"

    def write(self, name: str, tensor: np.ndarray) -> None:
        """See `WeightWriter.write`."""
        file, extent = self._extents[name]
        _write_all(self._descriptors[file], extent.offset, tensor.reshape(-1).view(np.uint8))

    def commit(self) -> None:
        """See `WeightWriter.commit`: the system has what was written."""

    def find_written(self, names: Iterable[str]) -> dict[str, str]:
        """See `WeightWriter.find_written`."""
        digests = {}
        for name in names:
            file, extent = self._extents[name]
            reader = TensorFile(self._path(file))
            digests[name] = sha256(reader.read(extent))
            reader.close()
        return digests

    def finish(self, digests: Mapping[str, str], source: Mapping[str, object]) -> None:
        """See `WeightWriter.finish`."""
        for file, descriptor in self._descriptors.items():
            os.fsync(descriptor)
            os.replace(self._path(file), self.directory / file)
        self.close()
        if len(self._names) > 1:
            _write_json(
                self.directory / INDEX_FILE,
                {
                    "metadata": {"total_size": sum(t.num_bytes for t in self.plan.values())},
                    "weight_map": {name: file for name, (file, _) in self._extents.items()},
                },
            )

    def close(self) -> None:
        """See `WeightWriter.close`."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def sha256(tensor: np.ndarray) -> str:
    """Names the bytes of a contiguous array."""
    return hashlib.sha256(tensor.reshape(-1).view(np.uint8)).hexdigest()


def _chunk_shape(tensor: TensorPlan) -> tuple[int, ...]:
    """Whole rows, some MiB of them; of what devices share out by columns, a part of those."""
    rows, *rest = tensor.shape
    # Of a tensor of one chunk, columns are read row by row.
    is_large = tensor.num_bytes > _CHUNK_BYTES
    if is_large and rest and rest[0] % tensor.column_parts == 0:
        rest = [rest[0] // tensor.column_parts]
    row_bytes = math.prod(rest) * FLOAT_DTYPES[tensor.dtype].itemsize
    num_chunks = -(-rows * row_bytes // _CHUNK_BYTES)
    return (-(-rows // num_chunks), *rest)


def _group(plan: Mapping[str, TensorPlan]) -> list[list[str]]:
    """Which tensors share a file, in their order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in plan.items():
        if groups[-1] and size + tensor.num_bytes > _SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.num_bytes
    return groups


def _write_all(descriptor: int, offset: int, data: bytes | np.ndarray) -> None:
    view = memoryview(data)
    while view.nbytes:
        # One call writes 2 GiB at most.
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
