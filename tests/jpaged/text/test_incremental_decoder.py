import pytest

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


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "CTC"}]},
        {"type": "Sequence", "decoders": [*LLAMA2[:3], LLAMA2[3] | {"stop": 1}]},
        {"type": "Sequence", "decoders": [REPLACE | {"pattern": {"Regex": "_"}}, LLAMA2[2]]},
    ],
)
def test_decoders_without_a_twin_are_refused(decoder):
    with pytest.raises(ValueError, match="is not supported"):
        find_decoder_factory(decoder)
