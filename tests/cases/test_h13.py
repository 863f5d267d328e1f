import json

import pytest
import tokenizers

from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from tests.cases.scripted import scripted_llm
from tests.jpaged.text.tokenizers_for_tests import byte_fallback_json, byte_level_json

TEXTS = (
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",  # a joined family
    "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5",  # two flags
    "東京タワーへ行きます",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "e\u0301 a\u030a o\u0308\u0323",
    "A 日\U00020bb7 ascii",
)


@pytest.mark.parametrize("kind", [byte_level_json, byte_fallback_json])
def test_h13_streamed_pieces_are_whole_characters_and_join_to_the_text(kind):
    """H-13 end to end: a scripted model says each text, one byte a token where it must."""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(kind())), {})
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    with scripted_llm(tokenizer, [token_id for ids in texts for token_id in ids]) as llm:
        start = 1
        for text, ids in zip(TEXTS, texts, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=len(ids), ignore_eos=True)
            pieces, outputs = [], []
            for _, _, piece, output in llm.stream([[ids[0]] * start], [params]):
                pieces.append(piece)
                outputs.append(output)
            assert outputs[-1].outputs[0].token_ids == ids
            assert "".join(pieces) == outputs[-1].outputs[0].text == text
            assert not any("\ufffd" in piece for piece in pieces)
            if kind is byte_level_json:  # byte fallback decodes a run of bytes as one
                assert len(pieces) > len(text) // 2
            start += len(ids)
