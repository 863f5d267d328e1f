"""The files of a checkpoint that are not weights: what makes it complete, and travels with it."""

import json
import re
from pathlib import Path
from typing import Any

from jpaged.checkpoint.checkpoint import Checkpoint
from jpaged.checkpoint.gguf_file import GGUFFile
from jpaged.checkpoint.gguf_tokenizer import read_tokenizer_config
from jpaged.checkpoint.model_directory import ModelDirectory

CONFIG = "config.json"

# Data that jpaged or transformers read, and what people must be told. No code, no pickled files.
_COPIED = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt",
    "tekken.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip
_LEGAL = re.compile(
    r"(.*[-_. ])?(licen[sc]e|notice|copying|policy|terms|readme)([-_. ].*)?", re.IGNORECASE
)
_MAX_LEGAL_BYTES = 16 << 20
_TEXT_SUFFIXES = ("", ".md", ".txt", ".html")


def read_companions(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files that go with a checkpoint's weights, by their names in its directory."""
    if isinstance(checkpoint, ModelDirectory):
        return _read_copied(checkpoint.directory) | _read_legal(checkpoint.directory)
    if isinstance(checkpoint, GGUFFile):
        files = _read_legal(checkpoint._file.path.parent)
        files |= {name: _to_json(value) for name, value in _translate(checkpoint).items()}
        # As it is: parsed, a vocabulary of 262,144 takes hundreds of megabytes.
        return files | {"tokenizer.json": checkpoint.tokenizer()._backend.to_str().encode()}
    raise ValueError(f"{checkpoint.name} is of no kind that can be converted")


def with_dtype(config: bytes, dtype: str) -> bytes:
    """config.json with another dtype in it."""
    content = json.loads(config)
    keys = {"dtype", "torch_dtype"} & content.keys() or {"dtype"}
    return _to_json(content | dict.fromkeys(keys, dtype))


def _read_copied(directory: Path) -> dict[str, bytes]:
    paths = {path for pattern in _COPIED for path in directory.glob(pattern) if path.is_file()}
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(paths)}


def _read_legal(directory: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in sorted(directory.iterdir()):
        is_legal = _LEGAL.fullmatch(path.name) and path.suffix.lower() in _TEXT_SUFFIXES
        if is_legal and path.is_file() and _is_own(path):
            num_bytes = path.stat().st_size
            if num_bytes > _MAX_LEGAL_BYTES:
                raise ValueError(
                    f"{path} has {num_bytes} bytes; texts of more than {_MAX_LEGAL_BYTES} are not "
                    "taken along. Move it elsewhere"
                )
            files[path.name] = path.read_bytes()
    return files


def _is_own(path: Path) -> bool:
    """Whether a file belongs to its directory, by a link within it or into the hub's cache too."""
    directory, place = path.parent.resolve(), path.resolve()
    return directory in place.parents or directory.parent.parent / "blobs" == place.parent


def _translate(checkpoint: GGUFFile) -> dict[str, Any]:
    """What a Hugging Face directory would hold, from the metadata of a GGUF file."""
    metadata = checkpoint._metadata
    tokenizer_config = read_tokenizer_config(metadata)
    templates = tokenizer_config.pop("chat_template")
    if list(templates) == ["default"]:
        tokenizer_config["chat_template"] = templates["default"]
    elif templates:
        tokenizer_config["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    return {
        CONFIG: checkpoint.config,
        "generation_config.json": checkpoint.generation_config,
        "tokenizer_config.json": tokenizer_config
        | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    }


def _to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
