"""The real Gemma 3 270M, from its GGUF file, against transformers, which read the same file."""

import pytest

from jpaged.checkpoint import open_checkpoint
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams
from tests.oracle import assert_same_answer

pytestmark = [pytest.mark.gemma3, pytest.mark.slow, pytest.mark.optimized]


def test_ids_and_text_are_those_of_transformers(goldens):
    golden = goldens("gemma3-text")
    with open_checkpoint("gemma3") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    assert tokenizer.vocab_size == golden["vocab_size"]
    for case in golden["texts"]:
        assert tokenizer.encode(case["text"]) == case["token_ids"], case["text"]
        assert tokenizer.decode(case["token_ids"]) == case["decoded"]


def test_answers_are_those_of_transformers(goldens):
    answers = goldens("gemma3-answers")["answers"]
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=len(answer["token_ids"]), ignore_eos=True, logprobs=0
        )
        for answer in answers
    ]
    with LLM("gemma3", max_model_len=1024) as llm:
        window = max(window or 0 for window in llm.engine.model_config.windows)
        assert max(len(answer["prompt_token_ids"]) for answer in answers) > window == 512
        outputs = llm.generate([answer["prompt"] for answer in answers], params)
    for output, golden in zip(outputs, answers, strict=True):
        [completion] = output.outputs
        assert output.prompt_token_ids == golden["prompt_token_ids"]
        assert_same_answer(golden, completion.token_ids, completion.token_logprobs)
        if completion.token_ids == golden["token_ids"]:
            assert completion.text == golden["text"]
