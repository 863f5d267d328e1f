"""The tokenizer inside a GGUF file, as the tokenizer.json that it was made from.

GGUF keeps tokens, types and merges, but of the rules that cut text before merging only a name
("pre"). What stands behind a name is in llama.cpp (src/llama-vocab.cpp); a name that is not
known here is refused, since a wrong rule gives wrong ids without any error.
"""

import json
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2 = [_BYTE_LEVEL | {"use_regex": True}]
_GPT2_SINGLE_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2]
_LLAMA3 = [
    {
        "type": "Split",
        "pattern": {
            "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        },
        "behavior": "Isolated",
        "invert": False,
    },
    _BYTE_LEVEL | {"use_regex": False},
]
_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _GPT2_SINGLE_DIGITS,
    "starcoder": _GPT2_SINGLE_DIGITS,
    "refact": _GPT2_SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def read_tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """Builds tokenizer.json.

    Raises:
        ValueError: Naming the kind of tokenizer or pre-tokenizer that is not supported, or the
            key whose value is damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}; supported in GGUF files: 'gpt2' (byte-level BPE). "
            "Use the model's Hugging Face checkpoint"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(_PRE_TOKENIZERS)}. Use the "
            "model's Hugging Face checkpoint"
        )
    tokens = _read_list(metadata, "tokenizer.ggml.tokens", str)
    types = _read_list(metadata, "tokenizer.ggml.token_type", int)
    merges = _read_list(metadata, "tokenizer.ggml.merges", str)
    if not tokens or len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries and tokenizer.ggml.token_type "
            f"{len(types)}; there must be some, and as many. Fetch the file again"
        )
    is_llama3 = _PRE_TOKENIZERS[pre] is _LLAMA3
    return json.dumps({
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": tokens[token_id],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token_type == _CONTROL,
            }
            for token_id, token_type in enumerate(types)
            if token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": _post_processor(metadata, adds_bos_by_default=is_llama3),
        "decoder": _BYTE_LEVEL | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": is_llama3,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    })  # fmt: skip


def read_tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Builds tokenizer_config.json: the named special tokens and the chat template.

    Raises:
        ValueError: Naming the key whose value is damaged.
    """
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        found = _find_special_token(metadata, key)
        if found is not None:
            config[f"{name}_token"] = found.text
    key = "tokenizer.chat_template"
    templates = {"default": metadata[key]} if key in metadata else {}
    if "tokenizer.chat_templates" in metadata:
        for name in _read_list(metadata, "tokenizer.chat_templates", str):
            templates[name] = metadata.get(f"{key}.{name}")
    for name, template in templates.items():
        if not isinstance(template, str):
            raise ValueError(
                f"chat template {name!r} is {reprlib.repr(template)}; it must be a string. Fetch "
                "the file again"
            )
    return config | {"chat_template": templates}


def _read_list(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(
            f"{key} is {reprlib.repr(values)}; it must be a list of {kind.__name__}. Fetch the "
            "file again"
        )
    return values


class _SpecialToken(NamedTuple):
    token_id: int
    text: str


def _find_special_token(metadata: Mapping[str, Any], key: str) -> _SpecialToken | None:
    """A token that the metadata name by its id; `None` if they do not."""
    token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if token_id is None:
        return None
    tokens = _read_list(metadata, "tokenizer.ggml.tokens", str)
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ValueError(
            f"tokenizer.ggml.{key}_token_id is {reprlib.repr(token_id)}; it must be the id of one "
            f"of the {len(tokens)} tokens. Fetch the file again"
        )
    return _SpecialToken(token_id, tokens[token_id])


def _post_processor(
    metadata: Mapping[str, Any], *, adds_bos_by_default: bool
) -> dict[str, Any] | None:
    around: dict[str, list[Any]] = {"bos": [], "eos": []}
    special_tokens: dict[str, Any] = {}
    for name, by_default in (("bos", adds_bos_by_default), ("eos", False)):
        found = _find_special_token(metadata, name)
        if found is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", by_default):
            continue
        token_id, token = found
        around[name] = [{"SpecialToken": {"id": token, "type_id": 0}}]
        special_tokens[token] = {"id": token, "ids": [token_id], "tokens": [token]}
    if not special_tokens:
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*around["bos"], text, *around["eos"]],
        "pair": [*around["bos"], text, {"Sequence": {"id": "B", "type_id": 0}}, *around["eos"]],
        "special_tokens": special_tokens,
    }
