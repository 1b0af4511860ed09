"""The last part of a corpus kept from training, to evaluate on."""

import numpy as np
from jaxtyping import Int

from dseekjax.data.corpus import Corpus, Portion
from dseekjax.errors import UserError

DECODED_TOKENS = 1 << 16


def hold_out(corpus: Corpus, fraction: float, label: str = "a source") -> tuple[Portion, Portion | None]:
    """Splits off about the last `fraction` of the text, at the end of a document if one is near.

    Else a document is cut, at the end of a line if one is near; those of which a part only counts stay whole.

    Raises:
        UserError: it is a single one of which a part only counts.
    """
    total = corpus.manifest.num_tokens
    all_bytes = corpus.manifest.num_bytes if corpus.mask is None else int(corpus.counted_bytes.sum())
    if fraction == 0.0:
        return Portion(corpus, 0, total, all_bytes, label), None
    if corpus.mask is not None and len(corpus.document_ends) == 1:
        raise UserError(f"{label} is a single example, and none can be held out; give more, or hold out none")
    count, share = place_to_cut(corpus.document_bytes, fraction, may_cut=corpus.mask is None)
    cut, num_bytes = int(corpus.document_ends[count - 1]) if count else 0, int(corpus.counted_bytes[:count].sum())
    if share:
        stop = int(corpus.document_ends[count])
        # What is held out needs two tokens: one to predict the other from.
        cut = _line_start(corpus, max(1, min(cut + int((stop - cut) * share), total - 2)), stop)
        num_bytes += int(corpus.document_bytes[count]) - _text_bytes(corpus, cut, stop)
    held_out = f"the held-out part of {label}"
    rest = Portion(corpus, cut, total, all_bytes - num_bytes, held_out) if cut < total else None
    return Portion(corpus, 0, cut, num_bytes, label), rest


def place_to_cut(document_bytes: Int[np.ndarray, "documents"], fraction: float, *, may_cut: bool) -> tuple[int, float]:
    """Where the last `fraction` of some documents begins: the documents before, and the share of the next that is too.

    Between two documents if both sides get from half to twice of what they should, else within one if that may be cut.
    """
    ends = np.cumsum(document_bytes)
    total, wanted = float(ends[-1]), float(ends[-1]) * fraction
    document = min(int(np.searchsorted(ends, total - wanted)), len(ends) - 1)
    between = [count for count in (document, document + 1) if 0 < count < len(ends)]
    left = {count: total - float(ends[count - 1]) for count in between}
    if may_cut:
        shares = ((count, size / wanted, (total - size) / (total - wanted)) for count, size in left.items())
        left = {count: left[count] for count, *both in shares if all(0.5 <= share <= 2 for share in both)}
    if left:
        return min(left, key=lambda count: abs(left[count] - wanted)), 0.0
    before = float(ends[document - 1]) if document else 0.0
    return document, (total - wanted - before) / max(1.0, float(ends[document]) - before)


def _text_bytes(corpus: Corpus, start: int, stop: int) -> int:
    """Bytes of the text that some tokens are of, decoded a little at a time."""
    num_bytes = 0
    while start < stop:
        end = start + DECODED_TOKENS
        end = _line_start(corpus, end, stop) if end < stop else stop
        num_bytes += len(corpus.tokenizer.decode(corpus.tokens.read(start, end - start).tolist()).encode())
        start = end
    return num_bytes


def _line_start(corpus: Corpus, near: int, stop: int) -> int:
    """Where a line begins at or soon after a token, in the first half of what is up to another, or just that token."""
    window = corpus.tokens.read(near, min(4096, (stop - near - 1) // 2)).tolist()
    for place, token in enumerate(window):
        if corpus.tokenizer.decode([token]).endswith("\n"):
            return near + place + 1
    return near


def describe(label: str, kept: Portion, rest: Portion) -> list[str]:
    """Sentences for the user on what `hold_out` made of a source."""
    sizes = [_size(portion) for portion in (kept, rest)]
    parts = [f"{_count(portion)}, {_bytes(size)}" for portion, size in zip((kept, rest), sizes, strict=True)]
    verbs = ["is" if portion.num_documents == 1 else "are" for portion in (kept, rest)]
    share = sizes[1] / max(1, sum(sizes))
    told = [f"{label}: {parts[0]}, {verbs[0]} trained on; {parts[1]}, {share:.1%}, {verbs[1]} held out."]
    if share > 0.5:
        told.append(
            f"Note: less than half of {label} is trained on; to train on more, lower data.held_out_fraction, or give "
            "data.evaluation_sources."
        )
    return told


def _size(portion: Portion) -> int:
    """Bytes of all its text, also of what does not count."""
    corpus = portion.corpus
    if corpus.mask is None:
        return portion.num_bytes
    first, after = np.searchsorted(corpus.document_ends, [portion.start, portion.stop], side="right")
    return int(corpus.document_bytes[first:after].sum())


def _count(portion: Portion) -> str:
    return f"{portion.num_documents:,} document{'' if portion.num_documents == 1 else 's'}"


def _bytes(size: int) -> str:
    if size == 1:
        return "1 byte"
    return f"{size:,} bytes" if size < 10_000 else f"{size / 1e6:,.3f} MB"
