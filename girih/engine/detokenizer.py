"""Token ids -> text, one token at a time, never half a character and never a part of a stop string.

Two stages, each holding back what a later token could still change:

    ids ──IncrementalDecoder──> stable text ──StopStringFilter──> text to show

What is shown step by step, joined, is exactly `tokenizer.decode(all ids)`, cut where a stop string begins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not, or not yet, a character."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextDecoder(Protocol):
    """The part of `girih.checkpoint.tokenizer.Tokenizer` that is needed here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of whole `ids`."""

    def is_special(self, token_id: int) -> bool:
        """Tell whether `decode` leaves this token out when it skips special tokens."""

    @property
    def backend(self) -> Any:
        """Return the tokenizer of the `tokenizers` library; asked for how the vocabulary writes a token."""


class IncrementalDecoder:
    """Decodes a growing list of ids; returns only text that no later id can change.

    Only a short window of ids is decoded again for each new id. It starts one stable step back, because
    some decoders treat the first token of a text differently (a leading space is stripped), and moves on
    whenever its text ends in a whole character and the step left behind has a text of its own:

        ids      . . . . . [ a b | c d ]
                           prefix read

    Held back are an unfinished character at the end, and a whole run of byte tokens such as <0xE5>: until
    such a run is over, one more byte can turn the text of all of it into replacement characters.

    Args:
        tokenizer: decodes ids.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: TextDecoder, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._prefix = 0  # where the window starts
        self._read = 0  # ids before this one are shown wholly
        self._num_shown = 0  # characters of the window's text that were returned

    def append(self, token_id: int) -> str:
        """Add one id.

        Returns:
            The text that has become final; often one word, possibly empty.
        """
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
            return ""  # as if it were not there, which is also how all ids are decoded at once
        self._ids.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._prefix)
        ends_whole = not text.endswith(REPLACEMENT)
        delta = self._show(text if ends_whole else text[:-1])
        if ends_whole:
            next_text = self._decode(self._read)
            if next_text:  # else a decoder that strips the start would strip the next token's space
                self._prefix, self._num_shown = self._read, len(next_text)
            self._read = len(self._ids)
        return delta

    def flush(self) -> str:
        """Return what was held back; nothing may be appended afterwards."""
        return self._show(self._decode(self._prefix))

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip_special_tokens)

    def _show(self, text: str) -> str:
        delta = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return delta


class StopStringFilter:
    """Finds the first stop string in a growing text and lets through only what cannot be part of one.

    The result does not depend on how the text is cut into pieces: the stop string that is complete first
    wins, and among those that end together the longest.

    Args:
        stop: the stop strings.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._text = ""
        self._num_shown = 0

    def append(self, delta: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text.

        Args:
            delta: the new text.
            may_stop: False while the output is too short to end; a stop string completed here is plain text.

        Returns:
            (text to show now, the stop string that was found). After one was found nothing may be added.
        """
        searched = len(self._text)
        self._text += delta
        match = self._first_match(searched) if may_stop and delta else None
        if match is not None:
            start, stop = match
            return self._show(start), stop
        return self._show(len(self._text) - self._num_held()), None

    def flush(self) -> str:
        """Return what was held back in case it became a stop string."""
        return self._show(len(self._text))

    def _first_match(self, searched: int) -> tuple[int, str] | None:
        """Find (start, stop string) of the match that ends first beyond the `searched` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self._text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _num_held(self) -> int:
        """Count the characters at the end that are the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _show(self, end: int) -> str:
        delta = self._text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return delta


class Detokenizer:
    """Turns one completion's tokens into text as they come.

    Args:
        tokenizer: decodes ids.
        stop: stop strings; none of them is shown, nor a part of one.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: no stop string ends the text before this many tokens.
    """

    def __init__(
        self,
        tokenizer: TextDecoder,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._filter = StopStringFilter(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def append(self, token_id: int) -> tuple[str, str | None]:
        """Add one token.

        Returns:
            (text to show now, the stop string that ends the text if one was completed).
        """
        self._num_tokens += 1
        delta = self._decoder.append(token_id)
        return self._filter.append(delta, may_stop=self._num_tokens >= self._min_tokens)

    def finish(self) -> tuple[str, str | None]:
        """Return what is still held back when the output ends without a stop string; see `append`."""
        shown, stop = self._filter.append(self._decoder.flush(), may_stop=self._num_tokens >= self._min_tokens)
        return (shown, stop) if stop is not None else (shown + self._filter.flush(), None)
