"""From the data config to open corpora, tokenising what was not tokenised before."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from dseekjax.data.config import DataConfig
from dseekjax.data.corpus import FORMAT, Corpus, open_corpus, write_corpus
from dseekjax.data.text import hold_out, read_documents
from dseekjax.data.tokenizers import (
    bytes_tokenizer,
    end_of_document_id,
    fingerprint,
    load_tokenizer,
    train_tokenizer,
)
from dseekjax.errors import UserError


@dataclass(frozen=True)
class PreparedData:
    """All that batches are made from."""

    tokenizer: tokenizers.Tokenizer
    training: tuple[Corpus, ...]
    """One per source, in the config's order."""
    evaluation: tuple[Corpus, ...]
    """One per source that has held-out documents, or per evaluation source."""

    @property
    def identity(self) -> list[str]:
        """Hashes of what is trained on; equal identities mean equal batches."""
        return [corpus.identity for corpus in self.training]


def prepare(
    config: DataConfig,
    *,
    vocabulary_size: int,
    kept_tokenizer: Path | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> PreparedData:
    """Reads, splits and tokenises every source, or opens what an earlier call left in the cache.

    Args:
        config: the sources and the tokenizer.
        vocabulary_size: rows of the model's embedding.
        kept_tokenizer: the tokenizer.json of an earlier start of the same run; used where the file exists, so that a
            resumed run keeps the very tokenizer that it began with.
        tell: called with sentences for the user before something that may take long.

    Raises:
        UserError: a source cannot be read, or the tokenizer does not fit the model.
    """
    split = [
        hold_out(
            read_documents(source, f"data.sources.{i}.path"),
            0.0 if config.evaluation_sources else config.held_out_fraction,
        )
        for i, source in enumerate(config.sources)
    ]
    evaluation = {f"the held-out part of data.sources.{i}": documents for i, (_, documents) in enumerate(split)}
    if config.evaluation_sources:
        evaluation = {
            f"data.evaluation_sources.{i}": read_documents(source, f"data.evaluation_sources.{i}.path")
            for i, source in enumerate(config.evaluation_sources)
        }
    if kept_tokenizer is not None and kept_tokenizer.is_file():
        try:
            tokenizer = load_tokenizer(kept_tokenizer)
        except UserError as error:
            raise UserError(f"run.dir: {kept_tokenizer} is damaged; remove it, and it will be made anew") from error
    else:
        tokenizer = _tokenizer(config, [document for documents, _ in split for document in documents])
    # Not the number of tokens: ids may leave gaps.
    needed = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if needed > vocabulary_size:
        raise UserError(
            f"model.vocabulary_size {vocabulary_size} is smaller than the tokenizer's {needed} tokens; set it to "
            f"at least {needed}"
        )
    end_token = end_of_document_id(tokenizer, config.end_of_document)
    cache = Path(config.cache_dir).expanduser() / "corpora"
    key = fingerprint(tokenizer) + config.end_of_document

    def corpus(documents: list[str], label: str) -> Corpus:
        path = cache / _content_key(documents, key)
        if not path.is_dir():
            tell(f"Tokenising {len(documents):,} documents into {path}.")
            write_corpus(path, documents, tokenizer, end_token)
        return open_corpus(path, label)

    return PreparedData(
        tokenizer,
        tuple(corpus(documents, f"data.sources.{i}") for i, (documents, _) in enumerate(split)),
        tuple(corpus(documents, label) for label, documents in evaluation.items() if documents),
    )


def _tokenizer(config: DataConfig, documents: list[str]) -> tokenizers.Tokenizer:
    if config.tokenizer == "bytes":
        return bytes_tokenizer(config.end_of_document)
    if config.tokenizer.startswith("train:"):
        size = int(config.tokenizer.removeprefix("train:"))
        return train_tokenizer(documents, size, config.end_of_document)
    return load_tokenizer(Path(config.tokenizer).expanduser())


def _content_key(documents: list[str], tokenizer_key: str) -> str:
    digest = hashlib.sha256(f"{FORMAT} {tokenizer_key}".encode())
    for document in documents:
        content = document.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]
