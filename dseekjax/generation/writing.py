"""One text as its tokens come: what of it can be shown, and when it ends."""

from collections.abc import Collection, Sequence
from typing import Literal

import tokenizers
from tokenizers.decoders import DecodeStream

FinishReason = Literal["end", "stop", "length", "context"]
"""The model ended the document, wrote a stop string, wrote as many tokens as were asked for, or filled its context."""


class Writing:
    """Turns tokens into text, a piece at a time.

    A piece never ends within a character, nor with what may be the beginning of a stop string.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, end_tokens: Collection[int], stop: Sequence[str], prompt: Sequence[int]
    ) -> None:
        """
        Args:
            tokenizer: of the model.
            end_tokens: each of which ends the text, and is no part of it.
            stop: strings that end the text, and are no part of it.
            prompt: the tokens before, which spaces at the beginning may depend on.
        """
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=False)
        self._end_tokens = end_tokens
        self._stop = tuple(stop)
        self._held_back = ""
        self.text = ""
        """All that was written so far and is certain to stay."""
        self.tokens: list[int] = []
        self.finished: FinishReason | None = None

    def add(self, token: int) -> str:
        """Takes the next token; returns what of the text has become certain."""
        if token in self._end_tokens:
            return self.finish("end")
        self.tokens.append(token)
        self._held_back += self._stream.step(self._tokenizer, token) or ""
        places = [self._held_back.find(stop) for stop in self._stop if stop in self._held_back]
        if places:
            self._held_back = self._held_back[: min(places)]
            return self.finish("stop")
        return self._release(len(self._held_back) - self._may_be_stop())

    def finish(self, reason: FinishReason) -> str:
        """Ends the text; returns the last of it."""
        self.finished = reason
        return self._release(len(self._held_back))

    def _release(self, count: int) -> str:
        piece, self._held_back = self._held_back[:count], self._held_back[count:]
        self.text += piece
        return piece

    def _may_be_stop(self) -> int:
        """Characters at the end that a stop string may begin with."""
        for length in range(min(len(self._held_back), max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(stop.startswith(self._held_back[-length:]) for stop in self._stop):
                return length
        return 0
