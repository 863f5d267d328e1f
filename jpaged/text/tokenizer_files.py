"""The tokenizer files of a Hugging Face directory, read as AutoTokenizer reads them."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, pre_tokenizers

logger = logging.getLogger(__name__)


def read_tokenizer(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Reads tokenizer.json and its companions.

    Returns:
        The tokenizer, and tokenizer_config.json with what stands in files beside it put in its
        place.

    Raises:
        FileNotFoundError: There is no tokenizer in it.
        ValueError: Naming what in it is not supported.
    """
    config = _read_config(directory)
    path = directory / "tokenizer.json"
    if not path.exists():
        return _convert_with_transformers(directory, config)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: not a readable tokenizer.json: {error}") from error
    if _is_rebuilt_by_transformers(directory, config):
        _rebuild_as_llama(backend, config)
    return backend, config


def _read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with what stands in files beside it put in its place."""
    config: dict[str, Any] = {}
    path = directory / "tokenizer_config.json"
    if path.exists():
        config = json.loads(path.read_text(encoding="utf-8"))
    legacy = directory / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and legacy.exists():
        config |= json.loads(legacy.read_text(encoding="utf-8"))
    if (directory / "chat_template.jinja").exists():
        templates = {"default": (directory / "chat_template.jinja").read_text(encoding="utf-8")}
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
        config["chat_template"] = templates
    return config


def _is_rebuilt_by_transformers(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether AutoTokenizer would make a `LlamaTokenizer` of this directory.

    It does so if the class is named and the vocabulary is not byte-level; except for Mistral,
    for which it takes tokenizer.json as it is.
    """
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name != "LlamaTokenizer":
        return False
    path = directory / "config.json"
    model_config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if model_config.get("model_type", "llama") != "llama":
        return False
    return '"ByteLevel"' not in (directory / "tokenizer.json").read_text(encoding="utf-8")


def _rebuild_as_llama(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Replaces the rules of tokenizer.json by those of transformers' `LlamaTokenizer`."""
    add_prefix_space = config.get("add_prefix_space")
    add_prefix_space = True if add_prefix_space is None else add_prefix_space
    scheme = "never" if not add_prefix_space else "always" if config.get("legacy") else "first"
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    rules = cast(Any, backend)  # the stubs know neither setters for these nor None
    rules.normalizer = None
    rules.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=scheme, split=False
    )
    rules.decoder = decoders.Sequence(steps)
    rules.model.fuse_unk = True
    rules.model.byte_fallback = True


def _convert_with_transformers(
    directory: Path, config: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Lets transformers build the tokenizer from tokenizer.model and the like."""
    sources = ("tokenizer.model", "vocab.json", "tekken.json")
    if not any((directory / source).exists() for source in sources):
        raise FileNotFoundError(
            f"{directory}: no tokenizer.json, tokenizer.model or vocab.json in it. Save the "
            "model's tokenizer there"
        )
    # transformers takes seconds to import, and only old checkpoints need it.
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(directory)
        backend = converted.backend_tokenizer
    except Exception as error:  # whatever its converters raise
        raise ValueError(
            f"{directory}: transformers cannot convert its tokenizer: {error}. Save a "
            "tokenizer.json there"
        ) from error
    logger.info("built the tokenizer of %s with transformers; it has no tokenizer.json", directory)
    return backend, {**config, **converted.special_tokens_map}
