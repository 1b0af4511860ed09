"""Parts of documents to token ids, many at a time."""

from collections.abc import Iterable, Iterator, Sequence

import tokenizers

from dseekjax.data.reading.parts import Part

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
