"""Small corpora in memory and on disk."""

from pathlib import Path

import numpy as np

from dseekjax.data.corpus import Corpus, Portion
from dseekjax.data.endless import Shuffled, order_key
from dseekjax.data.manifest import File, LeftOut, Manifest
from dseekjax.data.packing import PackingIndex, first_fit, pieces
from dseekjax.data.preparation.pipeline import Recipe, prepare_corpus
from dseekjax.data.reading.inputs import Format, find_inputs
from dseekjax.data.records import Concatenated, Packed
from dseekjax.data.tokenizers import bytes_tokenizer, fingerprint
from dseekjax.data.tokens import Tokens

END = "<|endoftext|>"
TEXTS = [f"Document {i} of some, with an umlaut: ü.\n" * (1 + i % 9) for i in range(300)]


def portion(lengths, first_token=0, tokens_per_shard=37):
    """Documents whose tokens all differ, in shards that records straddle."""
    ends = np.cumsum(lengths)
    tokens = np.arange(first_token, first_token + ends[-1]).astype(np.uint32)
    shards = [tokens[start : start + tokens_per_shard] for start in range(0, len(tokens), tokens_per_shard)]
    manifest = Manifest(
        dtype="uint32",
        num_tokens=int(ends[-1]),
        num_documents=len(lengths),
        num_bytes=int(ends[-1]),
        tokens_per_shard=tokens_per_shard,
        end_of_document=END,
        end_token=0,
        tokenizer="",
        made_from="",
        num_inputs=0,
        input_bytes=0,
        left_out=LeftOut(),
        files={"tokens.bin": File(size=0, sha256=str((first_token, *lengths)))},
    )
    corpus = Corpus(Path("nowhere"), manifest, Tokens(shards, tokens_per_shard), ends, np.asarray(lengths))
    return Portion(corpus, 0, int(ends[-1]), int(ends[-1]))


def records(lengths, sequence_length, packing="concatenate", first_token=0):
    """A corpus in memory cut into records."""
    whole = portion(lengths, first_token)
    return cut(whole, sequence_length, packing)


def cut(some, sequence_length, packing):
    """A portion cut into records, its packing kept in memory."""
    if packing == "concatenate":
        return Concatenated.of(some, sequence_length)
    starts, found = (np.concatenate(column) for column in zip(*pieces(some, sequence_length), strict=True))
    bins = first_fit(found, sequence_length)
    order = np.argsort(bins, kind="stable")
    index = PackingIndex(np.cumsum([0, *np.bincount(bins)]), starts[order], found[order])
    return Packed.of(some, index, sequence_length)


def shuffled(lengths_of_each, sequence_length, packing="concatenate", seed=0):
    """A source for each list of document lengths, their tokens a hundred thousand apart."""
    return [
        Shuffled(records(lengths, sequence_length, packing, i * 100_000), order_key(seed, i))
        for i, lengths in enumerate(lengths_of_each)
    ]


def bytes_recipe(*patterns, text_field="text", document_separator=None, strict=False):
    """Files to be tokenised as bytes."""
    tokenizer = bytes_tokenizer(END)
    format = Format(text_field, document_separator, strict)
    return Recipe(find_inputs(map(str, patterns)), format, END, fingerprint(tokenizer), lambda: tokenizer)


def prepare(output, *patterns, workers=1, **options):
    """A corpus of bytes on disk."""
    return prepare_corpus(bytes_recipe(*patterns, **options), output, workers=workers)


def documents_of(corpus):
    """The documents of a corpus, decoded, without their end tokens."""
    starts = [0, *corpus.document_ends[:-1].tolist()]
    found = []
    for start, end in zip(starts, corpus.document_ends.tolist(), strict=True):
        *ids, last = corpus.tokens.read(start, end - start).tolist()
        assert last == corpus.manifest.end_token
        found.append(corpus.tokenizer.decode(ids, skip_special_tokens=False))
    return found
