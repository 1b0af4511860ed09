"""Parts of documents to token ids, many at a time."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers
from jaxtyping import Bool

from dseekjax.data.reading.parts import Characters, Part

# The library holds a hundred bytes and more for each token of a call.
CHARACTERS_PER_CALL = 1 << 18
PARTS_PER_CALL = 4096


def batched(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """As many parts at a time as make a call of the tokenizer worth it."""
    some: list[Part] = []
    characters = 0
    for part in parts:
        some.append(part)
        characters += len(part.text)
        if characters >= CHARACTERS_PER_CALL or len(some) >= PARTS_PER_CALL:
            yield some
            some, characters = [], 0
    if some:
        yield some


def encode(tokenizer: tokenizers.Tokenizer, end_token: int, parts: Sequence[Part]) -> tuple[list[int], list[int]]:
    """The ids of all parts, `end_token` after each that ends a document, and how many are of each part."""
    ids: list[int] = []
    lengths: list[int] = []
    encodings = tokenizer.encode_batch_fast([part.text for part in parts], add_special_tokens=False)
    for part, encoding in zip(parts, encodings, strict=True):
        before = len(ids)
        ids += encoding.ids
        if part.ends:
            ids.append(end_token)
        lengths.append(len(ids) - before)
    return ids, lengths


def encode_examples(
    tokenizer: tokenizers.Tokenizer, end_token: int, parts: Sequence[Part]
) -> tuple[list[int], list[int], Bool[np.ndarray, "tokens"]]:
    """The same for documents of which a part counts, and for each token whether it does: holds a character that counts.

    Tokens are those of the whole text, wherever what counts begins.

    Args:
        tokenizer: that makes the tokens.
        end_token: put after each document.
        parts: of documents.
    """
    ids: list[int] = []
    lengths: list[int] = []
    counts: list[np.ndarray] = []
    encodings = tokenizer.encode_batch([part.text for part in parts], add_special_tokens=False)
    for part, encoding in zip(parts, encodings, strict=True):
        ids += encoding.ids
        counts.append(_counted(encoding.offsets, part.uncounted))
        if part.ends:
            ids.append(end_token)
            counts.append(np.asarray([part.end_counts]))
        lengths.append(len(encoding.ids) + part.ends)
    return ids, lengths, np.concatenate(counts)


def _counted(offsets: list[Characters], uncounted: Sequence[Characters]) -> Bool[np.ndarray, "tokens"]:
    if not offsets or not uncounted:
        return np.ones(len(offsets), bool)
    first, after = np.asarray(offsets).T
    starts, stops = np.asarray(uncounted).T
    # Tokenizers of bytes may leave white space out of the offsets; what counts never ends with it before what does not.
    stretch = np.searchsorted(starts, first, side="right") - 1
    return (stretch < 0) | (after > stops[stretch])
