import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jpaged.checkpoint import open_checkpoint
from jpaged.text.tokenizer import Tokenizer
from tests.jpaged.text.tokenizers_for_tests import (
    KINDS,
    TEXTS,
    byte_fallback_json,
    byte_level_json,
    make_tokenizer,
)

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


@pytest.mark.parametrize("kind", ["unigram", "word_piece", "end_of_word", "no_decoder"])
def test_other_kinds_give_the_ids_and_text_of_transformers(kind, tmp_path):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "hello world"}
    assert_equals_transformers(write_directory(tmp_path, KINDS[kind](), config))


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


def test_chat_template_of_a_call_replaces_the_models_own(tmp_path):
    templates = [{"name": "default", "template": "own"}, {"name": "rag", "template": "by name"}]
    config = NAMED | {"chat_template": templates}
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level_json(), config))
    assert tokenizer.render_chat(CHAT, chat_template="{{ bos_token }}given") == "<s>given"
    assert tokenizer.render_chat(CHAT, chat_template="rag") == "by name"
    assert tokenizer.encode_chat(CHAT, chat_template="rag") == tokenizer.encode("by name")
    without = make_tokenizer("byte_level")
    assert without.render_chat(CHAT, chat_template="{{ messages | length }}") == "4"


def test_options_of_a_chat_reach_the_template(tmp_path):
    template = (
        "{% for message in messages %}{{ message.content }};{% endfor %}{{ documents[0].title }}"
        "{{ enable_thinking }}{% if add_generation_prompt %}|{% endif %}"
    )
    config = NAMED | {"chat_template": template}
    directory = write_directory(tmp_path, byte_level_json(), config)
    options = {
        "documents": [{"title": "T", "text": ""}],
        "enable_thinking": False,
        "add_generation_prompt": False,
    }
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        CHAT, return_dict=False, **options
    )
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode_chat(CHAT, **options) == expected
    assert tokenizer.render_chat(CHAT, **options).endswith("TFalse")


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
    backend.decoder = tokenizers.decoders.CTC()
    with pytest.raises(ValueError, match="CTC"):
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


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(kind):
    tokenizer = make_tokenizer(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids))
        whole = tokenizer.decode(ids, skip_special_tokens=False).encode()
        # What differs is the space that a text loses at one end.
        assert joined.strip(b" ") == whole.strip(b" "), text
        assert len(joined) - len(whole) in (0, 1) or kind == "unigram"
        if kind == "byte_level":
            assert joined == text.encode()


def test_one_token_is_decoded_as_in_the_middle_of_a_text():
    byte_level, byte_fallback = make_tokenizer("byte_level"), make_tokenizer("byte_fallback")
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode("a é", add_special_tokens=False)
        assert [tokenizer.token_text(token_id) for token_id in ids[-2:]] == ["\ufffd", "\ufffd"]
        assert [tokenizer.token_bytes(token_id) for token_id in ids[-2:]] == [b"\xc3", b"\xa9"]
        assert tokenizer.token_text(tokenizer.token_to_id("</s>")) == "</s>"
        assert tokenizer.token_text(tokenizer.vocab_size) == ""
        assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    hello = byte_fallback.token_to_id("▁hello")
    assert byte_fallback.token_text(hello) == " hello"
    assert byte_fallback.decode([hello]) == "hello"


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_a_token_is_what_decode_gives_between_two_others(kind):
    tokenizer = make_tokenizer(kind)
    other = tokenizer.token_to_id("a")
    before = tokenizer.decode([other])
    after = tokenizer.decode([other, other]).removeprefix(before)
    for token_id in range(tokenizer.vocab_size):
        whole = tokenizer.decode([other, token_id, other], skip_special_tokens=False)
        assert whole == before + tokenizer.token_text(token_id) + after


def test_no_space_between_added_tokens_only_where_it_is_asked_for():
    tokenizer = make_tokenizer("word_piece")
    special = [tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]")]
    ids = [*special, *tokenizer.encode("hello world"), *special, tokenizer.token_to_id("<tool> .")]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert whole == "[CLS] [SEP] hello world [CLS] [SEP] <tool>."
    dense = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert dense == "[CLS][SEP] hello world [CLS][SEP]<tool>."
    text = tokenizer.decode(ids, spaces_between_special_tokens=False)
    assert text == tokenizer.decode(ids) == "hello world <tool>."


def spelled(tokenizer: Tokenizer, sequences: tuple[tuple[int, ...], ...]) -> list[list[str]]:
    return [[tokenizer.id_to_token(token_id) for token_id in ids] for ids in sequences]


def test_bad_words_are_banned_with_and_without_a_space_in_front():
    tokenizer = make_tokenizer("byte_level")
    expected = [["h", "e", "y"], ["Ġhe", "y"], ["a"], ["Ġ", "a"]]
    for words in (["hey", "a"], (" hey", "  a"), ["hey", "a", "hey"]):
        assert spelled(tokenizer, tokenizer.encode_bad_words(words)) == expected
    assert tokenizer.encode_bad_words([]) == ()
    # Nothing is put around them.
    adds_bos = make_tokenizer("byte_fallback", bos_token="<s>")
    for ids in adds_bos.encode_bad_words(["hello"]):
        assert adds_bos.bos_token_id not in ids
    # A space that makes no difference gives nothing twice.
    tokenizer = make_tokenizer("word_piece")
    assert spelled(tokenizer, tokenizer.encode_bad_words(["hello"])) == [["hello"]]


@pytest.mark.parametrize("word", ["", " ", "\n"])
def test_bad_word_without_ids_is_refused_by_its_field(word):
    with pytest.raises(ValueError, match=r"SamplingParams\.bad_words.*no ids"):
        make_tokenizer("byte_level").encode_bad_words(["hello", word])


def test_completion_gets_the_ids_beyond_the_prompts():
    tokenizer = make_tokenizer("byte_level", eos_token="</s>")
    prompt, completion = tokenizer.encode_pair("a b", " hello")
    assert spelled(tokenizer, (tuple(prompt), tuple(completion))) == [
        ["a", "Ġ", "b"], ["Ġhe", "l", "l", "o"],
    ]  # fmt: skip
    assert tokenizer.encode_pair("a b", "") == (tokenizer.encode("a b"), [])


def test_space_at_the_end_of_the_prompt_moves_to_the_completion():
    tokenizer = make_tokenizer("byte_level", eos_token="</s>")
    for completion in ("hello", "日"):
        prompt_ids, completion_ids = tokenizer.encode_pair("a b ", completion)
        assert prompt_ids == tokenizer.encode("a b")
        assert completion_ids == tokenizer.encode(" " + completion)


def test_token_over_the_border_is_the_completions():
    tokenizer = make_tokenizer("byte_level", eos_token="</s>")
    prompt, completion = tokenizer.encode_pair("a h", "ello")
    # Counted by the prompt's own two further ids, "Ġhe" would be the prompt's.
    assert spelled(tokenizer, (tuple(tokenizer.encode("a h")),)) == [["a", "Ġh"]]
    assert spelled(tokenizer, (tuple(prompt), tuple(completion))) == [
        ["a"], ["Ġhe", "l", "l", "o"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "named", "start"),
    [
        ("byte_level", {"bos_token": "<s>", "eos_token": "</s>"}, "<s>"),
        ("byte_level", {"eos_token": "</s>"}, "</s>"),
        ("byte_fallback", {"bos_token": "<s>", "eos_token": "</s>"}, "<s>"),
    ],
)
def test_empty_prompt_is_the_beginning_of_sequence_once(kind, named, start):
    tokenizer = make_tokenizer(kind, **named)
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode_pair("", "hello") == ([tokenizer.token_to_id(start)], hello)
    spaced = tokenizer.encode(" hello", add_special_tokens=False)
    assert tokenizer.encode_pair(" ", "hello") == ([tokenizer.token_to_id(start)], spaced)
    # Nothing is left of a prompt that is one token with the completion.
    merged = tokenizer.encode(" he", add_special_tokens=False)
    if len(merged) == 1:
        assert tokenizer.encode_pair(" h", "e") == ([tokenizer.token_to_id(start)], merged)


def test_pair_that_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="neither bos_token nor eos_token"):
        make_tokenizer("byte_level").encode_pair("", "hello")
    with pytest.raises(ValueError, match="completion is ' '"):
        make_tokenizer("word_piece").encode_pair("hello", " ")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
@settings(deadline=None)
@given(prompt=st.text(" ahelo日\n", max_size=6), completion=st.text(" ahelo日\n", max_size=6))
def test_joined_pair_is_the_joined_text_and_no_part_of_a_text_is_empty(kind, prompt, completion):
    tokenizer = PAIR_TOKENIZERS[kind]
    if kind == "unigram":
        assume((prompt + completion).strip() and completion.strip())
    prompt_ids, completion_ids = tokenizer.encode_pair(prompt, completion)
    whole = tokenizer.encode(prompt + completion)
    start = tokenizer.bos_token_id or tokenizer.eos_token_id
    assert [*prompt_ids, *completion_ids] in (whole, [start, *whole])
    assert prompt_ids
    assert bool(completion_ids) == bool(completion) or kind == "unigram"


PAIR_TOKENIZERS = {
    kind: make_tokenizer(kind, eos_token="</s>", **named)
    for kind, named in [("byte_level", {}), ("byte_fallback", {"bos_token": "<s>"}),
                        ("unigram", {})]
}  # fmt: skip
