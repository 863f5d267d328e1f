"""Two small tokenizer.json: byte-level BPE, and SentencePiece-like with byte fallback."""

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

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
