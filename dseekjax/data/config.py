"""What is read, and how it is cut into sequences."""

import re

from pydantic import Field, field_validator

from dseekjax.section import Section


class SourceConfig(Section):
    path: str = Field(description="A UTF-8 text file; `builtin:emma` is Jane Austen's novel, which is shipped.")
    weight: float = Field(1.0, gt=0, description="Share of this source among the sequences, relative to the others.")
    document_separator: str | None = Field(
        None, description="Regular expression at whose matches the file is cut into documents; null keeps it whole."
    )

    @field_validator("document_separator")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"is not a regular expression: {error}; see Python's re") from error
        return pattern


class DataConfig(Section):
    sources: tuple[SourceConfig, ...] = Field(
        (SourceConfig(path="builtin:emma", document_separator=r"(?m)^(?=CHAPTER )"),),
        min_length=1,
        description="What is trained on.",
    )
    evaluation_sources: tuple[SourceConfig, ...] = Field(
        (), description="What is evaluated on; when empty, the held-out part of the sources."
    )
    held_out_fraction: float = Field(
        0.1, ge=0, lt=1, description="Last part of each source's documents kept from training for evaluation."
    )
    sequence_length: int = Field(1024, gt=0, lt=2**31, description="Tokens per sequence.")
    tokenizer: str = Field(
        "bytes",
        description="bytes, train:N (a byte-pair vocabulary of N learned from the sources), or a tokenizer.json.",
    )
    end_of_document: str = Field("<|endoftext|>", description="Token put after each document.")
    cache_dir: str = Field("~/.cache/dseekjax", description="Where tokenised corpora are kept for the next run.")
    prefetch_batches: int = Field(4, gt=0, description="Batches read ahead of the step.")

    @field_validator("tokenizer")
    @classmethod
    def _trainable(cls, tokenizer: str) -> str:
        if tokenizer.startswith("train:") and not (tokenizer[6:].isdecimal() and int(tokenizer[6:]) >= 257):
            raise ValueError("train: needs a vocabulary size of at least 257 (256 bytes and the end of a document)")
        return tokenizer
