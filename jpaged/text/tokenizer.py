"""Text <-> token ids, with the ids and the text that transformers' AutoTokenizer would give.

`tokenizers.Tokenizer` does the work. transformers itself costs seconds to import, so the few
things it does on top (its tokenization_utils_tokenizers.py, version 5) are done here; except for
`clean_up_tokenization_spaces`, which would change text after it was shown (vLLM leaves it out too).
"""

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken

from jpaged.text.chat_template import ChatTemplate
from jpaged.text.incremental_decoder import IncrementalDecoder, find_decoder_factory
from jpaged.text.tokenizer_files import read_tokenizer

_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class Tokenizer:
    """The tokenizer of one model.

    Args:
        backend: Holds vocabulary and rules, as read from tokenizer.json. It is changed.
        config: tokenizer_config.json: names of special tokens, added tokens, chat template.

    Attributes:
        vocab_size: Highest id plus one; ids from here on mean nothing.
        longest_token: Characters of a text that one token stands for at most.
        bos_token_id: `None` where there is none.
        eos_token_id: `None` where there is none. A model may end on further ids: those are
            `ModelConfig.eos_token_ids`.
        special_token_ids: Ids that `decode` can skip.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        _add_tokens(backend, config)
        self._backend = backend
        self._special_tokens = {
            name: _token_text(config[name]) for name in _NAMED_TOKENS if config.get(name)
        }
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.longest_token: int = max(1, *map(len, vocabulary))
        self.bos_token_id = self._named_token_id("bos_token")
        self.eos_token_id = self._named_token_id("eos_token")
        added_tokens = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            token_id for token_id, token in added_tokens.items() if token.special
        )
        decoder = cast(Any, backend.decoder)
        rules = decoder and json.loads(decoder.__getstate__())
        self._make_decoder = find_decoder_factory(rules)
        self._make_unspaced_decoder = find_decoder_factory(
            rules, frozenset(token.content for token in added_tokens.values())
        )
        self._piece_bytes = self._make_decoder().piece_bytes
        self._templates = _read_templates(config.get("chat_template"))
        # A caller may bring any number of templates.
        self._compile = functools.lru_cache(maxsize=16)(
            lambda source: ChatTemplate(source, self._special_tokens)
        )

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Reads tokenizer.json and its companions from a Hugging Face directory.

        Raises:
            FileNotFoundError: There is no tokenizer in it.
            ValueError: Naming what in it is not supported.
        """
        return cls(*read_tokenizer(directory))

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, if the model has one."""
        return self._templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes text; special tokens written in it become their ids.

        Args:
            text: Any text. One that a chat template has rendered holds its special tokens
                already: encode it with `add_special_tokens=False`, and give `LLM.generate` the
                ids instead of the text, lest it begin twice.
            add_special_tokens: Add what the tokenizer itself puts around a text, such as the
                beginning-of-sequence token.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds {text[error.start]!r} at index {error.start}, which is not a "
                "character; give valid Unicode"
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Encodes a prompt and a completion of it that is to be scored.

        The rule is that of lm-evaluation-harness (its api/model.py): white space at the end of the
        prompt moves to the completion, and the two are encoded as one text, since that is how
        models saw them in training. The ids that the prompt's own encoding shares with it from the
        start are the prompt's, the others the completion's. A token that reaches over the border
        is thus the completion's, where the harness would count as many ids as the prompt alone has
        and score something else.

        Returns:
            Ids of the prompt and of the completion; joined, those of the joined text. A prompt of
            which no id is left, as it is empty or its first token reaches over the border, is the
            beginning-of-sequence token, or where there is none the end-of-sequence token.

        Raises:
            ValueError: There is neither of the two tokens, or the tokenizer gives no ids for the
                completion, e.g. as it drops white space.
        """
        text = prompt.rstrip() if completion else prompt
        whole = self.encode(prompt + completion)
        pairs = zip(self.encode(text), whole, strict=False)
        num_shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        prompt_ids, completion_ids = whole[:num_shared], whole[num_shared:]
        if completion and not completion_ids:
            raise ValueError(
                f"completion is {completion!r}; the tokenizer gives no ids for it after this "
                "prompt. Give a text that it does not drop"
            )
        if not prompt_ids:
            start = self.eos_token_id if self.bos_token_id is None else self.bos_token_id
            if start is None:
                raise ValueError(
                    f"prompt is {prompt!r}; no id of it stands before the completion, and the "
                    "tokenizer has neither bos_token nor eos_token to stand there. Give a prompt"
                )
            prompt_ids = [start]
        return prompt_ids, completion_ids

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Finds the id sequences that spell words which must not be generated.

        Args:
            words: As in `SamplingParams.bad_words`. Space in front of a word does not count.

        Returns:
            For each word, its ids at the start of a text and after a space. vLLM leaves the second
            out where it has another length, and so lets many words through; it is not left out
            here.

        Raises:
            ValueError: A word has no ids.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            stripped = word.lstrip()
            ids = self.encode(stripped, add_special_tokens=False)
            if not ids:
                raise ValueError(
                    f"SamplingParams.bad_words holds {word!r}; the tokenizer gives no ids for it. "
                    "Leave it out"
                )
            # The second is empty only if the first is: a space makes nothing vanish.
            spaced = self.encode(" " + stripped, add_special_tokens=False)
            sequences |= {tuple(ids): None, tuple(spaced): None}
        return tuple(sequences)

    def decode(
        self,
        ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Decodes a whole sequence of ids; ids beyond `vocab_size` count as nothing.

        Args:
            ids: Token ids.
            skip_special_tokens: Leave special tokens out.
            spaces_between_special_tokens: Where special tokens are not left out, leave the space
                that the decoder may put between two added tokens that stand next to each other.
        """
        if skip_special_tokens or spaces_between_special_tokens:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        decoder = self.incremental_decoder(spaces_between_special_tokens=False)
        pieces = map(self.id_to_token, ids)
        return decoder.decode((piece for piece in pieces if piece is not None), final=True)

    def token_text(self, token_id: int) -> str:
        """Text of one token, special or not, as it is in the middle of a text.

        A leading space is kept, unlike in `decode([token_id])`, and bytes that are not whole
        characters are U+FFFD. For an id beyond the vocabulary it is empty.
        """
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for in the middle of a text.

        Joined over all ids of a text, they are the text in UTF-8, but for the space that a text
        may lose at its start (with BPEDecoder, at its end).
        """
        piece = self.id_to_token(token_id)
        return b"" if piece is None else self._piece_bytes(piece)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as it stands in the vocabulary, `None` if there is no such token."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Token as it stands in the vocabulary, `None` for an id beyond it."""
        return self._backend.id_to_token(token_id)

    def incremental_decoder(
        self, *, spaces_between_special_tokens: bool = True
    ) -> IncrementalDecoder:
        """Makes a decoder for one answer; it takes tokens from `id_to_token`.

        Args:
            spaces_between_special_tokens: Whether the space that the decoder may put between two
                added tokens is left there.
        """
        if spaces_between_special_tokens:
            return self._make_decoder()
        return self._make_unspaced_decoder()

    def render_chat(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> str:
        """Turns messages into prompt text with the model's chat template.

        Args:
            messages: As for `ChatTemplate.render`.
            chat_template: Instead of the model's own: the Jinja source, or the name of one of the
                model's templates.
            tools: Tools as JSON schemas. With them, the model's "tool_use" template is taken where
                it has one.
            **options: Further arguments of `ChatTemplate.render`: `add_generation_prompt`,
                `continue_final_message`, `content_format`, `documents`, and any variables of the
                template.

        Raises:
            ValueError: The model has no chat template, or it refuses the messages.
        """
        if chat_template is None:
            use_tools = tools is not None and "tool_use" in self._templates
            chat_template = "tool_use" if use_tools else "default"
            if chat_template not in self._templates:
                raise ValueError(
                    "chat_template is missing: this model has none, so it takes no messages (base "
                    "models have none). Send plain text, give a chat_template, or use the instruct "
                    "version of the model"
                )
        source = self._templates.get(chat_template, chat_template)
        return self._compile(source).render(messages, tools=tools, **options)

    def encode_chat(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """Encodes messages; arguments as for `render_chat`.

        The template writes the special tokens, so none is added: never two beginnings.
        """
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def _named_token_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self.token_to_id(token)


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _as_added_token(token: str | Mapping[str, Any]) -> AddedToken:
    """A special token of tokenizer_config.json, which stands there as text or as an object."""
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return AddedToken(
        token["content"], special=True, **{flag: token[flag] for flag in flags if flag in token}
    )


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds the tokens that tokenizer_config.json names and tokenizer.json does not have."""
    present = {str(token) for token in map(repr, backend.get_added_tokens_decoder().values())}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = [config[name] for name in _NAMED_TOKENS if config.get(name)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named_texts = {_token_text(token) for token in named}
    tokens: list[AddedToken] = []
    for _, entry in sorted(
        config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])
    ):
        flags = {key: value for key, value in entry.items() if key != "__type"}
        flags["special"] = flags.get("special", False) or flags["content"] in named_texts
        token = AddedToken(**flags)
        known.add(token.content)
        if repr(token) not in present:
            tokens.append(token)
    for entry in [*named, *(extra.values() if isinstance(extra, Mapping) else extra)]:
        if _token_text(entry) not in known:
            known.add(_token_text(entry))
            tokens.append(_as_added_token(entry))
    backend.add_tokens(tokens)


def _read_templates(entry: Any) -> dict[str, str]:
    """Chat templates by name, from any of the forms in which a checkpoint may hold them."""
    if not entry:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, Mapping):
        return dict(entry)
    return {template["name"]: template["template"] for template in entry}
