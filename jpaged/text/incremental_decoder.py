"""Token ids -> text, a few ids at a time, at a cost per id that does not grow with the text.

`Tokenizer.decode` looks at all ids at once, and the text of an id depends on its neighbours: a
character may be spread over several ids, and the first id may lose its leading space. Decoding
a sliding window of ids and comparing strings, as text-generation-inference and vLLM do it, can
double or lose a character (sglang issue 31598). Here each id contributes the piece that the
tokenizer's own decoder would make of it, and what is not yet decided is kept back:

* byte-level BPE: the bytes of an incomplete UTF-8 character;
* SentencePiece with byte fallback: a run of byte tokens, since the whole run becomes U+FFFD if
  it is not valid UTF-8.

Invariant: after the last call, the returned texts joined equal `Tokenizer.decode(all ids)`.
"""

import abc
import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder(abc.ABC):
    """Decodes one answer; make a new one for each."""

    @abc.abstractmethod
    def decode(self, pieces: Iterable[str], final: bool) -> str:
        """Returns the text that is decided after these tokens.

        Args:
            pieces: The next tokens as they stand in the vocabulary.
            final: No more will come, so that nothing is kept back.
        """


class ByteLevelDecoder(IncrementalDecoder):
    """For vocabularies over GPT-2's byte alphabet (Llama 3, SmolLM2)."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, pieces: Iterable[str], final: bool) -> str:
        """See `IncrementalDecoder.decode`."""
        return self._utf8.decode(b"".join(map(_byte_level_bytes, pieces)), final)


class ByteFallbackDecoder(IncrementalDecoder):
    """For SentencePiece-like vocabularies (Llama 2, Mistral 7B).

    Args:
        replacements: Substitutions inside every token, in order, e.g. `[("▁", " ")]`.
        has_byte_fallback: Whether tokens like "<0xE2>" stand for bytes.
        num_stripped: Leading spaces that the whole text loses at most.
    """

    def __init__(
        self, replacements: list[tuple[str, str]], has_byte_fallback: bool, num_stripped: int
    ):
        self._replacements = replacements
        self._has_byte_fallback = has_byte_fallback
        self._num_to_strip = num_stripped
        self._run = bytearray()

    def decode(self, pieces: Iterable[str], final: bool) -> str:
        """See `IncrementalDecoder.decode`."""
        texts: list[str] = []
        for piece in pieces:
            for old, new in self._replacements:
                piece = piece.replace(old, new)
            byte = _BYTE_TOKEN.fullmatch(piece) if self._has_byte_fallback else None
            if byte:
                self._run.append(int(byte[1], 16))
            else:
                texts += self._end_run(), piece
        if final:
            texts.append(self._end_run())
        return self._strip("".join(texts))

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(" "):
                self._num_to_strip = 0
            else:
                self._num_to_strip -= 1
                text = text[1:]
        return text


def find_decoder_factory(decoder: Mapping[str, Any] | None) -> Callable[[], IncrementalDecoder]:
    """Picks the incremental twin of a decoder of the `tokenizers` library.

    Args:
        decoder: The "decoder" entry of tokenizer.json.

    Raises:
        ValueError: Naming the decoder, where there is no twin.
    """
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelDecoder
    replacements: list[tuple[str, str]] = []
    num_stripped = 0
    while kinds and kinds[0] == "Replace" and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        kinds, steps = kinds[1:], steps[1:]
    has_byte_fallback = kinds[:1] == ["ByteFallback"]
    if has_byte_fallback:
        kinds, steps = kinds[1:], steps[1:]
    if kinds == ["Fuse", "Strip"] and steps[1]["content"] == " " and steps[1]["stop"] == 0:
        num_stripped = steps[1]["start"]
    elif kinds != ["Fuse"]:
        raise ValueError(
            f"tokenizer.json: decoder {json.dumps(decoder)} is not supported; supported are "
            "ByteLevel, and Replace, ByteFallback, Fuse and a leading Strip in this order"
        )
    return lambda: ByteFallbackDecoder(replacements, has_byte_fallback, num_stripped)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, src/encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        # An added token with characters outside the alphabet stands for itself.
        return token.encode()
