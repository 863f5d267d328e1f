"""Where a conversion works until it is done, so that what has its name is always whole.

A conversion into `TARGET` works in `.TARGET.converting` beside it:

* plan.json   - what is converted to what; a conversion goes on only where it says the same
* done.jsonl  - a line for each tensor that is written, with the SHA-256 of its bytes
* checkpoint/ - the directory to be; its config.json comes last

The end is one rename of `checkpoint/` to `TARGET`. Whatever is killed before leaves no `TARGET`,
and nothing in here that opens as a checkpoint before it is whole; whatever is killed after leaves
rubbish that the next conversion into the same target removes.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PLAN, _DONE, _LOCK, _CHECKPOINT = "plan.json", "done.jsonl", "lock", "checkpoint"


def is_staging(directory: Path) -> bool:
    """Whether a directory is an unfinished conversion."""
    return (directory / _PLAN).exists() and (directory / _LOCK).exists()


def check_target(target: Path) -> None:
    """Refuses a target that is there already."""
    if not os.path.lexists(target):
        return
    root = _root(target)
    if is_staging(root) and {*os.listdir(root)} <= {_PLAN, _DONE, _LOCK}:
        shutil.rmtree(root)  # killed right after the rename
    raise ValueError(f"{target} is there already; give another name, or remove it first")


def _root(target: Path) -> Path:
    return target.parent / f".{target.name}.converting"


class Staging:
    """The place of one conversion, locked against others.

    Args:
        target: What is to be made; its folder exists.
        plan: What the conversion does, as JSON.

    Attributes:
        checkpoint: The directory to be.
        digests: SHA-256 of the tensors that an earlier try says it has written.

    Raises:
        OSError: It cannot be written here.
        ValueError: `target` is there already, another conversion into it is running, or an
            unfinished one has another plan.
    """

    def __init__(self, target: Path, plan: Mapping[str, Any]):
        self._target = target
        self._root = _root(target)
        self.checkpoint = self._root / _CHECKPOINT
        check_target(target)
        self._root.mkdir(exist_ok=True)
        self._lock = open(self._root / _LOCK, "w")  # noqa: SIM115
        try:
            # Released when the file is closed, also by a crash.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(
                f"another conversion into {target} is running; wait for it, or give another name"
            ) from error
        try:
            self.digests = self._go_on(json.loads(json.dumps(plan)))
            self._done = open(self._root / _DONE, "a", encoding="utf-8")  # noqa: SIM115
        except BaseException:
            self._lock.close()
            raise

    def _go_on(self, plan: Any) -> dict[str, str]:
        """Finds what an earlier try has done; begins where there was none."""
        path = self._root / _PLAN
        if not path.exists():
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            (self._root / _DONE).unlink(missing_ok=True)
            temporary = path.with_suffix(".part")
            temporary.write_text(json.dumps(plan, indent=1), encoding="utf-8")
            os.replace(temporary, path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if found != plan:
            keys = [
                key for key in plan if not isinstance(found, dict) or found.get(key) != plan[key]
            ]
            raise ValueError(
                f"{self._root} holds an unfinished conversion into {self._target} of something "
                f"else ({', '.join(keys)} changed since). Remove it to begin again"
            )
        self.checkpoint.mkdir(exist_ok=True)
        digests: dict[str, str] = {}
        if (self._root / _DONE).exists():
            for line in (self._root / _DONE).read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    digests[entry["name"]] = entry["sha256"]
                except (ValueError, KeyError, TypeError):
                    continue  # cut off when the process was killed
            # A line that was cut off must not run into the next.
            with open(self._root / _DONE, "a", encoding="utf-8") as file:
                file.write("\n")
        return digests

    def note_written(self, digests: Mapping[str, str]) -> None:
        """Remembers tensors that will be there after a crash."""
        lines = [
            json.dumps({"name": name, "sha256": digest}) + "\n" for name, digest in digests.items()
        ]
        self._done.write("".join(lines))
        self._done.flush()

    def publish(self) -> None:
        """Gives the whole checkpoint its name."""
        for path in [*self.checkpoint.rglob("*"), self.checkpoint]:
            _sync(path)
        if os.path.lexists(self._target):
            raise FileExistsError(
                f"{self._target} has appeared meanwhile; remove it and run this again"
            )
        os.rename(self.checkpoint, self._target)
        _sync(self._target.parent)
        self.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def discard(self) -> None:
        """Removes all that was done: going on with it would end as it did."""
        self.close()
        shutil.rmtree(self._root)

    def close(self) -> None:
        """Lets go of it; what was done stays. May be called twice."""
        self._done.close()
        self._lock.close()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
