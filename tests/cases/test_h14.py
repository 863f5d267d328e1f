import functools

import pytest

from jpaged.checkpoint import open_checkpoint
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from tests.cases.scripted import scripted_llm

TEXT = (
    "The quick brown foxes were jumping over the laziest dogs, and the quicker ones jumped twice. "
    "Afterwards they rested in the shade, for the afternoon was exceptionally warm and windless."
)


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    with open_checkpoint("smollm2") as checkpoint:
        return checkpoint.tokenizer()


@pytest.fixture(scope="module")
def llm():
    """Says TEXT, token by token as SmolLM2 spells it."""
    tokenizer = smollm2_tokenizer()
    with scripted_llm(tokenizer, tokenizer.encode(TEXT)) as llm:
        yield llm


def token_borders() -> set[int]:
    """Places in TEXT between two tokens."""
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(TEXT)
    return {len(tokenizer.decode(ids[:end])) for end in range(len(ids) + 1)}


def pieces_inside_tokens() -> list[str]:
    """Pieces of TEXT, 3 to 12 characters long, that begin and end inside tokens."""
    borders = token_borders()
    inside = [place for place in range(len(TEXT)) if place not in borders]
    spans = [(a, b) for a in inside for b in inside if 3 <= b - a <= 12]
    across = [(a, b) for a, b in spans if any(a < border < b for border in borders)]
    return [TEXT[a:b] for a, b in across[:: len(across) // 12]]


def stops() -> list[list[str]]:
    return [
        *([piece] for piece in pieces_inside_tokens()),
        ["umping ov", "umping"],  # one is a prefix of the other
        ["umping", "umping ov"],
        ["quick"],  # occurs twice
        ["nowhere in it", "eriments", "lazi"],
        ["dless."],  # ends the text
    ]


@pytest.mark.parametrize("stop", stops(), ids=repr)
def test_h14_text_ends_before_the_first_stop_string_streamed_and_plain(stop, llm):
    """H-14: found across borders of tokens, none of it is sent, and generation ends soon."""
    num_tokens = len(smollm2_tokenizer().encode(TEXT))
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, stop=stop)
    ends = {text: TEXT.find(text) + len(text) for text in stop if text in TEXT}
    found = min(ends, key=lambda text: ends[text])
    expected = TEXT[: ends[found] - len(found)]

    [plain] = llm.generate([[0]], params)
    pieces, final = [], None
    for _, _, piece, output in llm.stream([[0]], [params]):
        pieces.append(piece)
        final = output
    for completion in (plain.outputs[0], final.outputs[0]):
        assert completion.text == expected
        assert completion.finish_reason == "stop" and completion.stop_reason == found
        text_so_far = smollm2_tokenizer().decode(completion.token_ids[:-1])
        assert found not in text_so_far  # the last token is the one that completed the match
    assert "".join(pieces) == expected
    assert not llm.engine.has_unfinished_requests
