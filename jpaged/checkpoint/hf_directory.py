"""A Hugging Face directory as a checkpoint: config.json beside one or more safetensors files.

The format of a safetensors file (https://huggingface.co/docs/safetensors): eight bytes that say
how long the header is, the header in JSON, then the tensors' bytes without gaps. It is parsed
here because the library's NumPy interface has no bfloat16 and hides truncation until a read.
"""

import collections
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.checkpoint import count_elements
from jpaged.checkpoint.model_directory import ModelDirectory, read_json
from jpaged.checkpoint.stored_tensor import FLOAT_DTYPES, Index, StoredTensor, resolve_index
from jpaged.checkpoint.tensor_file import Extent, TensorFile

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_DTYPES = {stored: FLOAT_DTYPES[name] for name, stored in DTYPE_NAMES.items()}
# The safetensors library's own limit.
_MAX_HEADER_BYTES = 100_000_000


class _Tensor(StoredTensor):
    """One tensor in an open file."""

    def __init__(self, file: TensorFile, stored_as: str, shape: tuple[int, ...], extent: Extent):
        super().__init__(file.path, shape, stored_as, _DTYPES.get(stored_as))
        self._file = file
        self.extent = extent

    def read(self, index: Index = ()) -> np.ndarray:
        """See `StoredTensor.read`: whole rows are read, and columns cut out of them."""
        bounds = resolve_index(index, self.shape)
        if not bounds:
            return self._file.read(self.extent).view(self.known_dtype).reshape(self.shape)
        (start, stop), *rest = bounds
        row_bytes = math.prod(self.shape[1:]) * self.known_dtype.itemsize
        extent = Extent(self.extent.offset + start * row_bytes, (stop - start) * row_bytes)
        rows = self._file.read(extent).view(self.known_dtype)
        rows = rows.reshape(stop - start, *self.shape[1:])
        return np.ascontiguousarray(rows[:, *(slice(*bound) for bound in rest)])


class HFDirectory(ModelDirectory):
    """A checkpoint whose weights are in safetensors files; see `ModelDirectory`."""

    def __init__(self, directory: Path, name: str | None = None):
        self._files: list[TensorFile] = []
        super().__init__(directory, name)

    def close(self) -> None:
        """See `Checkpoint.close`."""
        for file in self._files:
            file.close()

    def _open_tensors(self) -> dict[str, StoredTensor]:
        """See `ModelDirectory`."""
        has_index = (self.directory / INDEX_FILE).exists()
        if (self.directory / SINGLE_FILE).exists():
            if has_index and {*_read_weight_map(self.directory / INDEX_FILE).values()} != {
                SINGLE_FILE
            }:
                raise ValueError(
                    f"{self.directory} holds {SINGLE_FILE} and {INDEX_FILE}, which names other "
                    "files: one of them is left from another revision. Remove it"
                )
            return self._open_file(SINGLE_FILE)
        if not has_index:
            raise _no_weights(self.directory)
        weight_map = _read_weight_map(self.directory / INDEX_FILE)
        _check_commits(self.directory, [INDEX_FILE, *sorted(set(weight_map.values()))])
        tensors: dict[str, StoredTensor] = {}
        for shard in sorted(set(weight_map.values())):
            if not (self.directory / shard).exists():
                raise FileNotFoundError(
                    f"{self.directory / shard} is missing; {INDEX_FILE} names it. Fetch it, or the "
                    "whole checkpoint again"
                )
            for name, tensor in self._open_file(shard).items():
                if weight_map.get(name) != shard:
                    raise ValueError(
                        f"{self.directory / shard} holds tensor {name!r}, for which {INDEX_FILE} "
                        f"names {weight_map.get(name)!r}: files of different checkpoints are "
                        "mixed. Fetch the whole checkpoint again"
                    )
                tensors[name] = tensor
        for name, shard in weight_map.items():
            if name not in tensors:
                raise ValueError(
                    f"{self.directory / shard} does not hold tensor {name!r}, for which "
                    f"{INDEX_FILE} names it: files of different checkpoints are mixed. Fetch "
                    "the whole checkpoint again"
                )
        return tensors

    def _open_file(self, name: str) -> dict[str, StoredTensor]:
        file = TensorFile(self.directory / name)
        self._files.append(file)
        return dict(_read_header(file))


def _check_commits(directory: Path, names: Sequence[str]) -> None:
    """Refuses files that `hf download --local-dir` has fetched at different commits."""
    by_commit: dict[str, str] = {}
    for name in names:
        commit = _fetched_commit(directory, name)
        if commit is not None:
            by_commit.setdefault(commit, name)
    if len(by_commit) > 1:
        (one, name), (other, other_name), *_ = by_commit.items()
        raise ValueError(
            f"{directory}: {name} was fetched at commit {one[:12]} and {other_name} at "
            f"{other[:12]}: files of different revisions are mixed. Fetch the whole checkpoint "
            "again"
        )


def _fetched_commit(directory: Path, name: str) -> str | None:
    """What huggingface_hub has noted of a file, unless that was changed since."""
    try:
        note = directory / ".cache" / "huggingface" / "download" / f"{name}.metadata"
        commit, _, fetched_at, *_ = note.read_text(encoding="utf-8").splitlines()
        # Times of files may be a second off.
        is_unchanged = (directory / name).stat().st_mtime - 1 <= float(fetched_at)
    except (OSError, ValueError):
        return None
    return commit if is_unchanged else None


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
        if tensor.dtype is not None:
            num_bytes = count_elements([tensor.shape]) * tensor.dtype.itemsize
            if tensor.extent.num_bytes != num_bytes:
                raise ValueError(
                    f"{problem}tensor {name!r} of shape {list(tensor.shape)} and dtype "
                    f"{tensor.stored_as} takes {tensor.extent.num_bytes} bytes instead of "
                    f"{num_bytes}. Fetch it again"
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
    weight_map = read_json(path).get("weight_map")
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
        f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}. Fetch the whole checkpoint"
    )
