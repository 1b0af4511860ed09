"""How likely a model finds a continuation after a context, or a whole text.

What is cut, moved and put before is what EleutherAI's lm-eval does, so that numbers can be compared.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tokenizers

from dseekjax.errors import UserError
from dseekjax.evaluation.scorer import Scorer, Stretch, TokenScores, Watch, nobody
from dseekjax.trained import Trained

HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which no tokenizer takes; Python has them of broken JSON and file names."""

Texts = tuple[str, str]
Tokens = tuple[Sequence[int], Sequence[int]]


class Likelihood(NamedTuple):
    """Of a continuation, or a text."""

    log_probability: float
    """Nats, summed over its tokens."""
    num_tokens: int
    is_greedy: bool
    """Whether no token is more likely than each of its own, so that greedy decoding would give just it."""


class RequestError(UserError):
    """A request cannot be scored."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"request {number} has {reason}")
        self.number = number
        """Of the request, from 0."""
        self.reason = reason


def log_likelihood(
    trained: Trained,
    requests: Sequence[Texts | Tokens],
    *,
    tell: Callable[[str], None] = lambda sentence: None,
    watch: Watch = nobody,
) -> list[Likelihood]:
    """The likelihood of each continuation after its context, in the order of the requests.

    Args:
        trained: the model.
        requests: `(context, continuation)`, both texts or both token ids. An empty context stands for the token that
            ends documents. White space at the end of a context counts as the start of the continuation. Contexts
            that are too long lose what comes first.
        tell: called with a sentence if contexts were cut.
        watch: called after each batch.

    Raises:
        RequestError: a continuation is empty, or too long to be scored at once; a text has a lone surrogate, or the
            model has no such token.
    """
    for number, (context, continuation) in enumerate(requests):
        _check(trained, number, "context", context)
        _check(trained, number, "continuation", continuation)
    scorer = Scorer(trained.program, trained.params)
    _, length = scorer.batch_shape
    pairs = _encoded(trained, requests)
    stretches: list[Stretch] = []
    for number, (context, continuation) in enumerate(pairs):
        if not continuation:
            raise RequestError(number, "an empty continuation; give some text")
        if len(continuation) > length:
            raise RequestError(
                number,
                f"a continuation of {len(continuation)} tokens, and data.sequence_length is {length}; shorten it",
            )
        stretches.append(Stretch([*context, *continuation][-(length + 1) :], len(continuation)))
    num_cut = sum(len(context) + len(continuation) > length + 1 for context, continuation in pairs)
    if num_cut:
        tell(
            f"{num_cut:,} of {len(pairs):,} requests are longer than data.sequence_length {length}; of their contexts "
            "only the end counts."
        )
    return [_likelihood([scores]) for scores in scorer.score(stretches, watch)]


def log_likelihood_rolling(trained: Trained, texts: Sequence[str], *, watch: Watch = nobody) -> list[Likelihood]:
    """The likelihood of whole texts of any length, each after the token that ends documents.

    Each token is scored once, in windows of `data.sequence_length` tokens that follow each other; the last reaches
    back, so that what is left has as much context as fits. A text without a token has the likelihood of 0 nats.

    Raises:
        RequestError: a text has a lone surrogate.
    """
    for number, text in enumerate(texts):
        _check(trained, number, "text", text)
    scorer = Scorer(trained.program, trained.params)
    _, length = scorer.batch_shape
    windows = [
        list(rolling_windows([_first_token(trained), *tokens], length)) for tokens in _encode(trained.tokenizer, texts)
    ]
    scores = iter(scorer.score([window for of_text in windows for window in of_text], watch))
    return [_likelihood([next(scores) for _ in of_text]) for of_text in windows]


def encode_pairs(
    tokenizer: tokenizers.Tokenizer, end_token: int, pairs: Sequence[Texts]
) -> list[tuple[list[int], list[int]]]:
    """Token ids of contexts and continuations.

    The whole is encoded, and what follows the context's own tokens is the continuation. Where the whole has other
    tokens than the context at its start, because a token would span the boundary, the two are encoded apart.
    """
    parts: list[Texts] = []
    for context, continuation in pairs:
        kept = context.rstrip()
        parts.append((kept, context[len(kept) :] + continuation))
    wholes = _encode(tokenizer, [context + continuation for context, continuation in parts])
    contexts = _encode(tokenizer, [context for context, _ in parts])
    apart = _encode(tokenizer, [continuation for _, continuation in parts])
    encoded: list[tuple[list[int], list[int]]] = []
    for whole, before, alone in zip(wholes, contexts, apart, strict=True):
        after = whole[len(before) :] if whole[: len(before)] == before else alone
        if not before and len(after) > 1 and after[0] == end_token:
            before, after = after[:1], after[1:]
        encoded.append((before or [end_token], after if after else alone))
    return encoded


def _check(trained: Trained, number: int, part: str, given: str | Sequence[int]) -> None:
    if isinstance(given, str):
        if half := HALF_A_CHARACTER.search(given):
            raise RequestError(number, f"{half[0]!r} in its {part}, half of a character; give whole ones")
        return
    size = trained.config.model.vocabulary_size
    for token in given:
        if not 0 <= token < size:
            raise RequestError(
                number, f"{token} in its {part}, and the model has token ids from 0 to {size - 1}; give those"
            )


def _encoded(trained: Trained, requests: Sequence[Texts | Tokens]) -> list[Tokens]:
    texts = [(context, after) for context, after in requests if isinstance(context, str) and isinstance(after, str)]
    encoded = iter(encode_pairs(trained.tokenizer, trained.end_token, texts))
    found: list[Tokens] = []
    for number, (context, after) in enumerate(requests):
        if isinstance(context, str) and isinstance(after, str):
            before, continuation = next(encoded)
            found.append((_begun(trained, before), continuation))
        elif isinstance(context, str) or isinstance(after, str):
            raise RequestError(number, "a text and token ids; give both alike")
        else:
            found.append((context or [trained.end_token], after))
    return found


def _first_token(trained: Trained) -> int:
    """What a text without a context follows."""
    return trained.begin_tokens[-1] if trained.begin_tokens else trained.end_token


def _begun(trained: Trained, context: list[int]) -> list[int]:
    """A context with what goes before a text; that alone stands for an empty one."""
    begin = list(trained.begin_tokens)
    return begin if begin and context == [trained.end_token] else begin + context


def _encode(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def rolling_windows(tokens: Sequence[int], length: int) -> Iterator[Stretch]:
    """Stretches in which every token but the first is scored once."""
    done = 1
    while done < len(tokens):
        end = min(done + length, len(tokens))
        yield Stretch(tokens[max(0, end - length - 1) : end], end - done)
        done = end


def _likelihood(parts: Sequence[TokenScores]) -> Likelihood:
    return Likelihood(
        float(sum(part.log_probabilities.sum(dtype="float64") for part in parts)),
        sum(len(part.log_probabilities) for part in parts),
        all(bool(part.are_greedy.all()) for part in parts),
    )
