import itertools
import random

import jaxtyping
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.checkpoint import open_checkpoint
from jpaged.detokenizer import Detokenizer
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from tests.jpaged.text.tokenizers_for_tests import KINDS, make_tokenizer

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENIZERS = {kind: make_tokenizer(kind) for kind in KINDS}
BYTE_LEVEL = make_tokenizer("byte_level", **NAMED)
BYTE_FALLBACK = make_tokenizer("byte_fallback", **NAMED)
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


@pytest.fixture
def no_type_checks():
    """The checks of every call would take twenty times as long as the calls."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def assert_stream_equals_decode(tokenizer: Tokenizer, num_sequences: int) -> None:
    """Random ids, some beyond the vocabulary, in random pieces, special ones skipped and not."""
    rng = random.Random(tokenizer.vocab_size)
    ids_and_beyond = range(tokenizer.vocab_size + 2)
    special = sorted(tokenizer.special_token_ids)
    for _ in range(num_sequences):
        ids = rng.choices(ids_and_beyond, k=rng.randrange(16))
        if special and rng.randrange(4) == 0:
            ids[rng.randrange(len(ids) + 1) :] = [*rng.choices(special, k=2), *ids[:2]]
        cuts = sorted(rng.choices(range(len(ids) + 1), k=rng.randrange(6)))
        for skip in (True, False):
            detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
            text = ""
            for start, end in itertools.pairwise([0, *cuts, len(ids)]):
                text += detokenizer.add(ids[start:end])
            text += detokenizer.add([], finished=True)
            expected = tokenizer.decode(ids, skip_special_tokens=skip)
            assert text == expected, f"{ids}, cut at {cuts}, {skip=}"


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("kind", KINDS)
def test_joined_deltas_equal_decode_over_ten_thousand_random_answers(kind):
    assert_stream_equals_decode(TOKENIZERS[kind], 10_000)


@pytest.mark.usefixtures("no_type_checks")
def test_joined_deltas_equal_decode_for_smollm2():
    with open_checkpoint("smollm2") as checkpoint:
        assert_stream_equals_decode(checkpoint.tokenizer(), 10_000)


@pytest.mark.usefixtures("no_type_checks")
def test_without_spaces_between_special_tokens_the_stream_equals_decode_too():
    rng = random.Random(0)
    for kind in ("word_piece", "no_decoder", "unigram", "byte_level"):
        tokenizer = TOKENIZERS[kind]
        added = sorted(tokenizer.special_token_ids)
        seen = set()
        for _ in range(200):
            ids = rng.choices([*added, *range(tokenizer.vocab_size)], k=8)
            options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
            deltas, _ = deltas_of(tokenizer, chunked(ids, rng.randint(1, 4)), **options)
            assert "".join(deltas) == tokenizer.decode(ids, **options)
            seen.add("".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False))
        assert seen == ({True, False} if kind in ("word_piece", "no_decoder") else {True})
    # Where special tokens are skipped, other added tokens keep their spaces.
    tool = TOKENIZERS["no_decoder"].token_to_id("<tool>")
    options = {"spaces_between_special_tokens": False}
    deltas, _ = deltas_of(TOKENIZERS["no_decoder"], [[tool, tool]], **options)
    assert deltas[0] == TOKENIZERS["no_decoder"].decode([tool, tool], **options) == "<tool> <tool>"


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
    cuts=st.lists(st.integers(0, 30), max_size=8).map(sorted),
    include=st.booleans(),
)
def test_text_ends_at_the_stop_string_that_is_complete_first(text, stop, cuts, include):
    ids = BYTE_LEVEL.encode(text)
    chunks = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    deltas, reason = deltas_of(BYTE_LEVEL, chunks, stop=stop, include_stop_str_in_output=include)
    expected = first_stop(text, stop)
    if expected is None:
        assert ("".join(deltas), reason) == (text, None)
    else:
        before, found = expected
        assert ("".join(deltas), reason) == (before + found if include else before, found)


@settings(deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    ids=st.lists(st.integers(0, 300), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=6).map(sorted),
    params=st.fixed_dictionaries(
        {
            "stop": st.lists(
                st.text("a. he\ufffd<", min_size=1, max_size=3), min_size=1, max_size=3
            ),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "spaces_between_special_tokens": st.booleans(),
            "min_tokens": st.integers(0, 8),
        }
    ),
    finished_apart=st.booleans(),
)
def test_text_and_stop_reason_do_not_depend_on_how_ids_are_spread_over_calls(
    kind, ids, cuts, params, finished_apart
):
    tokenizer = TOKENIZERS[kind]
    ids = [token_id % tokenizer.vocab_size for token_id in ids]
    one_by_one, reason = deltas_of(tokenizer, chunked(ids, 1), **params)
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    *first, last = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    deltas = [detokenizer.add(chunk) for chunk in first]
    deltas.append(detokenizer.add(last, finished=not finished_apart))
    deltas.append(detokenizer.add([], finished=True))
    assert ("".join(deltas), detokenizer.stop_reason) == ("".join(one_by_one), reason)


@settings(deadline=None)
@given(
    text=st.text("abc", max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    min_tokens=st.integers(0, 21),
    size=st.integers(1, 6),
    include=st.booleans(),
)
def test_stop_string_counts_only_if_it_ends_after_min_tokens(text, stop, min_tokens, size, include):
    ids = BYTE_LEVEL.encode(text)
    assert len(ids) == len(text)
    deltas, reason = deltas_of(
        BYTE_LEVEL, chunked(ids, size), stop=stop, min_tokens=min_tokens, max_tokens=99,
        include_stop_str_in_output=include,
    )  # fmt: skip
    ends = (end for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith(stop))
    end = next(ends, None)
    if end is None:
        assert ("".join(deltas), reason) == (text, None)
    else:
        found = max((string for string in stop if text[:end].endswith(string)), key=len)
        shown = text[:end] if include else text[: end - len(found)]
        assert ("".join(deltas), reason) == (shown, found)


def test_skipped_ids_count_to_min_tokens_and_what_the_decoder_kept_does_not_end_early():
    eos = BYTE_LEVEL.eos_token_id
    ids = [eos, *BYTE_LEVEL.encode("ab")]
    assert deltas_of(BYTE_LEVEL, [ids], stop="b", min_tokens=3)[1] is None
    assert deltas_of(BYTE_LEVEL, [ids], stop="b", min_tokens=2)[1] == "b"
    # Half a character appears when no more comes; it is of the second token.
    half = BYTE_LEVEL.encode("aé")[:2]
    for chunks in ([half], chunked(half, 1)):
        assert deltas_of(BYTE_LEVEL, chunks, stop="\ufffd", min_tokens=2)[1] is None
        assert deltas_of(BYTE_LEVEL, chunks, stop="\ufffd", min_tokens=1)[1] == "\ufffd"


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


@pytest.mark.usefixtures("no_type_checks")
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


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_is_decoded_once_however_long_the_answer(kind, monkeypatch):
    tokenizer = make_tokenizer(kind)
    looked_up = []
    id_to_token = tokenizer.id_to_token
    monkeypatch.setattr(
        tokenizer,
        "id_to_token",
        lambda token_id: looked_up.append(token_id) or id_to_token(token_id),
    )
    monkeypatch.setattr(tokenizer, "decode", None)
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="zzz", skip_special_tokens=False))
    ids = tokenizer.encode("日本 hello " * 50, add_special_tokens=False)
    for token_id in ids:
        detokenizer.add([token_id])
    assert looked_up == ids
