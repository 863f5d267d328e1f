import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from jpaged.checkpoint import open_checkpoint
from jpaged.text.tokenizer import Tokenizer
from tests.jpaged.text.tokenizers_for_tests import TEXTS, byte_fallback_json, byte_level_json

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "a.b"},
    {"role": "user", "content": "日本"},
]
# Writes the beginning of sequence itself, as Gemma's and Llama 3's do.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}


def write_directory(
    directory: Path,
    tokenizer_json: dict[str, Any],
    tokenizer_config: dict[str, Any],
    model_type: str = "llama",
    **files: Any,
) -> Path:
    config = {"model_type": model_type}
    files |= {"tokenizer": tokenizer_json, "tokenizer_config": tokenizer_config, "config": config}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def assert_equals_transformers(directory: Path) -> None:
    ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in TEXTS:
        for add in (True, False):
            ids = theirs(text, add_special_tokens=add)["input_ids"]
            assert ours.encode(text, add_special_tokens=add) == ids, text
            for skip in (True, False):
                decoded = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == decoded, text
    every_id = list(range(ours.vocab_size))
    assert ours.decode(every_id) == theirs.decode(every_id, skip_special_tokens=True)
    if ours.chat_template:
        for prompt in (True, False):
            assert ours.encode_chat(CHAT, add_generation_prompt=prompt) == (
                theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
            )


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("tokenizer_class", [None, "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("flags", [{}, {"legacy": True}, {"add_prefix_space": False}])
@pytest.mark.parametrize("make_json", [byte_fallback_json, byte_level_json])
def test_ids_and_text_equal_transformers(make_json, flags, tokenizer_class, model_type, tmp_path):
    config = NAMED | flags | {"add_bos_token": True, "clean_up_tokenization_spaces": True}
    if tokenizer_class:
        config["tokenizer_class"] = tokenizer_class
    assert_equals_transformers(write_directory(tmp_path, make_json(), config, model_type))


@pytest.mark.parametrize(
    "config",
    [
        # a word of the vocabulary, a new token, and objects instead of texts
        {"pad_token": "Ġhe", "unk_token": "<new>"},
        {
            "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": True},
            "pad_token": {"__type": "AddedToken", "content": "[PAD]", "lstrip": True},
        },
        {"additional_special_tokens": ["<tool>", "<s>"]},
        {"split_special_tokens": True},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {
            "added_tokens_decoder": {
                "262": {"content": "<late>", "special": False, "normalized": False},
                "258": {"content": "<s>", "special": True, "rstrip": True},
            }
        },
    ],
)
def test_tokens_that_only_the_config_names_are_added_as_in_transformers(config, tmp_path):
    assert_equals_transformers(write_directory(tmp_path, byte_level_json(), NAMED | config))


def test_special_tokens_map_counts_where_the_config_lists_no_added_tokens(tmp_path):
    legacy = {"bos_token": "<|im|>", "eos_token": {"content": "</s>", "lstrip": False}}
    directory = write_directory(
        tmp_path, byte_level_json(), {"chat_template": TEMPLATE}, special_tokens_map=legacy
    )
    assert_equals_transformers(directory)
    assert Tokenizer.from_directory(directory).bos_token_id == 260


def test_chat_template_file_comes_before_the_config(tmp_path):
    directory = write_directory(tmp_path, byte_level_json(), NAMED)
    (directory / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert Tokenizer.from_directory(directory).render_chat(CHAT) == "from the file"
    assert_equals_transformers(directory)


def test_tool_use_template_is_taken_when_there_are_tools(tmp_path):
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    config = NAMED | {"chat_template": templates}
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level_json(), config))
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=[{"name": "add"}]) == "add"


def test_h15_exactly_one_bos_on_every_road(tmp_path):
    adds_bos = Tokenizer.from_directory(write_directory(tmp_path, byte_fallback_json(), NAMED))
    bos = adds_bos.bos_token_id
    assert adds_bos.encode("hello").count(bos) == 1
    assert adds_bos.encode_chat(CHAT).count(bos) == 1
    rendered = adds_bos.render_chat(CHAT)
    assert adds_bos.encode(rendered, add_special_tokens=False) == adds_bos.encode_chat(CHAT)
    adds_none = Tokenizer.from_directory(write_directory(tmp_path, byte_level_json(), NAMED))
    assert adds_none.encode("hello").count(adds_none.bos_token_id) == 0
    assert adds_none.encode_chat(CHAT).count(adds_none.bos_token_id) == 1


def test_tokenizer_without_tokenizer_json_is_converted_by_transformers(tmp_path):
    model = byte_level_json()["model"]
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    directory = write_directory(tmp_path, {}, config, vocab=model["vocab"])
    (directory / "tokenizer.json").unlink()
    merges = "\n".join(["#version: 0.2", *(" ".join(merge) for merge in model["merges"])])
    (directory / "merges.txt").write_text(merges, encoding="utf-8")
    assert_equals_transformers(directory)


def test_model_without_a_template_refuses_messages(tmp_path):
    config = {"bos_token": "<s>"}
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level_json(), config))
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match="chat_template is missing"):
        tokenizer.render_chat(CHAT)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    tokenizer_json = byte_level_json() | {
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst",
                       "stride": 0},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
    }  # fmt: skip
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, tokenizer_json, NAMED))
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_unknown_decoder_is_refused_by_name():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(backend, {})


def test_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_damaged_tokenizer_json_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model":')
    with pytest.raises(ValueError, match=r"not a readable tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_smollm2_gives_the_ids_and_text_of_transformers(goldens):
    golden = goldens("smollm2-text")
    tokenizer = open_checkpoint("smollm2").tokenizer()
    assert tokenizer.vocab_size == golden["vocab_size"]
    assert golden["texts"]
    for case in golden["texts"]:
        ids = case["token_ids"]
        assert tokenizer.encode(case["text"]) == ids, case["text"]
        assert tokenizer.decode(ids) == case["decoded"]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text == case["decoded_with_special_tokens"]
    assert golden["chats"]
    for case in golden["chats"]:
        assert tokenizer.render_chat(case["messages"]) == case["rendered"]
        assert tokenizer.encode_chat(case["messages"]) == case["token_ids"]
