"""One checkpoint into another: Hugging Face or GGUF to Orbax, and Orbax back to safetensors.

What is made is a whole directory: weights, config.json, tokenizer, chat template, generation
config and licence. Tensors pass one at a time, so that the host needs memory for the largest and
a little more; they are checked to be finite, and bit for bit what they were unless another dtype
was asked for. A conversion that was interrupted is gone on with by asking for it again.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from jpaged.checkpoint import open_checkpoint
from jpaged.checkpoint.checkpoint import Checkpoint
from jpaged.checkpoint.companions import CONFIG, read_companions, with_dtype
from jpaged.checkpoint.finite import cast_finite, check_finite
from jpaged.checkpoint.gguf_file import GGUFFile
from jpaged.checkpoint.hf_directory import INDEX_FILE, HFDirectory
from jpaged.checkpoint.orbax_directory import IDENTITY_FILES, WEIGHTS, OrbaxDirectory
from jpaged.checkpoint.staging import Staging, check_target
from jpaged.checkpoint.stored_tensor import FLOAT_DTYPES
from jpaged.checkpoint.weight_writers import (
    OrbaxWriter,
    SafetensorsWriter,
    TensorPlan,
    WeightWriter,
    sha256,
)
from jpaged.models.registry import find_family

FORMATS: Mapping[str, type[WeightWriter]] = {"orbax": OrbaxWriter, "safetensors": SafetensorsWriter}
KEEP = "keep"

_NOTED_BYTES = 128 << 20
_MAX_COLUMN_PARTS = 16


class Converted(NamedTuple):
    """What a conversion has done.

    Attributes:
        num_tensors: In the new checkpoint.
        num_bytes: Of them together.
        num_kept: Tensors that an earlier, interrupted try had written.
    """

    num_tensors: int
    num_bytes: int
    num_kept: int


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "orbax",
    dtype: str = KEEP,
    revision: str | None = None,
    show_progress: bool = False,
) -> Converted:
    """Writes a checkpoint anew, in another format or dtype.

    Args:
        source: What `open_checkpoint` takes.
        target: The directory to make. It appears when it is whole, and not before.
        to: "orbax" or "safetensors".
        dtype: "float32", "bfloat16", "float16", or "keep": each tensor's own. What GGUF stores
            quantised is float32.
        revision: Branch, tag or commit of a hub id.
        show_progress: Say on stderr how far it is: a bar, or lines where stderr is no terminal.

    Raises:
        OSError: Naming what cannot be read or written.
        ValueError: Naming what was asked for wrongly, what in the source is damaged, or the
            tensor that does not fit `dtype`.
    """
    if to not in FORMATS:
        raise ValueError(f"to is {to!r}; it must be one of {', '.join(map(repr, FORMATS))}")
    if dtype != KEEP and dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"dtype is {dtype!r}; it must be one of {', '.join(map(repr, (KEEP, *FLOAT_DTYPES)))}"
        )
    if not _is_name(os.fspath(target)):
        raise ValueError(f"target is {os.fspath(target)!r}; it must be a path in UTF-8 without NUL")
    place = Path(os.path.abspath(target))
    if not place.name:
        raise ValueError(f"target is {os.fspath(target)!r}; it must name a new directory")
    if os.path.isdir(source) and Path(source).resolve() in place.resolve().parents:
        raise ValueError(f"target {target} is inside {source}; give one outside of it")
    check_target(place)
    with open_checkpoint(source, revision=revision, show_progress=show_progress) as checkpoint:
        # Before anything is written: a checkpoint without it cannot be served.
        checkpoint.tokenizer()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            return _convert(checkpoint, place, to, dtype, show_progress)
        except OSError as error:
            if error.errno is None:  # says it all already
                raise
            raise OSError(
                f"converting into {target} failed: {error.strerror}"
                + (f" ({error.filename})" if error.filename else "")
                + ". Give a target in a folder that can be written and has room; the same command "
                "goes on with what was done"
            ) from error


def _is_name(path: str) -> bool:
    try:
        return b"\0" not in path.encode()
    except UnicodeEncodeError:
        return False


def _convert(
    checkpoint: Checkpoint, target: Path, to: str, dtype: str, show_progress: bool
) -> Converted:
    companions = read_companions(checkpoint)
    if dtype != KEEP:
        companions[CONFIG] = with_dtype(companions[CONFIG], dtype)
    tensors = _plan_tensors(checkpoint, dtype)
    identity = _identify(checkpoint, companions)
    staging = Staging(target, {"source": identity, "to": to, "dtype": dtype})
    writer = None
    try:
        # Without it, what an earlier try has all but finished is no checkpoint.
        (staging.checkpoint / CONFIG).unlink(missing_ok=True)
        writer = FORMATS[to](staging.checkpoint, tensors)
        there = writer.find_written(name for name in staging.digests if name in tensors)
        digests = {
            name: digest for name, digest in there.items() if digest == staging.digests[name]
        }
        num_kept = len(digests)
        missing = [name for name in tensors if name not in digests]
        _check_room(staging.checkpoint, sum(tensors[name].num_bytes for name in missing))
        with _Progress(tensors, missing, enabled=show_progress) as progress:
            digests |= _write(checkpoint, tensors, missing, writer, staging, progress)
        writer.finish(digests, identity)
        for name, content in sorted(companions.items(), key=lambda item: item[0] == CONFIG):
            path = staging.checkpoint / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if _stat_files(checkpoint) != identity["files"]:
            raise ValueError(
                f"{checkpoint.name} has changed while it was converted. Convert it again"
            )
        _check_result(staging.checkpoint, checkpoint)
        staging.publish()
    except ValueError:
        staging.discard()
        raise
    finally:
        if writer is not None:
            writer.close()
        staging.close()
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    return Converted(len(tensors), num_bytes, num_kept)


def _plan_tensors(checkpoint: Checkpoint, dtype: str) -> dict[str, TensorPlan]:
    names = find_family(checkpoint.model_config.architecture).names
    by_columns = tuple(f".{name}.weight" for name in (names.o, names.down))
    # Heads are shared out whole, so that no more devices than there are KV heads share a layer.
    num_heads = checkpoint.model_config.num_kv_heads
    parts = max(count for count in range(1, _MAX_COLUMN_PARTS + 1) if num_heads % count == 0)
    return {
        name: TensorPlan(
            shape,
            checkpoint.stored_dtype(name) if dtype == KEEP else dtype,
            parts if name.endswith(by_columns) else 1,
        )
        for name, shape in checkpoint.shapes.items()
    }


def _write(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorPlan],
    missing: list[str],
    writer: WeightWriter,
    staging: Staging,
    progress: "_Progress",
) -> dict[str, str]:
    """Writes what is missing; returns the digests."""
    digests: dict[str, str] = {}
    waiting: dict[str, str] = {}
    expected = checkpoint.digests if isinstance(checkpoint, OrbaxDirectory) else {}
    waiting_bytes = 0
    for name in missing:
        tensor = checkpoint.read(name)
        check_finite(checkpoint.name, name, tensor)
        if name in expected and sha256(tensor) != expected[name]:
            raise ValueError(
                f"{checkpoint.name}: tensor {name!r} is damaged: its bytes are not those that were "
                "written. Convert or fetch it again"
            )
        tensor = cast_finite(checkpoint.name, name, tensor, FLOAT_DTYPES[tensors[name].dtype])
        waiting[name] = sha256(tensor)
        writer.write(name, tensor)
        waiting_bytes += tensor.nbytes
        if waiting_bytes >= _NOTED_BYTES or name == missing[-1]:
            writer.commit()
            staging.note_written(waiting)
            digests |= waiting
            waiting, waiting_bytes = {}, 0
        progress.advance(tensor.nbytes)
    return digests


def _identify(checkpoint: Checkpoint, companions: Mapping[str, bytes]) -> dict[str, Any]:
    """What tells a source from another, or from itself before it was changed."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in companions.items()}
    return {"name": checkpoint.name, "files": _stat_files(checkpoint), "companions": digests}


def _stat_files(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Sizes of the files with weights, and when they were changed."""
    match checkpoint:
        case GGUFFile():
            directory = checkpoint._file.path.parent
            paths = [checkpoint._file.path]
        case OrbaxDirectory():
            directory = checkpoint.directory
            paths = [directory / WEIGHTS / name for name in IDENTITY_FILES]
        case HFDirectory():
            directory = checkpoint.directory
            paths = [*directory.glob("*.safetensors"), *directory.glob(INDEX_FILE)]
        case _:
            raise ValueError(f"{checkpoint.name} is of no kind that can be converted")
    files = {}
    for path in sorted(paths):
        status = path.stat()
        files[str(path.relative_to(directory))] = [status.st_size, status.st_mtime_ns]
    return files


def _check_room(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise OSError(
            f"the weights take {num_bytes / 1e6:.1f} MB more, and {free / 1e6:.1f} MB are free in "
            f"{directory.parent.parent}: make room there, or give a target elsewhere"
        )


def _check_result(directory: Path, source: Checkpoint) -> None:
    """Opens what was made as whoever serves it will."""
    with open_checkpoint(directory) as result:
        if result.shapes != source.shapes:
            raise ValueError(f"{directory} has come out with other tensors than {source.name}")
        result.tokenizer()


class _Progress:
    """How far it is, on stderr: a bar on a terminal, else a line for each tenth."""

    def __init__(self, tensors: Mapping[str, TensorPlan], missing: list[str], *, enabled: bool):
        self._total = sum(tensor.num_bytes for tensor in tensors.values())
        self._done = self._total - sum(tensors[name].num_bytes for name in missing)
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._has_lines = enabled and not is_terminal
        self._bar = tqdm(
            desc="converting", total=self._total, initial=self._done, unit="B", unit_scale=True,
            disable=not (enabled and is_terminal),
        )  # fmt: skip

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def advance(self, num_bytes: int) -> None:
        """Counts a tensor."""
        self._bar.update(num_bytes)
        before, self._done = self._done, self._done + num_bytes
        tenth = 10 * self._done // self._total
        if self._has_lines and tenth > 10 * before // self._total:
            print(
                f"converting: {self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB",
                file=sys.stderr, flush=True,
            )  # fmt: skip
