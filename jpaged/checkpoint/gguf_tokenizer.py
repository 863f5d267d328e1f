"""The tokenizer inside a GGUF file, with the rules of the tokenizer.json that it was made from.

GGUF keeps tokens and types, and of the rules that cut and merge text only names. There are two
kinds ("model"):

* "gpt2", byte-level BPE with its merges; "pre" names the rules that cut text before merging. What
  stands behind a name is in llama.cpp (src/llama-vocab.cpp); one that is not known here is refused,
  since a wrong rule gives wrong ids without any error.
* "llama", a SentencePiece vocabulary without merges. They follow from it: two tokens merge if what
  they make together is a token, the best one first.

Gemma has 514,906 merges. To find them and build the tokenizer takes 3 s of CPU time (Zen), to read
a tokenizer.json that holds them 2 s: too little a gain to keep one beside the file.
"""

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Rules(NamedTuple):
    """What the name of a pre-tokenizer stands for.

    Attributes:
        split: What text is cut into; "": as GPT-2 does it.
        single_digits: Every digit is cut off first.
        composes: Characters are composed first (Unicode's NFC).
        ignores_merges: A piece of text that is a token is not merged from smaller ones.
        adds_bos: Unless the file says otherwise.
    """

    split: str = ""
    single_digits: bool = False
    composes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_PRE_TOKENIZERS = {
    "gpt-2": _Rules(),
    "smollm": _Rules(single_digits=True),
    "starcoder": _Rules(single_digits=True),
    "refact": _Rules(single_digits=True),
    "llama-bpe": _Rules(_LLAMA3, ignores_merges=True, adds_bos=True),
    "llama3": _Rules(_LLAMA3, ignores_merges=True, adds_bos=True),
    "llama-v3": _Rules(_LLAMA3, ignores_merges=True, adds_bos=True),
    "qwen2": _Rules(_QWEN2, composes=True),
}
_GEMMAS = ("gemma2", "gemma3")
_SPACE = "▁"  # how SentencePiece writes one
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_PREFIX = "tokenizer.ggml."
# Tokens for other tasks, and SentencePiece's marks of tokens of the second kind.
_KEYS = frozenset({
    "model", "pre", "tokens", "scores", "token_type", "merges", "token_type_count",
    "add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix",
    "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id",
    "seperator_token_id", "padding_token_id", "mask_token_id", "cls_token_id",
    "prefix_token_id", "suffix_token_id", "middle_token_id", "fim_pre_token_id",
    "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id",
    "fim_sep_token_id",
})  # fmt: skip
# Those of which only these values are what is done here.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "remove_extra_whitespaces": (False,),
    "escape_whitespaces": (True,),
    "treat_whitespace_as_suffix": (False,),
    "precompiled_charsmap": ([], ""),
}

# How turns of a chat end, by which llama.cpp knows such tokens where the metadata do not name them.
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


def build_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds the tokenizer.

    Raises:
        ValueError: Naming the kind of tokenizer or pre-tokenizer that is not supported, or the
            key whose value is damaged or not understood.
    """
    for key, value in metadata.items():
        own = key.removeprefix(_PREFIX)
        if own != key and own not in _KEYS and value not in _ONLY.get(own, ()):
            raise ValueError(
                f"{key} is {reprlib.repr(value)}; jpaged does not know this, so it may change the "
                "ids. Use the model's Hugging Face checkpoint"
            )
    tokens = _read_list(metadata, "tokenizer.ggml.tokens", str)
    types = _read_list(metadata, "tokenizer.ggml.token_type", int)
    if not tokens or len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries and tokenizer.ggml.token_type "
            f"{len(types)}; there must be some, and as many. Fetch the file again"
        )
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            backend, adds_bos = _build_byte_level(metadata, tokens)
        case "llama" if metadata.get("general.architecture") in _GEMMAS:
            tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
            backend, adds_bos = _build_gemma(metadata, tokens), True
        case "llama":
            backend, adds_bos = _build_sentencepiece(metadata, tokens), True
        case kind:
            raise ValueError(
                f"tokenizer.ggml.model is {reprlib.repr(kind)}; supported in GGUF files: 'gpt2' "
                "(byte-level BPE) and 'llama' (SentencePiece). Use the model's Hugging Face "
                "checkpoint"
            )
    # Runs of spaces, which Gemma has among them, never stand in a text once its spaces are marks.
    backend.add_tokens([
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token.strip(_SPACE)
    ])  # fmt: skip
    post_processor = _post_processor(metadata, adds_bos_by_default=adds_bos)
    if post_processor is not None:
        backend.post_processor = post_processor
    return backend


def read_tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Builds tokenizer_config.json: the named special tokens and the chat template.

    Raises:
        ValueError: Naming the key whose value is damaged.
    """
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        found = _find_special_token(metadata, key)
        if found is not None:
            config[f"{name}_token"] = found.text
    key = "tokenizer.chat_template"
    templates = {"default": metadata[key]} if key in metadata else {}
    if "tokenizer.chat_templates" in metadata:
        for name in _read_list(metadata, "tokenizer.chat_templates", str):
            templates[name] = metadata.get(f"{key}.{name}")
    for name, template in templates.items():
        if not isinstance(template, str):
            raise ValueError(
                f"chat template {name!r} is {reprlib.repr(template)}; it must be a string. Fetch "
                "the file again"
            )
    return config | {"chat_template": templates}


def find_end_token_ids(metadata: Mapping[str, Any]) -> list[Any]:
    """Ids that end an answer, as far as the metadata can be read.

    Those that the metadata name, and those with which the chat template ends turns: a
    generation_config.json, which would say so, is not in the file.
    """
    ends = [metadata.get(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    template, tokens = metadata.get("tokenizer.chat_template"), metadata.get(f"{_PREFIX}tokens")
    if isinstance(template, str) and isinstance(tokens, list):
        ends += [tokens.index(end) for end in _ENDS_OF_TURN if end in template and end in tokens]
    return [end for index, end in enumerate(ends) if end is not None and end not in ends[:index]]


def _build_byte_level(
    metadata: Mapping[str, Any], tokens: list[str]
) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether it adds the beginning-of-sequence token by default."""
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {reprlib.repr(pre)}; supported: {', '.join(_PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face checkpoint"
        )
    rules = _PRE_TOKENIZERS[pre]
    pairs = [merge.split(" ") for merge in _read_list(metadata, "tokenizer.ggml.merges", str)]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(
                f"tokenizer.ggml.merges has {reprlib.repr(' '.join(pair))}; each must be two "
                "tokens. Fetch the file again"
            )
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=_number(tokens),
            merges=cast(list[tuple[str, str]], list(map(tuple, pairs))),
            ignore_merges=rules.ignores_merges,
        )
    )
    steps = []
    if rules.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.split:
        steps.append(pre_tokenizers.Split(Regex(rules.split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rules.split))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rules.composes:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, rules.adds_bos


def _build_sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """As transformers' `LlamaTokenizer`: the better of two merges has the higher score."""
    scores = _read_list(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} entries; there must be {len(tokens)}, one "
            "for each token. Fetch the file again"
        )
    vocab = _number(tokens)
    score_of = dict(zip(tokens, scores, strict=True))
    merges = sorted(
        _find_merges(vocab),
        key=lambda pair: (score_of[pair[0] + pair[1]], len(pair[0]), len(pair[1])),
        reverse=True,
    )
    backend = tokenizers.Tokenizer(_byte_fallback_bpe(metadata, vocab, merges))
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if adds_space else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _build_gemma(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """As transformers' `GemmaTokenizer`.

    The better of two merges is the one whose token has the lower id: runs of spaces, which come
    first, have the lowest of scores.
    """
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise ValueError(
            "tokenizer.ggml.add_space_prefix is True; Gemma puts no space in front of a text. Use "
            "the model's Hugging Face checkpoint"
        )
    vocab = _number(tokens)
    merges = list(_find_merges(vocab))
    backend = tokenizers.Tokenizer(_byte_fallback_bpe(metadata, vocab, merges))
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _number(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _find_merges(vocab: Mapping[str, int]) -> Iterable[tuple[str, str]]:
    """All pairs of tokens that make a token, by the id of that, the longest first part first."""
    for token in vocab:
        for cut in range(len(token) - 1, 0, -1):
            # A plain loop: it is run millions of times.
            if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab:
                yield left, right


def _byte_fallback_bpe(
    metadata: Mapping[str, Any], vocab: dict[str, int], merges: list[tuple[str, str]]
) -> models.BPE:
    unknown = _find_special_token(metadata, "unknown")
    return models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=None if unknown is None else unknown.text,
        fuse_unk=True,
        byte_fallback=True,
    )


def _read_list(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not set(map(type, values)) <= {kind}:
        raise ValueError(
            f"{key} is {reprlib.repr(values)}; it must be a list of {kind.__name__}. Fetch the "
            "file again"
        )
    return values


class _SpecialToken(NamedTuple):
    token_id: int
    text: str


def _find_special_token(metadata: Mapping[str, Any], key: str) -> _SpecialToken | None:
    """A token that the metadata name by its id; `None` if they do not."""
    token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if token_id is None:
        return None
    tokens = _read_list(metadata, "tokenizer.ggml.tokens", str)
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ValueError(
            f"tokenizer.ggml.{key}_token_id is {reprlib.repr(token_id)}; it must be the id of one "
            f"of the {len(tokens)} tokens. Fetch the file again"
        )
    return _SpecialToken(token_id, tokens[token_id])


def _post_processor(
    metadata: Mapping[str, Any], *, adds_bos_by_default: bool
) -> processors.TemplateProcessing | None:
    around: dict[str, list[str]] = {"bos": [], "eos": []}
    special_tokens: list[tuple[str, int]] = []
    for name, by_default in (("bos", adds_bos_by_default), ("eos", False)):
        found = _find_special_token(metadata, name)
        if found is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", by_default):
            continue
        around[name] = [found.text]
        special_tokens.append((found.text, found.token_id))
    if not special_tokens:
        return None
    return processors.TemplateProcessing(
        single=[*around["bos"], "$A", *around["eos"]],
        pair=[*around["bos"], "$A", "$B", *around["eos"]],
        special_tokens=special_tokens,
    )
