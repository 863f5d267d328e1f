"""Token ids -> text, a few ids at a time, at a cost per id that does not grow with the text.

`Tokenizer.decode` looks at all ids at once, and the text of an id depends on its neighbours: a
character may be spread over several ids, and the first id may lose its leading space. Decoding
a sliding window of ids and comparing strings, as text-generation-inference and vLLM do it, can
double or lose a character (sglang issue 31598). Here every decoder of the `tokenizers` library
(its src/decoders) has a twin that takes its tokens one after the other, and a tokenizer's
decoder is a chain of them. A twin keeps back what the next tokens may still change:

* ByteLevel: the bytes of an incomplete UTF-8 character;
* ByteFallback: a run of byte tokens that is valid UTF-8 so far, since the whole run becomes
  U+FFFD if it is not;
* BPEDecoder: the end of a word, which is a space except at the end of the text.

Invariant: after the last call, the returned texts joined equal `Tokenizer.decode(all ids)`.
"""

import abc
import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT_CHARACTER = "\ufffd"
# What WordPiece replaces inside each token if its `cleanup` is set, in this order
# (tokenizers, src/decoders/wordpiece.rs).
_CLEAN_UPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class IncrementalDecoder:
    """Decodes one answer; `find_decoder_factory` makes them."""

    def __init__(self, steps: "list[_Step]"):
        self._steps = steps

    def decode(self, pieces: Iterable[str], final: bool) -> str:
        """Returns the text that is decided after these tokens.

        Args:
            pieces: The next tokens as they stand in the vocabulary.
            final: No more will come, so that nothing is kept back.
        """
        tokens = pieces
        for step in self._steps:
            tokens = step.decode(tokens, final)
        return "".join(tokens)

    def piece_bytes(self, piece: str) -> bytes:
        """Returns the bytes that a token stands for in the middle of a text, in UTF-8.

        The answer that is being decoded plays no part in it.
        """
        value: str | bytes = piece
        for step in self._steps:
            if isinstance(value, bytes):
                return value
            value = step.decode_inside(value)
        return value if isinstance(value, bytes) else value.encode()


class _Step(abc.ABC):
    """The twin of one decoder."""

    @abc.abstractmethod
    def decode(self, tokens: Iterable[str], final: bool) -> list[str]:
        """Returns the tokens that are decided after these; `final`: no more will come."""

    @abc.abstractmethod
    def decode_inside(self, token: str) -> str | bytes:
        """Returns what becomes of a token that is neither first nor last."""


class _Replace(_Step):
    def __init__(self, old: str, new: str):
        self._old, self._new = old, new

    def decode(self, tokens: Iterable[str], final: bool) -> list[str]:
        return [token.replace(self._old, self._new) for token in tokens]

    def decode_inside(self, token: str) -> str:
        return token.replace(self._old, self._new)


class _Strip(_Step):
    """Strips every token of at most so many characters at its start."""

    def __init__(self, content: str, start: int):
        self._content, self._start = content, start

    def decode(self, tokens: Iterable[str], final: bool) -> list[str]:
        return [self.decode_inside(token) for token in tokens]

    def decode_inside(self, token: str) -> str:
        num_leading = len(token) - len(token.lstrip(self._content))
        return token[min(num_leading, self._start) :]


class _StripText(_Step):
    """Strips the whole text of at most so many characters at its start."""

    def __init__(self, content: str, start: int):
        self._content, self._num_left = content, start

    def decode(self, tokens: Iterable[str], final: bool) -> list[str]:
        text = "".join(tokens)
        while self._num_left and text:
            if text.startswith(self._content):
                self._num_left -= 1
                text = text[1:]
            else:
                self._num_left = 0
        return [text]

    def decode_inside(self, token: str) -> str:
        return token


class _Metaspace(_Step):
    """Replaces the meta character by a space; the first token loses all of its own."""

    def __init__(self, replacement: str, prepend_scheme: str):
        self._replacement = replacement
        self._is_first = prepend_scheme != "never"

    def decode(self, tokens: Iterable[str], final: bool) -> list[str]:
        decoded: list[str] = []
        for token in tokens:
            decoded.append(token.replace(self._replacement, "" if self._is_first else " "))
            self._is_first = False
        return decoded

    def decode_inside(self, token: str) -> str:
        return token.replace(self._replacement, " ")


class _Spaced(_Step):
    """Puts a space in front of every token but the first: what happens without a decoder."""

    def __init__(self, unspaced_tokens: frozenset[str]):
        self._unspaced_tokens = unspaced_tokens
        self._previous: str | None = None

    def decode(self, tokens: Iterable[str], final: bool) -> list[str]:
        decoded: list[str] = []
        for token in tokens:
            is_unspaced = self._previous is None or (
                token in self._unspaced_tokens and self._previous in self._unspaced_tokens
            )
            self._previous = token
            decoded.append(self._clean_up(token) if is_unspaced else self.decode_inside(token))
        return decoded

    def decode_inside(self, token: str) -> str:
        return self._clean_up(" " + token)

    def _clean_up(self, token: str) -> str:
        return token


class _WordPiece(_Spaced):
    """Puts the space in front of tokens without the prefix only; others lose the prefix."""

    def __init__(self, prefix: str, cleanup: bool, unspaced_tokens: frozenset[str]):
        super().__init__(unspaced_tokens)
        self._prefix, self._clean_ups = prefix, _CLEAN_UPS if cleanup else ()

    def decode_inside(self, token: str) -> str:
        if token.startswith(self._prefix):
            return self._clean_up(token.removeprefix(self._prefix))
        return super().decode_inside(token)

    def _clean_up(self, token: str) -> str:
        for old, new in self._clean_ups:
            token = token.replace(old, new)
        return token


class _EndOfWord(_Step):
    """BPEDecoder: a suffix marks the end of a word, and becomes a space except in the last token.

    It does not keep the borders between tokens, so it must be the last step.
    """

    def __init__(self, suffix: str):
        self._suffix = suffix
        self._held = ""

    def decode(self, tokens: Iterable[str], final: bool) -> list[str]:
        decoded: list[str] = []
        for token in tokens:
            decoded.append(self.decode_inside(self._held))
            head, suffix, rest = token.partition(self._suffix)
            decoded.append(head)
            self._held = suffix + rest
        if final:
            decoded.append(self._held.replace(self._suffix, ""))
            self._held = ""
        return decoded

    def decode_inside(self, token: str) -> str:
        return token.replace(self._suffix, " ")


class _ByteFallback(_Step):
    """Tokens like "<0xE2>" stand for bytes."""

    def __init__(self) -> None:
        self._run = bytearray()
        self._is_broken = False  # whether the run cannot become valid UTF-8 any more
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def decode(self, tokens: Iterable[str], final: bool) -> list[str]:
        decoded: list[str] = []
        for token in tokens:
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte is not None:
                decoded += self._continue_run(bytes.fromhex(byte[1]))
            else:
                decoded += self._end_run()
                decoded.append(token)
        return decoded + self._end_run() if final else decoded

    def decode_inside(self, token: str) -> str | bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return token if byte is None else bytes.fromhex(byte[1])

    def _continue_run(self, byte: bytes) -> list[str]:
        self._run += byte
        if not self._is_broken:
            try:
                self._utf8.decode(byte)
                return []
            except UnicodeDecodeError:
                self._is_broken = True
                self._utf8.reset()
        num_bytes = len(self._run)
        self._run.clear()
        return [_REPLACEMENT_CHARACTER] * num_bytes

    def _end_run(self) -> list[str]:
        if not self._run:
            self._is_broken = False
            return []
        run, is_incomplete = bytes(self._run), bool(self._utf8.getstate()[0])
        self._run.clear()
        self._utf8.reset()
        return [_REPLACEMENT_CHARACTER] * len(run) if is_incomplete else [run.decode()]


class _ByteLevel(_Step):
    """Undoes GPT-2's byte alphabet."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, tokens: Iterable[str], final: bool) -> list[str]:
        return [self._utf8.decode(b"".join(map(self.decode_inside, tokens)), final)]

    def decode_inside(self, token: str) -> bytes:
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            # An added token with characters outside the alphabet stands for itself.
            return token.encode()


def find_decoder_factory(
    decoder: Mapping[str, Any] | None, unspaced_tokens: frozenset[str] = frozenset()
) -> Callable[[], IncrementalDecoder]:
    """Finds the incremental twin of a decoder of the `tokenizers` library; call it per answer.

    Args:
        decoder: The "decoder" entry of tokenizer.json.
        unspaced_tokens: Tokens as they stand in the vocabulary. Where two of them stand next to
            each other, no space is put in between.

    Raises:
        ValueError: Naming the decoder, where there is no twin.
    """
    steps = _find_steps(decoder, unspaced_tokens)
    return lambda: IncrementalDecoder([make_step() for make_step in steps])


def _find_steps(
    decoder: Mapping[str, Any] | None, unspaced: frozenset[str]
) -> list[Callable[[], _Step]]:
    if decoder is None:
        return [partial(_Spaced, unspaced)]
    steps: list[Callable[[], _Step]] = []
    # Whether what comes in is one token, of which an incremental step sees a part at a time.
    is_fused = False
    configs = list(_flatten(decoder))
    for index, config in enumerate(configs):
        match config:
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Replace", "pattern": {"String": str(old)}} if len(old) == 1 or (
                old and not is_fused
            ):
                steps.append(partial(_Replace, old, config["content"]))
            case {"type": "Strip", "stop": 0}:
                strip = _StripText if is_fused else _Strip
                steps.append(partial(strip, config["content"], config["start"]))
            case {"type": "ByteFallback"} if not is_fused:
                steps.append(_ByteFallback)
            case {"type": "Metaspace"} if not is_fused:
                steps.append(partial(_Metaspace, config["replacement"], config["prepend_scheme"]))
            case {"type": "WordPiece"} if not is_fused:
                steps.append(partial(_WordPiece, config["prefix"], config["cleanup"], unspaced))
            case {"type": "ByteLevel"} if not is_fused:
                steps.append(_ByteLevel)
                is_fused = True
            case {"type": "BPEDecoder", "suffix": str(suffix)} if (
                suffix and not is_fused and index + 1 == len(configs)
            ):
                steps.append(partial(_EndOfWord, suffix))
            case _:
                raise ValueError(
                    f"tokenizer.json: decoder {json.dumps(config)} is not supported"
                    f"{_place(index, configs)}; supported are Replace of a string, Strip "
                    "of the start, ByteFallback, Metaspace, WordPiece, ByteLevel, Fuse, and "
                    "BPEDecoder as the last; after ByteLevel or Fuse, only Strip and Replace of a "
                    "character"
                )
    return steps


def _flatten(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for part in decoder["decoders"]:
        yield from _flatten(part)


def _place(index: int, configs: list[Mapping[str, Any]]) -> str:
    before = ", ".join(config["type"] for config in configs[:index])
    return f" after {before}" if before else ""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, src/encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
