"""Incremental detokenization: whole characters, up to the first stop string."""

import codecs
import re
from collections.abc import Sequence

import numpy as np

from ttcd_jax.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, UTF-8
_LONGEST_TAIL = 3  # bytes of an incomplete character, hence the most replacements to hold back
_MIN_WINDOW, _MAX_WINDOW = 8, 16  # tokens, of one byte at least


def typed(text: str) -> str:
    r"""A text as typed in a shell: nothing but \n, \t and \r is the characters they stand for."""
    return codecs.decode(text, "unicode_escape") if re.fullmatch(r"(\\[ntr])+", text) else text


class TextStream:
    """The text of tokens that arrive one at a time, up to the first `stop` string: concatenated,
    the strings of `push` and `finish` are the text that the tokenizer decodes from all tokens.

    A token's text may depend on those before it, and a character may span several: every `push`
    decodes at most 16 tokens, from where the text was last complete. What may begin a stop string
    is held back. `context`: the tokens before the first; their text is not repeated.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        context: Sequence[int] | np.ndarray = (),
    ) -> None:
        self._tokenizer, self._stop, self._held = tokenizer, tuple(stop), ""
        self.is_stopped = False  # whether a stop string has been found
        window = [int(token) for token in context[-_MIN_WINDOW:]]
        # A window that begins inside a character would begin with a replacement.
        while window and tokenizer.decode(window).startswith(_REPLACEMENT):
            window = window[1:]
        self._continue_from(window)

    def push(self, token: int) -> str:
        """The text that becomes certain with this token, often empty; none after a stop string."""
        if token >= self._tokenizer.vocab_size or not self._tokenizer.num_bytes(token):
            return ""
        self._window.append(token)
        is_full = len(self._window) == _MAX_WINDOW
        text = self._tokenizer.decode(self._window)
        num_certain = _num_certain(text) if is_full else len(text.rstrip(_REPLACEMENT))
        new = text[self._num_given : num_certain]
        self._num_given = max(self._num_given, num_certain)
        if num_certain == len(text):
            self._continue_from(self._window[self._num_complete :])
        elif is_full:
            self._continue_from(self._window[-_MIN_WINDOW:])
        return self._before_stop(new)

    def finish(self) -> str:
        """The rest of the text, when no token follows: an incomplete character is U+FFFD."""
        rest = self._tokenizer.decode(self._window)[self._num_given :]
        text, self._held = self._before_stop(rest) + self._held, ""
        return text

    def _continue_from(self, window: list[int]) -> None:
        text = self._tokenizer.decode(window)
        self._window = window
        self._num_given = _num_certain(text)  # characters
        self._num_complete = len(window) if self._num_given == len(text) else 0  # tokens

    def _before_stop(self, new: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + new
        # The one that ends first: tokenization makes no difference.
        matches = sorted((text.find(x) + len(x), text.find(x)) for x in self._stop if x in text)
        self.is_stopped = bool(matches)
        begun = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end = matches[0][1] if matches else len(text) - max(begun, default=0)
        self._held = "" if matches else text[end:]
        return text[:end]


def _num_certain(text: str) -> int:
    """Characters of `text` that no further token changes."""
    return max(len(text.rstrip(_REPLACEMENT)), len(text) - _LONGEST_TAIL)
