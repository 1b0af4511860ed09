"""The text that a tokenizer is learned from."""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from dseekjax.data.held_out import place_to_cut
from dseekjax.data.reading.documents import Passed, read_documents, whole
from dseekjax.data.reading.inputs import Format, Input
from dseekjax.data.reading.parts import Part

# More text hardly changes the merges; their trainer holds every different word in memory.
LEARNED_CHARACTERS = 256 << 20


def sample(inputs: Sequence[Input], format: Format, held_out_fraction: float) -> Iterator[str]:
    """The documents that are not held out, or evenly spread parts of them where they are many.

    Args:
        inputs: what is to be tokenised.
        format: how documents lie in it.
        held_out_fraction: last part of the documents that must not be seen.

    Raises:
        UserError: an input is damaged.
    """
    sizes, size, num_characters = array("Q"), 0, 0
    for part in _parts(inputs, format):
        size += len(part.text.encode())
        num_characters += len(part.text)
        if part.ends:
            sizes.append(size)
            size = 0
    if not sizes:
        return
    # Eight bytes for each document, so that what is held out here is just what is held out of the corpus.
    document_bytes = np.frombuffer(sizes, np.uint64).astype(np.int64)
    kept, share = len(sizes), 0.0
    if held_out_fraction:
        kept, share = place_to_cut(document_bytes, held_out_fraction, may_cut=format.example is None)
    left = int(document_bytes[:kept].sum() + (share * document_bytes[kept] if share else 0))
    step = -(-num_characters // LEARNED_CHARACTERS)
    for number, part in enumerate(_parts(inputs, format)):
        content = part.text.encode()
        if left <= 0:
            return
        if number % step == 0:
            yield content[:left].decode(errors="ignore")
        left -= len(content)


def _parts(inputs: Sequence[Input], format: Format) -> Iterator[Part]:
    for file in inputs:
        span = whole(file)
        yield from read_documents(span, format, Passed.of(span))
