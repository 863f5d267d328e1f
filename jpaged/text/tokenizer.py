"""Text <-> token ids, with the ids and the text that transformers' AutoTokenizer would give.

`tokenizers.Tokenizer` does the work. transformers itself costs seconds to import, so the few
things it does on top (its tokenization_utils_tokenizers.py, version 5) are done here.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from jpaged.text.chat_template import ChatTemplate
from jpaged.text.incremental_decoder import IncrementalDecoder, find_decoder_factory

logger = logging.getLogger(__name__)

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
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_token_id = self._named_token_id("bos_token")
        self.eos_token_id = self._named_token_id("eos_token")
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        decoder = cast(Any, backend.decoder)
        self._make_decoder = find_decoder_factory(decoder and json.loads(decoder.__getstate__()))
        self._templates = _read_templates(config.get("chat_template"))
        self._compiled: dict[str, ChatTemplate] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Reads tokenizer.json and its companions from a Hugging Face directory.

        Raises:
            FileNotFoundError: There is no tokenizer in it.
            ValueError: Naming what in it is not supported.
        """
        config = _read_config(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            return cls(*_convert_with_transformers(directory, config))
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path}: not a readable tokenizer.json: {error}") from error
        if _is_rebuilt_by_transformers(directory, config):
            _rebuild_as_llama(backend, config)
        return cls(backend, config)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, if the model has one."""
        return self._templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes text; special tokens written in it become their ids.

        Args:
            text: Any text. One that a chat template has rendered holds its special tokens
                already: encode it with `add_special_tokens=False`.
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

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes a whole sequence of ids; ids beyond `vocab_size` count as nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as it stands in the vocabulary, `None` if there is no such token."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Token as it stands in the vocabulary, `None` for an id beyond it."""
        return self._backend.id_to_token(token_id)

    def incremental_decoder(self) -> IncrementalDecoder:
        """Makes a decoder for one answer; it takes tokens from `id_to_token`."""
        return self._make_decoder()

    def render_chat(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Turns messages into prompt text with the model's chat template.

        Args:
            messages: As for `ChatTemplate.render`.
            add_generation_prompt: End with the header of the assistant's turn.
            **template_kwargs: Further variables of the template. With `tools`, the model's
                "tool_use" template is taken where it has one.

        Raises:
            ValueError: The model has no chat template, or it refuses the messages.
        """
        use_tools = template_kwargs.get("tools") is not None and "tool_use" in self._templates
        name = "tool_use" if use_tools else "default"
        if name not in self._templates:
            raise ValueError(
                "chat_template is missing: this model has none, so it takes no messages (base "
                "models have none). Send plain text, or use the instruct version of the model"
            )
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._templates[name], self._special_tokens)
        return self._compiled[name].render(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )

    def encode_chat(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Encodes messages; arguments as for `render_chat`.

        The template writes the special tokens, so none is added: never two beginnings.
        """
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return self.encode(text, add_special_tokens=False)

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


def _read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with what stands in files beside it put in its place."""
    config: dict[str, Any] = {}
    path = directory / "tokenizer_config.json"
    if path.exists():
        config = json.loads(path.read_text(encoding="utf-8"))
    legacy = directory / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and legacy.exists():
        config |= json.loads(legacy.read_text(encoding="utf-8"))
    if (directory / "chat_template.jinja").exists():
        templates = {"default": (directory / "chat_template.jinja").read_text(encoding="utf-8")}
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
        config["chat_template"] = templates
    return config


def _read_templates(entry: Any) -> dict[str, str]:
    """Chat templates by name, from any of the forms in which a checkpoint may hold them."""
    if not entry:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, Mapping):
        return dict(entry)
    return {template["name"]: template["template"] for template in entry}


def _is_rebuilt_by_transformers(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether AutoTokenizer would make a `LlamaTokenizer` of this directory.

    It does so if the class is named and the vocabulary is not byte-level; except for Mistral,
    for which it takes tokenizer.json as it is.
    """
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name != "LlamaTokenizer":
        return False
    path = directory / "config.json"
    model_config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if model_config.get("model_type", "llama") != "llama":
        return False
    return '"ByteLevel"' not in (directory / "tokenizer.json").read_text(encoding="utf-8")


def _rebuild_as_llama(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Replaces the rules of tokenizer.json by those of transformers' `LlamaTokenizer`."""
    add_prefix_space = config.get("add_prefix_space")
    add_prefix_space = True if add_prefix_space is None else add_prefix_space
    scheme = "never" if not add_prefix_space else "always" if config.get("legacy") else "first"
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    rules = cast(Any, backend)  # the stubs know neither setters for these nor None
    rules.normalizer = None
    rules.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=scheme, split=False
    )
    rules.decoder = decoders.Sequence(steps)
    rules.model.fuse_unk = True
    rules.model.byte_fallback = True


def _convert_with_transformers(
    directory: Path, config: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Lets transformers build the tokenizer from tokenizer.model and the like."""
    sources = ("tokenizer.model", "vocab.json", "tekken.json")
    if not any((directory / source).exists() for source in sources):
        raise FileNotFoundError(
            f"{directory}: no tokenizer.json, tokenizer.model or vocab.json in it. Save the "
            "model's tokenizer there"
        )
    # transformers takes seconds to import, and only old checkpoints need it.
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(directory)
        backend = converted.backend_tokenizer
    except Exception as error:  # whatever its converters raise
        raise ValueError(
            f"{directory}: transformers cannot convert its tokenizer: {error}. Save a "
            "tokenizer.json there"
        ) from error
    logger.info("built the tokenizer of %s with transformers; it has no tokenizer.json", directory)
    return backend, {**config, **converted.special_tokens_map}
