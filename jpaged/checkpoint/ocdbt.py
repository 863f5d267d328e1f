"""Where the values of an OCDBT store stand in its files.

OCDBT (https://google.github.io/tensorstore/kvstore/ocdbt) is what Orbax keeps arrays in: a
manifest that points to a tree of keys, whose leaves say in which data file, from which byte on, a
value stands. The tree is read by TensorStore, which checks its checksums; the values are read by
position like those of any other file, several times as fast as through TensorStore's key-value
interface, which copies each value twice more (decision 021).
"""

import re
from collections.abc import Iterator
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
    try:
        store = tensorstore.KvStore.open(f"file://{directory.resolve()}/").result()
        for key, entry in _walk(store):
            name = key.decode()
            if "inline_value" in entry:
                values[name] = entry["inline_value"]
            else:
                values[name] = _parse_location(directory, entry["indirect_value"])
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
    ends: dict[Path, int] = {}
    for value in values.values():
        if isinstance(value, Place):
            end = value.extent.offset + value.extent.num_bytes
            ends[value.path] = max(end, ends.get(value.path, 0))
    return ends


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


def _parse_location(directory: Path, location: str) -> Place:
    match = _LOCATION.fullmatch(location)
    relative = PurePosixPath(match[1] + match[2]) if match else PurePosixPath()
    if match is None or relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"{location!r} does not say where in this directory a value stands")
    return Place(directory / relative, Extent(int(match[3]), int(match[4])))
