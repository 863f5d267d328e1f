"""Tokenizers from the metadata of GGUF files give the ids that transformers gives."""

from collections import Counter
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from jpaged.checkpoint.gguf_tokenizer import build_tokenizer, find_end_token_ids
from jpaged.text.tokenizer import Tokenizer

TEXTS = (
    "",
    " ",
    "the cat  sat   on    the     mat",
    " the cat\n\nsat\n\n\n  on\tthe\t\tmat ",
    "the<b>cat</b><bos>sat<eos> on<b",
    "naïve café 日本 ☺ e\u0301 \u0000",
    "It's 1234 CAN'T they'LL x=1;\r\n\r\n  y",
    "▁the▁▁cat <0x41> <unused0>x",
    "[multimodal] thethethe cacacat",
)
WORDS = "the cat sat on the mat the cats that sat there then chat at the that hat heat tea eat"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def sentencepiece(architecture: str, **extra: Any) -> dict[str, Any]:
    """Metadata with a vocabulary like Gemma's: special tokens, runs, bytes, pieces by rank."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "[multimodal]", "<unused0>"]
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN, USER_DEFINED, CONTROL]
    runs = ["\n", "\n\n", "\n\n\n", "  ", "   ", "    ", "<b>", "</b>"]
    own_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    text = "▁" + WORDS.replace(" ", "▁")
    pieces = Counter(
        text[start : start + size] for size in range(2, 6) for start in range(len(text) - size)
    )
    ranked = [piece for piece, count in pieces.most_common() if count > 1 and "▁" not in piece[1:]]
    letters = sorted(set(text) | set("<0>x41_▁é日"))
    tokens = [*special, *runs, *own_bytes, *ranked, *letters]
    types = kinds + [USER_DEFINED] * len(runs) + [BYTE] * 256
    num_rest = len(tokens) - len(types)
    scores = [-1000.0] * (len(tokens) - num_rest) + [-float(rank) for rank in range(num_rest)]
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types + [NORMAL] * num_rest,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def of_transformers(metadata: dict[str, Any]) -> Tokenizer:
    """What transformers makes of the same metadata."""
    names = {
        "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens",
        "scores": "scores", "token_type": "token_type", "merges": "merges",
    }  # fmt: skip
    entries = {
        name: metadata[f"tokenizer.ggml.{key}"]
        for key, name in names.items()
        if f"tokenizer.ggml.{key}" in metadata
    }
    backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], entries)
    return Tokenizer(backend, {})


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "llama"])
def test_sentencepiece_gives_the_ids_and_text_of_transformers(architecture):
    metadata = sentencepiece(architecture)
    ours, theirs = Tokenizer(build_tokenizer(metadata), {}), of_transformers(metadata)
    assert ours.vocab_size == len(metadata["tokenizer.ggml.tokens"])
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [2, *ids], text
        for skip in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == decoded, text
        decoder = ours.incremental_decoder()
        pieces = [ours.id_to_token(token_id) for token_id in ids]
        joined = "".join(decoder.decode([piece], False) for piece in pieces if piece)
        assert joined + decoder.decode([], True) == ours.decode(ids, skip_special_tokens=False)


def test_gemma_gives_every_text_back():
    tokenizer = Tokenizer(build_tokenizer(sentencepiece("gemma3")), {})
    for text in TEXTS:
        if "▁" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_pieces_of_gemma_are_merged_by_rank_and_runs_of_spaces_too():
    tokenizer = Tokenizer(build_tokenizer(sentencepiece("gemma3")), {})
    ids = tokenizer.encode("the   cat\n\n", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == ["the", "▁▁▁", "cat", "\n\n"]


@pytest.mark.parametrize(("adds", "expected"), [(None, "▁the"), (True, "▁the"), (False, "the")])
def test_space_is_put_in_front_as_the_file_says_but_for_gemma(adds, expected):
    extra = {} if adds is None else {"add_space_prefix": adds}
    tokenizer = Tokenizer(build_tokenizer(sentencepiece("llama", **extra)), {})
    [token_id] = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.id_to_token(token_id) == expected
    assert tokenizer.decode([token_id]) == "the"


@pytest.mark.parametrize(("adds", "expected"), [({}, [2]), ({"add_bos_token": False}, []),
                         ({"add_eos_token": True}, [2, 1])])  # fmt: skip
def test_sentencepiece_adds_bos_unless_the_file_says_otherwise(adds, expected):
    tokenizer = Tokenizer(build_tokenizer(sentencepiece("gemma3", **adds)), {})
    assert tokenizer.encode("") == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"add_space_prefix": True}, "add_space_prefix is True"),
        ({"precompiled_charsmap": [1]}, r"precompiled_charsmap is \[1\]"),
        ({"normalizer": 1}, "tokenizer.ggml.normalizer is 1"),
        ({"token_type": [1]}, "token_type 1"),
    ],
)
def test_what_changes_the_ids_of_gemma_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        build_tokenizer(sentencepiece("gemma3", **changes))


@pytest.mark.parametrize("scores", [None, [0.5], "x"])
def test_llama_without_scores_is_refused(scores):
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores"):
        build_tokenizer(sentencepiece("llama", scores=scores))


def byte_level(pre: str) -> dict[str, Any]:
    merges = ["t h", "th e", "Ġ the", "Ġ c", "c a", "ca t", "1 2", "3 4", "Ġ Ġ", "Ċ Ċ", "e Ì"]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [NORMAL] * len(tokens) + [CONTROL, USER_DEFINED]
    return {
        "general.architecture": "qwen3",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<bos>", "<b>"],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens),
        "tokenizer.ggml.add_bos_token": False,
    }


def test_qwen2_gives_the_ids_and_text_of_transformers():
    metadata = byte_level("qwen2")
    tokens = metadata["tokenizer.ggml.tokens"]
    theirs = Qwen2Tokenizer(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        unk_token="<bos>", eos_token="<bos>", pad_token="<bos>",
    )  # fmt: skip
    theirs.add_tokens(["<b>"])
    ours = Tokenizer(build_tokenizer(metadata), {})
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "llama3"])
def test_text_is_cut_as_transformers_cuts_it(pre):
    metadata = byte_level(pre)
    ours, theirs = Tokenizer(build_tokenizer(metadata), {}), of_transformers(metadata)
    for text in TEXTS:
        if "e\u0301" not in text:  # which Qwen's own tokenizer composes, and that class does not
            assert ours.encode(text) == theirs.encode(text), text


def test_merge_that_is_no_pair_is_refused():
    metadata = byte_level("qwen2") | {"tokenizer.ggml.merges": ["a b c"]}
    with pytest.raises(ValueError, match="tokenizer.ggml.merges has 'a b c'"):
        build_tokenizer(metadata)


def test_ids_that_end_an_answer_come_once_and_in_order():
    metadata = {
        "tokenizer.ggml.tokens": ["<eos>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eom_token_id": 3,
    }
    assert find_end_token_ids(metadata) == [0, 3]
    metadata["tokenizer.chat_template"] = "<start_of_turn>...<end_of_turn>"
    assert find_end_token_ids(metadata) == [0, 3, 1]
    metadata["tokenizer.ggml.eot_token_id"] = 1
    assert find_end_token_ids(metadata) == [0, 1, 3]
    assert find_end_token_ids({}) == []
