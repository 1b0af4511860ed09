"""Text files as documents."""

import importlib.resources
import re
from pathlib import Path

from dseekjax.data.config import SourceConfig
from dseekjax.errors import UserError

BUILTIN = "builtin:"


def read_documents(source: SourceConfig, field: str) -> list[str]:
    """All documents of a text file, in order.

    Args:
        source: what to read.
        field: name of the config key, for messages.

    Raises:
        UserError: the file is missing, empty, binary or not UTF-8.
    """
    content = _read(source.path, field)
    where = f"{field}: {source.path}"
    if b"\0" in content:
        raise UserError(f"{where} is a binary file (it has a NUL byte at {content.index(0)}); give a text file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 (byte {error.start} is 0x{content[error.start]:02x}); convert it with "
            "`iconv -f ENCODING -t UTF-8`"
        ) from error
    pieces = [text] if source.document_separator is None else re.split(source.document_separator, text)
    documents = [piece for piece in pieces if piece and not piece.isspace()]
    if not documents:
        raise UserError(f"{where} holds no text; give a file with at least one line")
    return documents


def _read(path: str, field: str) -> bytes:
    if path.startswith(BUILTIN):
        file = importlib.resources.files("dseekjax.data") / "texts" / f"{path.removeprefix(BUILTIN)}.txt"
        if not file.is_file():
            raise UserError(f"{field}: there is no {path}; the only built-in text is builtin:emma")
        return file.read_bytes()
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UserError(
            f"{field}: cannot read {path} ({error.strerror}); give the path of a text file, relative to the "
            "folder that you start from"
        ) from error


def hold_out(documents: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Splits off the last `fraction` of the documents; a single document is cut at a line break."""
    if fraction == 0.0:
        return documents, []
    if len(documents) == 1:
        text = documents[0]
        cut = max(1, int(len(text) * (1 - fraction)))
        line_end = text.find("\n", cut, len(text) - 1) + 1
        cut = line_end or cut
        return [text[:cut]], [text[cut:]] if text[cut:] else []
    kept = max(1, min(len(documents) - 1, round(len(documents) * (1 - fraction))))
    return documents[:kept], documents[kept:]
