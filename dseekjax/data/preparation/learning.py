"""The text that a tokenizer is learned from."""

from collections.abc import Iterator, Sequence

from dseekjax.data.corpus import kept_documents
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
    num_documents = num_characters = 0
    for part in _parts(inputs, format):
        num_documents += part.ends
        num_characters += len(part.text)
    kept = kept_documents(num_documents, held_out_fraction) if held_out_fraction else num_documents
    left = num_characters if kept else int(num_characters * (1 - held_out_fraction))
    step = -(-num_characters // LEARNED_CHARACTERS)
    document = 0
    for number, part in enumerate(_parts(inputs, format)):
        if left <= 0 or (kept and document >= kept):
            return
        if number % step == 0:
            yield part.text[:left]
        left -= len(part.text)
        document += part.ends


def _parts(inputs: Sequence[Input], format: Format) -> Iterator[Part]:
    for file in inputs:
        span = whole(file)
        yield from read_documents(span, format, Passed.of(span))
