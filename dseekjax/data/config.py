"""What is read, and how it is cut into sequences."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from dseekjax.section import Section

END_OF_DOCUMENT = "<|endoftext|>"
MEANT_FOR_TRAINING = {
    "streaming": "what is evaluated on has to be prepared",
    "weight": "evaluation reads everything once",
    "max_epochs": "evaluation reads everything once",
}


def check_tokenizer(tokenizer: str) -> str:
    """Raises ValueError if it is no way to name a tokenizer."""
    if tokenizer.startswith("train:") and not (tokenizer[6:].isdecimal() and 257 <= int(tokenizer[6:]) < 2**31):
        raise ValueError("train: needs a vocabulary size of at least 257 (256 bytes and the end of a document)")
    return tokenizer


def check_separator(pattern: str) -> str:
    """Raises ValueError if it is no regular expression, or would make every character a document."""
    try:
        matches = re.findall(pattern, "aa")
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}; see Python's re") from error
    if len(matches) == 3:
        raise ValueError("matches everywhere; give what lies between two documents")
    return pattern


class CompletionConfig(Section):
    kind: Literal["completion"] = Field(
        "completion",
        description="What .jsonl and .parquet hold, where the loss counts a part of a document only. completion: a "
        "prompt, and what is to follow it, which counts. chat: messages, of which the assistant's count. Without a "
        "format documents are one text, which counts.",
    )
    prompt_field: str = Field("prompt", description="Of completion: the field that holds the prompt.")
    completion_field: str = Field("completion", description="Of completion: the field that holds what follows it.")


class ChatConfig(Section):
    kind: Literal["chat"] = Field("chat", description="Messages, of which those of the assistant count.")
    messages_field: str = Field(
        "messages", description="Of chat: the field that holds a list of objects with role and content."
    )
    template: str = Field(
        description="Of chat: how messages become text. chatml, plain (for tokenizers without tokens for chats), or "
        "the path of a Jinja template or of a tokenizer_config.json that has one, as tokenizers of Hugging Face do."
    )


def _kind(value: Any) -> str:
    return value.get("kind", "completion") if isinstance(value, dict) else getattr(value, "kind", "completion")


FormatConfig = Annotated[
    Annotated[CompletionConfig, Tag("completion")] | Annotated[ChatConfig, Tag("chat")], Discriminator(_kind)
]


class SourceConfig(Section):
    path: str = Field(
        description="A folder made by `python -m dseekjax.prepare`, or text, .jsonl or .parquet, .gz and .zst too, or "
        "a pattern of such files as in 'texts/**/*.txt'; `builtin:emma` is Jane Austen's novel, which is shipped."
    )
    weight: float = Field(
        1.0,
        ge=0,
        description="Share of this source among the sequences, relative to the others. A run may go on with other "
        "weights: each source then goes on where it is.",
    )
    max_epochs: int | None = Field(
        None,
        gt=0,
        description="How often it may be read in all; then the other sources share what it would have had. null is "
        "without end.",
    )
    text_field: str = Field("text", description="Of .jsonl and .parquet: the field that holds a document's text.")
    format: FormatConfig | None = None
    document_separator: str | None = Field(
        None,
        description="Regular expression at whose matches text files are cut into documents; null keeps them whole.",
    )
    streaming: bool = Field(
        False,
        description="Tokenises files while they are read, again in each run, instead of preparing them first: slower, "
        "shuffled within 1024 sequences only, by every process, and nothing is held out.",
    )

    @field_validator("document_separator")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        return None if pattern is None else check_separator(pattern)

    @model_validator(mode="after")
    def _streams_without_end(self) -> Self:
        if self.streaming and self.max_epochs is not None:
            raise ValueError(
                f"max_epochs {self.max_epochs} is not known to a source with streaming; prepare it, or leave it out"
            )
        if self.streaming and self.format is not None:
            raise ValueError(
                f"format {self.format.kind} is not known to a source with streaming; leave streaming out, and it is "
                "prepared first"
            )
        return self


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
        0.1,
        ge=0,
        lt=1,
        description="About this share of each source's text, the last of it, is kept from training for evaluation.",
    )
    sequence_length: int = Field(1024, gt=0, lt=2**31, description="Tokens per sequence.")
    packing: Literal["concatenate", "first_fit"] = Field(
        "concatenate",
        description="concatenate: documents follow each other and are cut where a sequence ends. first_fit: each goes "
        "into the first sequence with room for it, and only those longer than a sequence are cut; the rest is padding.",
    )
    tokenizer: str | None = Field(
        None,
        description="bytes, train:N (a byte-pair vocabulary of N learned from the sources), or a tokenizer.json; null "
        "is that of the sources which are prepared, or else bytes.",
    )
    end_of_document: str | None = Field(
        None,
        description="Token put after each document; null is that of the sources which are prepared, or <|endoftext|>.",
    )
    cache_dir: str = Field("~/.cache/dseekjax", description="Where tokenised files are kept for the next run.")
    prefetch_batches: int = Field(4, gt=0, description="Batches read ahead of the step.")

    @field_validator("tokenizer")
    @classmethod
    def _trainable(cls, tokenizer: str | None) -> str | None:
        return tokenizer if tokenizer is None else check_tokenizer(tokenizer)

    @model_validator(mode="after")
    def _something_to_read(self) -> Self:
        if not any(source.weight for source in self.sources):
            raise ValueError("sources all have the weight 0; give one of them more")
        total = sum(source.weight for source in self.sources)
        for i, source in enumerate(self.sources):
            if 0 < source.weight < total * 1e-9:
                raise ValueError(f"sources.{i}.weight {source.weight} is less than a billionth of all; 0 leaves it out")
        for i, source in enumerate(self.evaluation_sources):
            for field, sense in MEANT_FOR_TRAINING.items():
                if getattr(source, field) != SourceConfig.model_fields[field].default:
                    value = str(getattr(source, field)).lower()
                    raise ValueError(f"evaluation_sources.{i}.{field} is {value}, but {sense}; leave it out")
        return self
