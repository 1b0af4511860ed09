"""The loop that continues texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dseekjax.config import Config
from dseekjax.data.tokenizers import vocabulary_size
from dseekjax.errors import UserError
from dseekjax.generation.sampling import Sampling, sample
from dseekjax.generation.writing import FinishReason, Writing
from dseekjax.trained import Trained
from dseekjax.training.inference import Inference, Weights

FROM_ALL = Sampling()
SLOTS_MULTIPLE = 64
"""Numbers of slots that programs are compiled for are multiples of this."""


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt."""

    prompt: str | Sequence[int]
    """As it was given."""
    text: str
    tokens: tuple[int, ...]
    """That were written: with those of a stop string, without the one that ended it."""
    finish_reason: FinishReason


class Writer:
    """Continues prompts with a model, whose weights it keeps ready."""

    def __init__(self, trained: Trained) -> None:
        """
        Args:
            trained: whose parameters are cast once, here.

        Raises:
            UserError: its mesh splits sequences.
        """
        self._inference: Inference = trained.program.inference()
        self._weights: Weights = self._inference.prepare(trained.params)
        self._tokenizer = trained.tokenizer
        self._begin_tokens = trained.begin_tokens
        self._rows_of_embedding = trained.config.model.vocabulary_size
        self._end_tokens = trained.end_tokens
        self._vocabulary_size = vocabulary_size(trained.tokenizer)
        self.context = context_length(trained.config)
        """Tokens of the longest text."""

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 128,
        sampling: Sampling = FROM_ALL,
        stop: Sequence[str] = (),
        batch_size: int = 8,
        first: int = 0,
        on_text: Callable[[int, str], None] = lambda number, piece: None,
    ) -> Iterator[Completion]:
        """Continues each prompt; the same whatever others are beside it.

        Args:
            prompts: texts, or their tokens, none of them empty. Before a text goes what its model was trained to see
                there, before tokens nothing.
            max_tokens: most tokens to write after each.
            sampling: how tokens are drawn.
            stop: strings that end a text.
            batch_size: prompts that are worked on at a time.
            first: number of the first prompt, which its random numbers depend on.
            on_text: called with a prompt's place in `prompts` and the next piece of its text.

        Returns:
            The completions, in the order of the prompts, those of a batch when all of it is done.

        Raises:
            UserError: a prompt is empty, too long for the model or no text, or a number makes no sense.
        """
        if isinstance(prompts, str):
            raise UserError("prompts is a text; give a list of texts")
        for name, number in (("max_tokens", max_tokens), ("batch_size", batch_size)):
            if number < 1:
                raise UserError(f"{name} {number} is too few; give 1 or more")
        if any(not text for text in stop):
            raise UserError("stop is an empty text, which would end every text at once; leave it out")
        encoded = [self._encode(prompt, first + number + 1) for number, prompt in enumerate(prompts)]
        return self._complete(prompts, encoded, max_tokens, sampling, stop, batch_size, first, on_text)

    def _complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        encoded: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        batch_size: int,
        first: int,
        on_text: Callable[[int, str], None],
    ) -> Iterator[Completion]:
        for start in range(0, len(prompts), batch_size):
            some = range(start, min(start + batch_size, len(prompts)))
            writings = [Writing(self._tokenizer, self._end_tokens, stop, encoded[number]) for number in some]
            texts = np.array([first + number for number in some], np.int32)
            # More would not fit into the context of even the shortest.
            most = min(max_tokens, self.context - min(len(encoded[number]) for number in some))
            steps = self._tokens([encoded[number] for number in some], texts, most, sampling)
            for step, tokens in enumerate(steps, start=1):
                for number, writing, token in zip(some, writings, tokens, strict=False):
                    if writing.finished is None:
                        on_text(number, writing.add(int(token)))
                    if writing.finished is None and step == max_tokens:
                        on_text(number, writing.finish("length"))
                    if writing.finished is None and len(encoded[number]) + step == self.context:
                        on_text(number, writing.finish("context"))
                if all(writing.finished for writing in writings):
                    break
            for number, writing in zip(some, writings, strict=True):
                assert writing.finished is not None
                yield Completion(prompts[number], writing.text, tuple(writing.tokens), writing.finished)

    def _encode(self, prompt: str | Sequence[int], number: int) -> Sequence[int]:
        tokens = self._tokens_of(prompt, number) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not tokens:
            raise UserError(f"prompt {number} is empty; give it a word to begin with")
        if strange := [token for token in tokens if not 0 <= token < self._rows_of_embedding]:
            raise UserError(
                f"prompt {number} has the token {strange[0]}, and the model knows those from 0 to "
                f"{self._rows_of_embedding - 1}; give tokens of its own tokenizer"
            )
        if len(tokens) >= self.context:
            raise UserError(
                f"prompt {number} has {len(tokens)} tokens, and the model's context is {self.context}, what is "
                f"written included; shorten it to {self.context - 1} or fewer"
            )
        return tokens

    def _tokens_of(self, text: str, number: int) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt {number} is no Unicode text ({error.reason}); give it in UTF-8") from error
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [*self._begin_tokens, *tokens] if tokens else []

    def _tokens(
        self, prompts: Sequence[Sequence[int]], texts: Int[np.ndarray, "batch"], count: int, sampling: Sampling
    ) -> Iterator[Int[np.ndarray, "batch"]]:
        """The next token of every prompt, `count` times; the devices are one step ahead."""
        longest = _power_of_two(max(map(len, prompts)))
        slots = -(-(longest + count) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE
        rows = -(-len(prompts) // self._inference.rows_multiple) * self._inference.rows_multiple
        # Rows that only fill the batch are texts of one token.
        tokens, lengths = np.zeros((rows, longest), np.int32), np.ones(rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = prompt
            lengths[row] = len(prompt)
        numbers = jnp.asarray(np.pad(texts, (0, rows - len(texts))))

        def draw(logits: jax.Array, number: int) -> jax.Array:
            return sample(logits[:, : self._vocabulary_size], numbers, jnp.int32(number), sampling)

        logits, cache = self._inference.prefill(self._weights, tokens, lengths, slots)
        upcoming = draw(logits, 0)
        for step in range(1, count):
            logits, cache = self._inference.decode(self._weights, cache, upcoming)
            now, upcoming = upcoming, draw(logits, step)
            yield np.asarray(now)
        yield np.asarray(upcoming)


def context_length(config: Config) -> int:
    """Tokens of the longest text that a model is to see."""
    model = config.model
    return model.max_positions if model.positions == "learned" else config.data.sequence_length


def _power_of_two(number: int) -> int:
    return 1 << max(4, (number - 1).bit_length())
