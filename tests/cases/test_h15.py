import json

import pytest
import tokenizers

from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from tests.cases.scripted import scripted_llm
from tests.jpaged.text.tokenizers_for_tests import byte_fallback_json

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}model: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "hello world"}]
PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
BOS = 1


@pytest.fixture(scope="module")
def gemma_style():
    """The tokenizer adds a beginning, and the template writes one as well."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    backend = tokenizers.Tokenizer.from_str(json.dumps(byte_fallback_json()))
    with scripted_llm(Tokenizer(backend, config), [5]) as llm:
        yield llm


def test_h15_raw_text_has_one_beginning(gemma_style):
    """H-15: the tokenizer's own."""
    [output] = gemma_style.generate("hello world", PARAMS)
    assert output.prompt_token_ids[0] == BOS and output.prompt_token_ids.count(BOS) == 1


def test_h15_every_chat_road_has_the_templates_beginning_and_no_other(gemma_style):
    """H-15: chat, generate of messages, and the rendered text with the documented switch."""
    tokenizer = gemma_style.tokenizer
    rendered = tokenizer.render_chat(MESSAGES)
    assert rendered == "<s>user: hello world\nmodel: "
    from_text = tokenizer.encode(rendered, add_special_tokens=False)
    assert from_text[0] == BOS and from_text.count(BOS) == 1
    [chat] = gemma_style.chat(MESSAGES, PARAMS)
    [messages] = gemma_style.generate([MESSAGES], PARAMS)
    [ids] = gemma_style.generate([from_text], PARAMS)
    [named] = gemma_style.generate({"prompt_token_ids": from_text}, PARAMS)
    for output in (chat, messages, ids, named):
        assert output.prompt_token_ids == from_text


def test_h15_no_option_of_a_chat_adds_a_beginning(gemma_style):
    """H-15: one beginning where the template writes it, none where it does not."""
    tokenizer = gemma_style.tokenizer
    answer = [*MESSAGES, {"role": "model", "content": "he"}]
    continued = tokenizer.encode_chat(
        answer, add_generation_prompt=False, continue_final_message=True
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello world"}]}]
    for ids in (continued, tokenizer.encode_chat(parts)):
        assert ids[0] == BOS and ids.count(BOS) == 1
    assert tokenizer.encode_chat(parts) == tokenizer.encode_chat(MESSAGES)
    own = tokenizer.encode_chat(MESSAGES, chat_template="{{ messages[0]['content'] }}")
    assert own == tokenizer.encode("hello world", add_special_tokens=False)


def test_h15_tokenizer_without_a_beginning_adds_none(tiny_model, goldens):
    """H-15: SmolLM2's roads, ids as transformers' apply_chat_template gives them."""
    from tests.cases.test_h14 import smollm2_tokenizer

    tokenizer = smollm2_tokenizer()
    with scripted_llm(tokenizer, [5]) as llm:
        for golden in goldens("smollm2-text")["chats"]:
            [output] = llm.chat(golden["messages"], PARAMS)
            assert output.prompt_token_ids == golden["token_ids"]
            assert output.prompt == golden["rendered"]
        [output] = llm.generate("Hello, world!", PARAMS)
        [expected] = [
            text["token_ids"]
            for text in goldens("smollm2-text")["texts"]
            if text["text"] == "Hello, world!"
        ]
        assert output.prompt_token_ids == expected
