import itertools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.checkpoint import open_checkpoint
from jpaged.detokenizer import Detokenizer
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from tests.jpaged.text.tokenizers_for_tests import byte_fallback_json, byte_level_json

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
BYTE_LEVEL = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(byte_level_json())), NAMED)
BYTE_FALLBACK = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(byte_fallback_json())), NAMED)
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])

# Texts of case H-13.
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
FLAGS = "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5"
H13_TEXTS = (
    FAMILY,
    FLAGS,
    "東京タワーへ行きます",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "e\u0301 a\u030a o\u0308\u0323",
    "A 日\U00020bb7 ascii",
)


def chunked(ids: list[int], size: int) -> list[list[int]]:
    return [list(chunk) for chunk in itertools.batched(ids, size)]


def deltas_of(tokenizer: Tokenizer, chunks: list[list[int]], **params) -> tuple[list[str], str]:
    """What each call returned, and the stop string that was found."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    deltas = [detokenizer.add(chunk) for chunk in chunks] + [detokenizer.add([], finished=True)]
    assert detokenizer.text == "".join(deltas)
    return deltas, detokenizer.stop_reason


@BOTH
@settings(deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_decode_for_any_ids_in_any_chunks(tokenizer, data):
    beyond = tokenizer.vocab_size + 2
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=24))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    skip = data.draw(st.booleans())
    chunks = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    deltas, _ = deltas_of(tokenizer, chunks, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("text", H13_TEXTS)
@BOTH
def test_h13_no_piece_of_a_whole_text_is_half_a_character(tokenizer, text, size):
    ids = tokenizer.encode(text)
    deltas, _ = deltas_of(tokenizer, chunked(ids, size))
    assert "".join(deltas) == text == tokenizer.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


@BOTH
def test_incomplete_character_appears_at_the_end_as_decode_gives_it(tokenizer):
    ids = tokenizer.encode("a日\U00020bb7")[:-1]
    deltas, _ = deltas_of(tokenizer, chunked(ids, 1))
    assert "".join(deltas[:-1]) in ("a", "a日")
    assert "".join(deltas) == tokenizer.decode(ids)
    assert deltas[-1].endswith("\ufffd")


@BOTH
def test_spaces_are_neither_lost_nor_doubled_around_special_tokens(tokenizer):
    hello, eos = tokenizer.encode(" hello", add_special_tokens=False), tokenizer.eos_token_id
    ids = [eos, *hello, eos, *hello]
    deltas, _ = deltas_of(tokenizer, chunked(ids, 1))
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "".join(deltas).count(" hello") == 2
    deltas, _ = deltas_of(tokenizer, chunked(ids, 1), skip_special_tokens=False)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(deltas).count("</s>") == 2


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str] | None:
    """The rule in its plainest form: read the text character by character."""
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return None


@settings(deadline=None)
@given(
    text=st.text("abc ", max_size=30),
    stop=st.lists(st.text("abc ", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    size=st.integers(1, 6),
    include=st.booleans(),
)
def test_text_ends_at_the_stop_string_that_is_complete_first(text, stop, size, include):
    ids = BYTE_LEVEL.encode(text)
    deltas, reason = deltas_of(
        BYTE_LEVEL, chunked(ids, size), stop=stop, include_stop_str_in_output=include
    )
    expected = first_stop(text, stop)
    if expected is None:
        assert ("".join(deltas), reason) == (text, None)
    else:
        before, found = expected
        assert ("".join(deltas), reason) == (before + found if include else before, found)


@settings(deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
)
def test_exactly_what_may_begin_a_stop_string_is_held_back(text, stop):
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=stop))
    for token_id, end in zip(BYTE_LEVEL.encode(text), range(1, len(text) + 1), strict=True):
        detokenizer.add([token_id])
        if detokenizer.stop_reason is not None:
            return
        seen = text[:end]
        ends = [
            count
            for count in range(end + 1)
            if any(len(s) > count and s.startswith(seen[end - count :]) for s in stop)
        ]
        assert detokenizer.text == seen[: end - max(ends)]


def test_h14_stop_string_inside_tokens_is_never_shown():
    tokenizer = open_checkpoint("smollm2").tokenizer()
    text = (
        "The capital of France is Paris. Paris is known for the Eiffel Tower, the Louvre and its "
        "many cafes along the river. Visitors come from everywhere to see the museums."
    )
    ids = tokenizer.encode(text)
    ends = set(itertools.accumulate(len(tokenizer.decode([token_id])) for token_id in ids))
    stops = [
        (text[start : start + length],)
        for start in range(1, len(text) - 12)
        for length in (3, 7, 12)
        if start not in ends and start + length not in ends
    ]
    assert len(stops) > 50
    for stop in [*stops, ("Par", "Paris"), ("Paris", "Par"), ("Paris",)]:
        expected = text[: text.find(min(stop, key=len))]
        for size in (1, 3, len(ids)):
            deltas, reason = deltas_of(tokenizer, chunked(ids, size), stop=stop)
            assert "".join(deltas) == expected
            assert reason in stop


def test_stop_string_is_found_as_soon_as_it_is_complete_and_later_ids_are_ignored():
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop="END"))
    for character in "abEN":
        detokenizer.add(BYTE_LEVEL.encode(character))
    assert (detokenizer.text, detokenizer.stop_reason) == ("ab", None)
    assert detokenizer.add(BYTE_LEVEL.encode("D")) == ""
    assert detokenizer.stop_reason == "END"
    assert detokenizer.add(BYTE_LEVEL.encode("more"), finished=True) == ""
    assert detokenizer.text == "ab"


def test_held_back_text_is_flushed_at_the_end():
    deltas, reason = deltas_of(BYTE_LEVEL, [BYTE_LEVEL.encode("abEN")], stop="END")
    assert (deltas, reason) == (["ab", "EN"], None)


def test_stop_string_that_the_last_characters_complete_is_cut():
    detokenizer = Detokenizer(BYTE_FALLBACK, SamplingParams(stop="日é"))
    # The run of byte tokens for "é" is decided only by the end.
    ids = BYTE_FALLBACK.encode("a日é", add_special_tokens=False)
    assert detokenizer.add(ids) == "a"
    assert detokenizer.add([], finished=True) == ""
    assert (detokenizer.text, detokenizer.stop_reason) == ("a", "日é")


@BOTH
def test_an_id_is_decoded_once_however_long_the_answer(tokenizer, monkeypatch):
    looked_up = []
    id_to_token = tokenizer.id_to_token
    monkeypatch.setattr(
        tokenizer,
        "id_to_token",
        lambda token_id: looked_up.append(token_id) or id_to_token(token_id),
    )
    monkeypatch.setattr(tokenizer, "decode", None)
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="zzz"))
    ids = tokenizer.encode("日本 hello " * 50, add_special_tokens=False)
    for token_id in ids:
        detokenizer.add([token_id])
    assert looked_up == ids
