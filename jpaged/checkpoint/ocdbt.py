"""Where the values of an OCDBT store stand in its files.

OCDBT (https://google.github.io/tensorstore/kvstore/ocdbt) is what Orbax keeps arrays in: a
manifest that points to a tree of keys, whose leaves say in which data file, from which byte on, a
value stands. The tree is read by TensorStore, which checks its checksums; the values are read by
position like those of any other file, several times as fast as through TensorStore's key-value
interface, which copies each value twice more (decision 021).
"""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import tensorstore

from jpaged.checkpoint.tensor_file import Extent

MANIFEST = "manifest.ocdbt"

# Base path, path below it, offset and length.
_LOCATION = re.compile(r"value:([^:]*):([^:]+):(\d+):(\d+)")


class Place(NamedTuple):
    """Where a value stands."""

    path: Path
    extent: Extent


def read_tree(directory: Path) -> dict[str, Place | bytes]:
    """The values of a store by their keys: where each stands, or a short one itself.

    Raises:
        ValueError: The directory holds no OCDBT store, or a damaged one.
    """
    if not (directory / MANIFEST).is_file():
        raise ValueError(f"{directory} holds no {MANIFEST}: it is not a whole Orbax checkpoint")
    values: dict[str, Place | bytes] = {}
    # A few files hold thousands of values.
    find_path = functools.cache(lambda relative: _find_path(directory, relative))
    try:
        store = tensorstore.KvStore.open(f"file://{directory.resolve()}/").result()
        for key, entry in _walk(store):
            name = key.decode()
            if "inline_value" in entry:
                values[name] = entry["inline_value"]
            else:
                values[name] = _parse_location(entry["indirect_value"], find_path)
    # TensorStore raises what it makes of absl's status codes.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{directory} is not a whole Orbax checkpoint ({type(error).__name__}: {reason}). "
            "Convert or fetch it again"
        ) from error
    return values


def data_files(values: dict[str, Place | bytes]) -> dict[Path, int]:
    """The data files of a store, and how many bytes each must have at least."""
    ends: dict[str, int] = {}
    for value in values.values():
        if isinstance(value, Place):
            path, end = str(value.path), value.extent.offset + value.extent.num_bytes
            ends[path] = max(end, ends.get(path, 0))
    return {Path(path): end for path, end in ends.items()}


def _walk(store: tensorstore.KvStore) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every key of the newest version, with its entry in a leaf of the tree."""
    root = tensorstore.ocdbt.dump(store).result()["versions"][-1]["root"]
    nodes = [(b"", root["location"])] if "location" in root else []
    seen: set[str] = set()
    while nodes:
        prefix, location = nodes.pop()
        if location in seen:
            raise ValueError(f"{location} is there twice")
        seen.add(location)
        for entry in tensorstore.ocdbt.dump(store, location).result()["entries"]:
            if "location" in entry:
                nodes.append((prefix + entry["subtree_common_prefix"], entry["location"]))
            else:
                yield prefix + entry["key"], entry


def _parse_location(location: str, find_path: Callable[[str], Path]) -> Place:
    match = _LOCATION.fullmatch(location)
    if match is None:
        raise ValueError(f"{location!r} does not say where a value stands")
    return Place(find_path(match[1] + match[2]), Extent(int(match[3]), int(match[4])))


def _find_path(directory: Path, relative: str) -> Path:
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{relative!r} is not in this directory")
    return directory / path
