"""Small tokenizer.json, one for each kind of decoder."""

import json
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from jpaged.text.tokenizer import Tokenizer

TEXTS = (
    "hello world",
    " hello  world ",
    "hello</s>hello world<s>",
    "<s>hello",
    "日本 é ☺ 👨‍👩‍👧",
    "a.b , c . d n't",
    "line\nbreak\t\t",
    "",
)


def byte_level_json() -> dict[str, Any]:
    """Bytes, two merges, three special tokens and one added token that is not special."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate([*alphabet, "Ġh", "Ġhe"])}
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    added = [("<s>", True), ("</s>", True), ("<|im|>", True), ("<tool> ☺", False)]
    return _tokenizer_json(
        vocab=vocab,
        merges=[["Ġ", "h"], ["Ġh", "e"]],
        added_tokens=[(len(vocab) + i, text, special) for i, (text, special) in enumerate(added)],
        rules={"normalizer": None, "pre_tokenizer": byte_level, "decoder": byte_level},
    )


def byte_fallback_json() -> dict[str, Any]:
    """What Llama 2 has: a prefix space, "▁" for spaces, "<0x..>" for unknown characters."""
    vocab = {token: token_id for token_id, token in enumerate(["<unk>", "<s>", "</s>"])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [
        ["▁", "h"], ["▁h", "e"], ["l", "l"], ["▁he", "ll"], ["▁hell", "o"], ["o", "r"],
        ["▁", "w"], ["▁w", "or"], ["l", "d"], ["▁wor", "ld"], ["▁", "▁"],
    ]  # fmt: skip
    for token in ["▁", *"abcdehlorw.,", "日", *("".join(merge) for merge in merges)]:
        vocab.setdefault(token, len(vocab))
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    text = _tokenizer_json(
        vocab=vocab,
        merges=merges,
        added_tokens=[(0, "<unk>", True), (1, "<s>", True), (2, "</s>", True)],
        rules={
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace],
            },
            "pre_tokenizer": None,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}},
                         {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
        },
    )  # fmt: skip
    text["model"] |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    return text


def unigram_json() -> dict[str, Any]:
    """What T5 has: "▁" in front of words, "</s>" behind the text, sentinels; no byte fallback."""
    pieces = [
        "<pad>", "</s>", "<unk>", "▁", "▁he", "▁hello", "▁world", "▁a", "▁▁", "a▁b", "<0xE2>",
        "日", "é", "☺", *"abcdehlnorstw.,'",
    ]  # fmt: skip
    metaspace = {
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True,
    }  # fmt: skip
    special = [(0, "<pad>", True), (1, "</s>", True), (2, "<unk>", True)]
    special += [(len(pieces), "<extra_id_0>", True), (len(pieces) + 1, "▁tool", False)]
    text = _tokenizer_json(
        vocab={},
        merges=[],
        added_tokens=special,
        rules={
            "normalizer": None,
            "pre_tokenizer": metaspace,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}},
                           {"SpecialToken": {"id": "</s>", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                         {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
            },
            "decoder": metaspace,
        },
    )  # fmt: skip
    scores = [[piece, -float(index > 2) * (10 - len(piece))] for index, piece in enumerate(pieces)]
    text["model"] = {"type": "Unigram", "unk_id": 2, "vocab": scores, "byte_fallback": False}
    return text


def word_piece_json() -> dict[str, Any]:
    """What BERT has: "##" where a word goes on, lower case, clean-up of spaces."""
    words = [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "he", "##llo", "##ld", "a", "##b",
        "do", "not", "do not", "n", "##'t", "n't", "'", "s", "'s", ".", ",", "?", "##.", " .", "日",
    ]  # fmt: skip
    special = [(words.index(word), word, True) for word in words[:4]]
    text = _tokenizer_json(
        vocab={},
        merges=[],
        added_tokens=[*special, (len(words), "<tool> .", False)],
        rules={
            "normalizer": {"type": "BertNormalizer", "clean_text": True, "lowercase": True,
                           "handle_chinese_chars": True, "strip_accents": None},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        },
    )  # fmt: skip
    text["model"] = {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {word: token_id for token_id, word in enumerate(words)},
    }  # fmt: skip
    return text


def end_of_word_json() -> dict[str, Any]:
    """What the first GPT has: "</w>" where a word ends."""
    words = ["<unk>", *"abdehlorw.,", "</w>", *(f"{letter}</w>" for letter in "abdehlorw.,")]
    words += ["he", "hello</w>", "a</w>b</w>", "日</w>"]
    text = _tokenizer_json(
        vocab={word: token_id for token_id, word in enumerate(words)},
        merges=[["h", "e"]],
        added_tokens=[(0, "<unk>", True), (len(words), "<tool></w>", False)],
        rules={
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
        },
    )
    text["model"] |= {"unk_token": "<unk>", "end_of_word_suffix": "</w>"}
    return text


def no_decoder_json() -> dict[str, Any]:
    """Whole words, joined by spaces."""
    words = ["<unk>", "</s>", "hello", "world", "a", ".", "", " b", "日"]
    text = _tokenizer_json(
        vocab={},
        merges=[],
        added_tokens=[(0, "<unk>", True), (1, "</s>", True), (len(words), "<tool>", False)],
        rules={"normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None},
    )
    text["model"] = {
        "type": "WordLevel", "unk_token": "<unk>",
        "vocab": {word: token_id for token_id, word in enumerate(words)},
    }  # fmt: skip
    return text


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "byte_level": byte_level_json,
    "byte_fallback": byte_fallback_json,
    "unigram": unigram_json,
    "word_piece": word_piece_json,
    "end_of_word": end_of_word_json,
    "no_decoder": no_decoder_json,
}


def make_tokenizer(kind: str, **config: Any) -> Tokenizer:
    """A tokenizer of one of the kinds; `config` is its tokenizer_config.json."""
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(KINDS[kind]())), config)


def _tokenizer_json(
    vocab: dict[str, int],
    merges: list[list[str]],
    added_tokens: list[tuple[int, str, bool]],
    rules: dict[str, Any],
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": content, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": special}
            for token_id, content, special in added_tokens
        ],
        "post_processor": None,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": merges},
    } | rules  # fmt: skip
