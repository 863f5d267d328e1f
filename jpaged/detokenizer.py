"""Token ids of one answer -> text that may be shown now, cut at a stop string.

Two things keep text back: what the decoder has not decided (`IncrementalDecoder`), and an end that
may be the beginning of a stop string. The latter is kept back exactly as long as it may be, so that
no character of a stop string is ever shown and no other waits.

The result does not depend on how the ids are spread over calls: of several stop strings, the one
that is complete first counts, and of those complete at the same character the longest.
"""

from collections.abc import Iterable

from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the ids of one answer into text, at a cost per id that does not grow.

    Args:
        tokenizer: The model's.
        params: `stop`, `include_stop_str_in_output`, `min_tokens`, `skip_special_tokens` and
            `spaces_between_special_tokens` are used. Until the answer has `min_tokens` ids, skipped
            ones included, no stop string ends it: one counts only if its last character came after
            these.

    Attributes:
        stop_reason: The stop string that ended the text; further ids are ignored from then on.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._skipped_ids = (
            tokenizer.special_token_ids if params.skip_special_tokens else frozenset[int]()
        )
        self._stop = tuple(params.stop or ())
        self._max_num_held = max(map(len, self._stop), default=1) - 1
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_ids = 0
        self._decoder = tokenizer.incremental_decoder(
            spaces_between_special_tokens=params.skip_special_tokens
            or params.spaces_between_special_tokens
        )
        self._shown: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._shown)

    def add(self, token_ids: Iterable[int], finished: bool = False) -> str:
        """Takes the next ids of the answer, and returns the text that may be shown now.

        Args:
            token_ids: Any number of ids; ids beyond the vocabulary count as nothing.
            finished: No more will come, so that nothing is held back: an incomplete character
                then appears as U+FFFD, as `Tokenizer.decode` gives it.
        """
        if self.stop_reason is not None:
            return ""
        ids = list(token_ids)
        num_exempt = max(self._min_tokens - self._num_ids, 0)
        self._num_ids += len(ids)
        if self._num_ids <= self._min_tokens:
            exempt, countable = self._decode(ids, finished), ""
        else:
            exempt = self._decode(ids[:num_exempt], False) if num_exempt else ""
            countable = self._decode(ids[num_exempt:], finished)
        delta = self._cut(self._held + exempt, countable, finished)
        if delta:
            self._shown.append(delta)
        return delta

    def _decode(self, token_ids: list[int], final: bool) -> str:
        pieces = [
            piece
            for token_id in token_ids
            if token_id not in self._skipped_ids
            and (piece := self._tokenizer.id_to_token(token_id)) is not None
        ]
        return self._decoder.decode(pieces, final)

    def _cut(self, before: str, new: str, finished: bool) -> str:
        """Returns what of the text not shown yet may be shown; holds back the rest.

        Args:
            before: In it no stop string ends, or none that counts.
            new: What follows.
            finished: Nothing is to be held back.
        """
        self._held = ""
        text = before + new
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop, max(len(before) - len(stop) + 1, 0))) >= 0
        ]
        if matches:
            end, start, self.stop_reason = min(matches)
            return text[: end if self._include_stop else start]
        if finished:
            return text
        num_held = self._count_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _count_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for count in range(min(self._max_num_held, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stop):
                return count
        return 0
