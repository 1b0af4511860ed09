"""What is in a corpus, for people to look at."""

import sys
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dseekjax.data.corpus import Corpus
from dseekjax.data.held_out import hold_out
from dseekjax.data.manifest import Manifest
from dseekjax.data.packing import first_fit, pieces
from dseekjax.errors import UserError

PIPED_WIDTH = 120
SAMPLE_TOKENS = 80
NUM_FREQUENT = 20
COUNTED_TOKENS = 1 << 26
PACKED_BLOCKS = 8
QUANTILES = {"shortest": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}


class Packing(BaseModel):
    """How documents fit into sequences."""

    sequence_length: int
    documents_cut: float = Field(description="Share of documents that are longer than a sequence.")
    first_fit_filled: float = Field(description="Share of positions that hold a token, with first_fit.")
    concatenate_counted: float = Field(
        description="Share of positions that count in the loss, with concatenate: not those at the end of a document, "
        "nor those before a token of a prompt."
    )


class Inspection(BaseModel):
    """Figures of a corpus."""

    manifest: Manifest
    document_tokens: dict[str, float] = Field(description="Quantiles and mean of the tokens of a document.")
    packing: Packing
    num_counted: int = Field(description="Tokens that frequencies were counted over.")
    num_different: int = Field(description="Different tokens among those.")
    frequent: list[tuple[str, int]] = Field(description="The most frequent tokens, with their counts.")
    samples: list[str] = Field(description="Beginnings of documents, decoded.")


def inspect_corpus(corpus: Corpus, sequence_length: int, num_samples: int) -> Inspection:
    """Looks through a corpus.

    Args:
        corpus: open.
        sequence_length: tokens, for packing.
        num_samples: how many documents to decode.
    """
    lengths = np.diff(corpus.document_ends, prepend=0)
    quantiles = {name: float(np.quantile(lengths, q)) for name, q in QUANTILES.items()}
    counts = _count_tokens(corpus)
    frequent = np.argsort(-counts, kind="stable")[: min(NUM_FREQUENT, np.count_nonzero(counts))]
    return Inspection(
        manifest=corpus.manifest,
        document_tokens={**quantiles, "mean": float(lengths.mean())},
        packing=Packing(
            sequence_length=sequence_length,
            documents_cut=float((lengths > sequence_length + 1).mean()),
            first_fit_filled=_filled(corpus, sequence_length),
            concatenate_counted=_num_targets(corpus) / corpus.manifest.num_tokens,
        ),
        num_counted=int(counts.sum()),
        num_different=int(np.count_nonzero(counts)),
        frequent=[(corpus.tokenizer.decode([i], skip_special_tokens=False), int(counts[i])) for i in frequent.tolist()],
        samples=[_sample(corpus, i) for i in _spread(len(lengths), num_samples)],
    )


def print_inspection(inspection: Inspection) -> None:
    """Figures and samples, in the terminal."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    manifest, packing = inspection.manifest, inspection.packing
    num_shards = sum(name.startswith("tokens-") for name in manifest.files)
    shown = {
        "documents": f"{manifest.num_documents:,} of {manifest.num_inputs:,} files",
        "tokens": f"{manifest.num_tokens:,} in {manifest.dtype}, {num_shards:,} shards",
        "text": f"{manifest.num_bytes / 1e6:,.1f} MB, {manifest.num_bytes / manifest.num_tokens:.2f} bytes per token",
        "left out": f"{manifest.left_out.num_malformed:,} lines, {manifest.left_out.num_empty:,} empty documents",
        "tokenizer": f"{manifest.tokenizer[:12]}, documents end with {manifest.end_of_document}",
        "tokens of a document": ", ".join(f"{name} {value:,.0f}" for name, value in inspection.document_tokens.items()),
        f"sequences of {packing.sequence_length}": f"{packing.documents_cut:.1%} of documents are longer; first_fit "
        f"fills {packing.first_fit_filled:.1%}; of concatenate {packing.concatenate_counted:.1%} counts",
        "tokens in use": f"{inspection.num_different:,} different ones among {inspection.num_counted:,}",
        "most frequent": "  ".join(f"{token!r} {count:,}" for token, count in inspection.frequent),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in shown.items():
        table.add_row(name, escape(value))
    console.print(table)
    for sample in inspection.samples:
        console.print(f"\n[dim]—[/dim] {escape(sample)}")


def plot_lengths(corpus: Corpus, path: Path) -> None:
    """A picture of how long documents are, and in documents of which length the tokens are.

    Raises:
        UserError: it cannot be written.
    """
    from matplotlib.figure import Figure

    lengths = np.diff(corpus.document_ends, prepend=0)
    edges = np.unique(np.geomspace(max(1, lengths.min()), lengths.max() + 1, 60).astype(np.int64))
    edges = np.append(edges, edges[-1] + 1) if len(edges) < 2 else edges
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for weights, label in ((np.ones(len(lengths)), "documents"), (lengths, "tokens")):
        shares, _ = np.histogram(lengths, edges, weights=weights / weights.sum())
        axes.stairs(
            100 * shares, edges, label=label, fill=label == "documents", alpha=0.5 if label == "documents" else 1
        )
    axes.set(xscale="log", xlabel="tokens of a document", ylabel="share in %")
    axes.set_title(f"{corpus.path.name}: {len(lengths):,} documents, {corpus.manifest.num_tokens:,} tokens")
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--picture {path}: cannot write it ({reason}); give a file ending in .png or .svg") from error


def _count_tokens(corpus: Corpus) -> np.ndarray:
    """How often each token occurs, at the beginnings of shards where there are many."""
    share = COUNTED_TOKENS // len(corpus.tokens.shards)
    size = corpus.tokenizer.get_vocab_size(with_added_tokens=True)
    counted = [np.bincount(shard[:share], minlength=size) for shard in corpus.tokens.shards]
    counts = np.zeros(max(map(len, counted)), np.int64)
    for some in counted:
        counts[: len(some)] += some
    return counts


def _num_targets(corpus: Corpus) -> int:
    """Tokens that count and are not the first of a document, which nothing comes before."""
    ends = np.asarray(corpus.document_ends)
    if corpus.mask is None:
        return corpus.manifest.num_tokens - len(ends)
    firsts = np.concatenate([[0], ends[:-1]])
    return corpus.manifest.num_tokens - int((corpus.mask.count(firsts + 1, ends) + 1).sum())


def _filled(corpus: Corpus, sequence_length: int) -> float:
    """Share of positions filled by first-fit packing, of the first blocks of documents where there are many."""
    whole, _ = hold_out(corpus, 0.0)
    tokens = positions = 0
    for _, (_, lengths) in zip(range(PACKED_BLOCKS), pieces(whole, sequence_length), strict=False):
        if len(lengths):
            tokens += int(lengths.sum())
            positions += (int(first_fit(lengths, sequence_length).max()) + 1) * sequence_length
    return tokens / positions if positions else 0.0


def _spread(total: int, number: int) -> list[int]:
    return np.unique(np.linspace(0, total - 1, min(number, total)).astype(int)).tolist()


def _sample(corpus: Corpus, document: int) -> str:
    start = int(corpus.document_ends[document - 1]) if document else 0
    length = int(corpus.document_ends[document]) - start
    text = corpus.tokenizer.decode(corpus.tokens.read(start, min(length, SAMPLE_TOKENS)).tolist())
    return f"document {document:,}, {length:,} tokens: {' '.join(text.split())}" + (
        " …" if length > SAMPLE_TOKENS else ""
    )
