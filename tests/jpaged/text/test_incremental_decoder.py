import itertools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.text.incremental_decoder import find_decoder_factory

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
LLAMA2 = [
    REPLACE,
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def make(*steps):
    return find_decoder_factory({"type": "Sequence", "decoders": list(steps)})()


def test_byte_level_keeps_back_an_incomplete_character_only():
    decoder = find_decoder_factory({"type": "ByteLevel"})()
    # "é" is C3 A9, in GPT-2's alphabet "Ã" and "©".
    assert decoder.decode(["Hi", "Ã"], final=False) == "Hi"
    assert decoder.decode(["©", "!"], final=False) == "é!"
    assert decoder.decode(["Ã"], final=False) == ""
    assert decoder.decode([], final=True) == "\ufffd"


def test_byte_level_takes_a_token_outside_the_alphabet_as_it_is():
    decoder = find_decoder_factory({"type": "ByteLevel"})()
    assert decoder.decode(["<a b>", "Ġx"], final=False) == "<a b> x"


def test_byte_run_is_shown_when_it_ends():
    decoder = make(*LLAMA2)
    assert decoder.decode(["<0xC3>", "<0xA9>"], final=False) == ""
    assert decoder.decode(["▁a"], final=False) == "é a"


def test_one_bad_byte_spoils_its_run_as_in_tokenizers():
    decoder = make(*LLAMA2)
    assert decoder.decode(["<0xC3>", "<0xA9>", "<0xFF>", "a"], final=False) == "\ufffd" * 3 + "a"


def test_only_the_first_space_of_the_text_is_stripped():
    decoder = make(*LLAMA2)
    texts = [decoder.decode([token], final=False) for token in ("▁", "▁▁", "a", "▁b")]
    assert texts == ["", "  ", "a", " b"]


def test_without_strip_the_first_space_stays():
    assert make(*LLAMA2[:3]).decode(["▁a"], final=True) == " a"


def test_without_byte_fallback_byte_tokens_are_text():
    assert make(REPLACE, {"type": "Fuse"}).decode(["<0xC3>"], final=True) == "<0xC3>"


def test_bytes_that_cannot_become_a_character_any_more_are_shown_at_once():
    decoder = make(*LLAMA2)
    assert decoder.decode(["<0xC3>"], final=False) == ""
    assert decoder.decode(["<0xFF>"], final=False) == "\ufffd" * 2
    assert decoder.decode(["<0xC3>", "<0xA9>"], final=False) == "\ufffd" * 2
    assert decoder.decode(["a", "<0xC3>", "<0xA9>", "b"], final=False) == "aéb"


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WORD_PIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}
END_OF_WORD = {"type": "BPEDecoder", "suffix": "</w>"}


def test_only_the_first_token_loses_its_metaspaces():
    decoder = make(METASPACE)
    assert [decoder.decode([token], False) for token in ("▁▁a▁", "▁", "▁b")] == ["a", " ", " b"]
    assert make(METASPACE | {"prepend_scheme": "never"}).decode(["▁a"], False) == " a"


def test_word_pieces_are_shown_at_once():
    decoder = make(WORD_PIECE)
    pieces = ("##a", "##b", "c", ".", "do not", "## .")
    assert [decoder.decode([piece], False) for piece in pieces] == [
        "##a", "b", " c", ".", " don't", "."
    ]  # fmt: skip


def test_space_at_the_end_of_a_word_waits_for_the_next_token():
    decoder = make(END_OF_WORD)
    texts = [decoder.decode([token], False) for token in ("a", "b</w>", "c</w>d</w>")]
    assert texts == ["a", "b", " c"]
    assert decoder.decode([], final=True) == "d"


def test_without_a_decoder_tokens_are_joined_by_spaces():
    decoder = find_decoder_factory(None)()
    assert [decoder.decode([token], False) for token in ("a", "", "b")] == ["a", " ", " b"]


def test_no_space_is_put_between_two_unspaced_tokens():
    unspaced = frozenset({"<a>", "<b>"})
    pieces = ["<a>", "<b>", "c", "<a>", "<a>", "c", "c"]
    for config, expected in [(None, "<a><b> c <a><a> c c"), (WORD_PIECE, "<a><b> c <a><a> c c")]:
        decoder = find_decoder_factory(config, unspaced)()
        assert "".join(decoder.decode([piece], False) for piece in pieces) == expected


@pytest.mark.parametrize(
    ("config", "piece", "expected"),
    [
        ({"type": "ByteLevel"}, "Ġé", b" \xe9"),
        ({"type": "ByteLevel"}, "<日>", "<日>".encode()),
        ({"type": "Sequence", "decoders": LLAMA2}, "▁a", b" a"),
        ({"type": "Sequence", "decoders": LLAMA2}, "<0xE2>", b"\xe2"),
        (METASPACE, "▁▁é", "  é".encode()),
        (METASPACE, "<0xE2>", b"<0xE2>"),
        (WORD_PIECE, "a", b" a"),
        (WORD_PIECE, "##a", b"a"),
        (WORD_PIECE, ".", b"."),
        (END_OF_WORD, "a</w>", b"a "),
        (None, "a", b" a"),
    ],
)
def test_bytes_of_a_piece_are_those_in_the_middle_of_a_text(config, piece, expected):
    decoder = find_decoder_factory(config)()
    assert decoder.piece_bytes(piece) == expected
    decoder.decode(["x"], False)
    assert decoder.piece_bytes(piece) == expected


STEPS = st.one_of(
    st.builds(
        lambda old, new: {"type": "Replace", "pattern": {"String": old}, "content": new},
        st.sampled_from(["▁", "a", "</w>", "aa", "<0x41>"]),
        st.sampled_from([" ", "", "aa", "##", "▁", "<0xC3>"]),
    ),
    st.builds(
        lambda content, start: {"type": "Strip", "content": content, "start": start, "stop": 0},
        st.sampled_from(" a▁"),
        st.integers(0, 2),
    ),
    st.builds(
        lambda scheme: METASPACE | {"prepend_scheme": scheme},
        st.sampled_from(["always", "first", "never"]),
    ),
    st.builds(
        lambda prefix, cleanup: {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup},
        st.sampled_from(["##", "a", ""]),
        st.booleans(),
    ),
    st.just({"type": "ByteFallback"}),
    st.just({"type": "Fuse"}),
    st.just({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
             "use_regex": True}),
    st.just(END_OF_WORD),
)  # fmt: skip
PIECES = (
    "▁", "▁▁", "a", "aa", "▁a", "a▁", " ", "##", "##a", "## .", "</w>", "a</w>", "</w>a</w></w>",
    "", ".", " .", "do not", "n't", "Ġ", "Ã", "©", "日", "<0x41>", "<0xC3>", "<0xA9>", "<0xe6>",
    "<0x97>", "<0xED>", "<0xA0>", "<0xF4>", "<0x90>", "<0x80>", "<0xG0>",
)  # fmt: skip


@settings(deadline=None, max_examples=1000)
@given(
    configs=st.one_of(st.none(), st.lists(STEPS, max_size=4)),
    tokens=st.lists(st.sampled_from(PIECES), max_size=10),
    data=st.data(),
)
def test_any_supported_sequence_gives_the_text_that_tokenizers_gives(configs, tokens, data):
    config = None if configs is None else {"type": "Sequence", "decoders": configs}
    try:
        decoder = find_decoder_factory(config)()
    except ValueError as error:
        assert "is not supported" in str(error)
        return
    words = {piece: token_id for token_id, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="."))
    backend = tokenizers.Tokenizer.from_str(
        json.dumps(json.loads(backend.to_str()) | {"decoder": config})
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    texts = [
        decoder.decode(tokens[a:b], final=False)
        for a, b in itertools.pairwise([0, *cuts, len(tokens)])
    ]
    texts.append(decoder.decode([], final=True))
    assert "".join(texts) == backend.decode([words[token] for token in tokens])


@pytest.mark.parametrize(
    "steps",
    [
        LLAMA2,
        LLAMA2[:3],
        [METASPACE],
        [{"type": "ByteFallback"}, METASPACE],
        [{"type": "ByteFallback"}, {"type": "Fuse"}, REPLACE, LLAMA2[3]],
        [{"type": "Sequence", "decoders": [REPLACE]}, {"type": "Fuse"}],
        [{"type": "ByteLevel"}],
        [],
    ],
)
def test_sequences_that_occur_in_practice_are_supported(steps):
    assert make(*steps).decode(["a"], final=True) == "a"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "CTC"}]},
        {"type": "Sequence", "decoders": [*LLAMA2[:3], LLAMA2[3] | {"stop": 1}]},
        {"type": "Sequence", "decoders": [REPLACE | {"pattern": {"Regex": "_"}}, LLAMA2[2]]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, METASPACE]},
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, REPLACE | {"pattern": {"String": "aa"}}],
        },
        {"type": "Sequence", "decoders": [END_OF_WORD, {"type": "Fuse"}]},
    ],
)
def test_decoders_without_a_twin_are_refused(decoder):
    with pytest.raises(ValueError, match="is not supported"):
        find_decoder_factory(decoder)


def test_refusal_names_the_decoder_and_what_stands_before_it():
    with pytest.raises(ValueError, match=r'"WordPiece".* after Replace, Fuse;'):
        make(REPLACE, {"type": "Fuse"}, WORD_PIECE)
