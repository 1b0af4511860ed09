"""Text files as documents."""

import codecs
import re
from collections.abc import Iterator

from dseekjax.data.reading.inputs import Input
from dseekjax.data.reading.open_bytes import BLOCK_BYTES, open_bytes
from dseekjax.data.reading.parts import PART_CHARACTERS, Part, cut, place_to_cut
from dseekjax.errors import UserError

# What a separator may look at to both sides of itself.
SEPARATOR_CHARACTERS = 1 << 16


def read_text(file: Input, start: int, stop: int, separator: str | None) -> Iterator[Part]:
    """The documents of a text file, or without a separator those bytes of its only one.

    Raises:
        UserError: it is binary, not UTF-8, or damaged.
    """
    blocks = _decoded(file, start, stop)
    ends = stop == file.size
    yield from _whole(blocks, ends) if separator is None else _split(blocks, re.compile(separator))


def _decoded(file: Input, start: int, stop: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig" if start == 0 else "utf-8")()
    with open_bytes(file) as stream:
        if start:
            stream.seek(start)
        done, whole = start, file.compression is not None
        while block := stream.read(BLOCK_BYTES if whole else min(BLOCK_BYTES, stop - done)):
            if b"\0" in block:
                raise UserError(
                    f"{file.path} is a binary file (it has a NUL byte at {done + block.index(0)}); give a text file"
                )
            yield _decode(decoder, block, False, file, done)
            done += len(block)
        yield _decode(decoder, b"", whole or stop == file.size, file, done)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, final: bool, file: Input, done: int) -> str:
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file.path} is not UTF-8 (byte {done - pending + error.start} is 0x{error.object[error.start]:02x}); "
            "convert it with `iconv -f ENCODING -t UTF-8`"
        ) from error


def _whole(blocks: Iterator[str], ends: bool) -> Iterator[Part]:
    text = ""
    for block in blocks:
        text += block
        while len(text) > 2 * PART_CHARACTERS:
            stop = place_to_cut(text, PART_CHARACTERS)
            yield Part(text[:stop], False)
            text = text[stop:]
    yield from cut(text, ends)


def _split(blocks: Iterator[str], separator: re.Pattern[str]) -> Iterator[Part]:
    text, done, at_end, is_open = "", 0, False, False
    while not at_end:
        # Enough that a part is sure, in steps large against what is searched twice.
        while len(text) - done <= 2 * PART_CHARACTERS + SEPARATOR_CHARACTERS and not at_end:
            block = next(blocks, None)
            text, at_end = (text, True) if block is None else (text + block, False)
        trusted = len(text) if at_end else len(text) - SEPARATOR_CHARACTERS
        for match in separator.finditer(text, done):
            if match.start() >= trusted and not at_end:
                break
            if is_open or match.start() > done:
                yield from cut(text[done : match.start()], True)
            done, is_open = match.end(), False
        if not at_end and trusted - done > PART_CHARACTERS:
            stop = min(place_to_cut(text, done + PART_CHARACTERS), trusted)
            yield Part(text[done:stop], False)
            done, is_open = stop, True
        forgotten = max(0, done - SEPARATOR_CHARACTERS)
        text, done = text[forgotten:], done - forgotten
    if is_open or done < len(text):
        yield from cut(text[done:], True)
